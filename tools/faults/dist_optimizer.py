"""The faults in the feature ``dist_optimizer``."""

from __future__ import annotations

from typing import Final

from tools.faults.fault import Fault

_SHARDING: Final = "plugins/ovpatch_plugins/dist_optimizer/"
_SHARDING_TESTS: Final = "tests/plugins/dist_optimizer/"
# Cases of three ranks, of which no rank waits for the timeout.
_RUN_AHEAD: Final = (
    _SHARDING_TESTS
    + "test_orders_by_rank.py::test_hosts_that_run_ahead_compute_what_stock_pytorch_does_or_all_raise[3]"
)

FAULTS: Final = (
    Fault(
        "local gradients that the script restores count as reduced",
        _SHARDING + "sharded_grads.py",
        "        model.is_local |= grad is not None and grad is not last\n",
        "",
        ("tests/plugins/dist_optimizer/test_put_aside.py",),
    ),
    Fault(
        "a fused step unscales this rank's part of a full gradient only",
        _SHARDING + "sharded_optimizer.py",
        'is_unscaling = vars(optimizer).get("grad_scale") is not None',
        "is_unscaling = False",
        (
            "tests/plugins/dist_optimizer/test_fused_scaler.py",
            "tests/habits/test_fuzz.py::test_cells_that_random_runs_found_are_as_in_stock_pytorch",
        ),
    ),
    Fault(
        "a norm is that of this rank's shard",
        _SHARDING + "clip_grad.py",
        "    dist.all_reduce(powers, group=group)\n",
        "",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "ranks that differ share the steps of an optimizer",
        _SHARDING + "sharded_optimizer.py",
        "hashes=hashes.get(model, NO_HASHES)",
        "hashes=NO_HASHES",
        (_SHARDING_TESTS + "test_different_ranks.py",),
    ),
    Fault(
        "a hash does not depend on the places of words",
        _SHARDING + "agreement.py",
        "weighted.mul_(weights[: words.numel()]).sum()",
        "weighted.sum()",
        (_SHARDING_TESTS + "test_different_ranks.py",),
    ),
    Fault(
        "lazy state hides parameters that differ",
        _SHARDING + "agreement.py",
        "for found in map(hash_content, (params, state))",
        "for found in [hash_content((params, state))] * 2",
        (_SHARDING_TESTS + "test_different_ranks.py",),
    ),
    Fault(
        "a step in inference mode finds no node of a parameter",
        _SHARDING + "param_all_gather.py",
        "        with outside_modes():\n            self._nodes = [\n",
        "        if True:\n            self._nodes = [\n",
        (_SHARDING_TESTS + "test_modes.py",),
    ),
    Fault(
        "an infinity on another rank is lost",
        _SHARDING + "clip_grad.py",
        "found[device].copy_(seen)",
        "pass",
        (_SHARDING_TESTS + "test_scaler.py",),
    ),
    Fault(
        "an interrupted swap is not completed",
        _SHARDING + "sharded_optimizer.py",
        "                    if state.is_swapped:\n",
        "                    if False:\n",
        (_SHARDING_TESTS + "test_interrupted_swaps.py",),
    ),
    Fault(
        "a norm is not counted",
        _SHARDING + "clip_grad.py",
        "COUNTERS.norms += 1",
        "COUNTERS.norms += 0",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "norms of half precision are computed in half precision",
        _SHARDING + "sharded_bucket.py",
        "[shard.to(wide) for shard in shards]",
        "list(shards)",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "a stream does not wait for what arrives on another one",
        _SHARDING + "param_all_gather.py",
        "for work in finished.works if finished.event is None else (finished.event,):",
        "for work in finished.works[:0]:",
        ("tests/overlap/test_side_streams.py",),
    ),
    Fault(
        "a compiled step works on shards",
        _SHARDING + "step_patches.py",
        "if torch.compiler.is_compiling() or get_dynamo_callback() is not None:",
        "if torch.compiler.is_compiling():",
        ("tests/plugins/test_compiled.py::test_dynamo_does_what_it_does_in_stock_pytorch",),
    ),
    Fault(
        "a subclass whose step torch has written is unknown",
        _SHARDING + "step_patches.py",
        'if "_init_group" in vars(base) or not _inherits_step(base):',
        'if {"step", "_init_group"} & set(vars(base)):',
        (_SHARDING_TESTS + "test_subclasses.py",),
    ),
    Fault(
        "a step that a class has kept from before apply() counts as patched",
        _SHARDING + "step_patches.py",
        'return _without_hooks(vars(cls)["step"]) is _without_hooks(inherited)',
        "return inherited is not None",
        (_SHARDING_TESTS + "test_subclasses.py",),
    ),
    Fault(
        "a vote that a promise has ended is reported as another order",
        _SHARDING + "agreement.py",
        "elif outcome == _ENDS:\n            # A rank has promised to end this vote to a peer that "
        "missed the rank.\n"
        "            self._end(_REASON_MISSING)",
        "elif outcome == _ENDS:\n            self._end(_REASON_ORDER)",
        (_SHARDING_TESTS + "test_step_votes.py",),
    ),
    Fault(
        "a vote does not name its subject",
        _SHARDING + "agreement.py",
        "        if high != -low:\n",
        "        if False:\n",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "orders that differ stay unnoticed where ranks do not vote",
        _SHARDING + "sharded_grads.py",
        "hash((self.votes.digest, tag, self.backwards))",
        "hash((self.votes.digest, self.backwards))",
        (_RUN_AHEAD,),
    ),
    Fault(
        "a rank falls back alone while peers raise errors",
        _SHARDING + "sharded_optimizer.py",
        "        if groups_ahead:\n",
        "        if False:\n",
        (_RUN_AHEAD,),
    ),
    Fault(
        "a vote that a promise has ended does not report that peers have continued",
        _SHARDING + "agreement.py",
        "            self.has_peers_ahead = any(",
        "            self.has_peers_ahead = not missing and any(",
        (_RUN_AHEAD,),
    ),
    Fault(
        "a read of parameters does not wait until hosts have compared their steps",
        _SHARDING + "param_all_gather.py",
        "None if shards.step_barrier is None else shards.step_barrier.finish",
        "None",
        (_RUN_AHEAD,),
    ),
    Fault(
        "ranks unscale different optimizers together where they do not vote",
        _SHARDING + "clip_grad.py",
        "and shards.votes.num_optimizers > 1",
        "and False",
        (_RUN_AHEAD,),
    ),
    Fault(
        "models are gathered in the order of the optimizer's parameters",
        _SHARDING + "sharded_grads.py",
        "return sorted(dict.fromkeys(models), key=lambda shards: (shards.group.group_name, "
        "shards.identity))",
        "return list(dict.fromkeys(models))",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "steps that cross wait for each other",
        _SHARDING + "agreement.py",
        "return rank == path[0]",
        "return False",
        (_SHARDING_TESTS + "test_two_groups.py",),
    ),
    Fault(
        "state of a model that was wrapped again is kept",
        _SHARDING + "sharded_optimizer.py",
        "self._drop_model(optimizer, former)",
        "pass",
        (_SHARDING_TESTS + "test_leaks.py",),
    ),
    Fault(
        "a stock optimizer keeps its shards",
        _SHARDING + "sharded_optimizer.py",
        "            finalizer.detach()",
        "            pass",
        (_SHARDING_TESTS + "test_leaks.py",),
    ),
    Fault(
        "a vote does not report that a rank leaves",
        _SHARDING + "agreement.py",
        "(outcome, vote.spans_groups, vote.tag, -vote.tag, ",
        "(_AGREES, vote.spans_groups, vote.tag, -vote.tag, ",
        (
            _SHARDING_TESTS
            + "test_local_afterwards.py::test_one_rank_alone_may_add_local_gradients",
        ),
    ),
    Fault(
        "a rank forgets the votes that it has left",
        _SHARDING + "agreement.py",
        "self._wait(*self._left.popleft(), vote)",
        "self._left.popleft()",
        (_SHARDING_TESTS + "test_step_votes.py",),
    ),
    Fault(
        "a rank that left a vote does not learn that its peers have ended the votes",
        _SHARDING + "agreement.py",
        "lambda: self.reason or max(",
        "lambda: max(",
        (_SHARDING_TESTS + "test_step_votes.py",),
    ),
    Fault(
        "a vote inherits the modes of the script",
        _SHARDING + "agreement.py",
        "            with outside_modes():\n                return self._all_reduce(vote)",
        "            if vote:\n                return self._all_reduce(vote)",
        (_SHARDING_TESTS + "test_modes.py",),
    ),
    Fault(
        "a vote does not name its kind",
        _SHARDING + "vote_tags.py",
        'f"{kind} {shards.identity}"',
        'f"{shards.identity}"',
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "a vote does not name its parameters",
        _SHARDING + "sharded_optimizer.py",
        "(number, *sorted(sharded.index for sharded in params))",
        "(number,)",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "a failed step leaves shards in the groups",
        _SHARDING + "sharded_param.py",
        "            return function(*args, **kwargs)\n"
        "        finally:\n"
        "            for group, params in groups:\n"
        '                group["params"] = params\n'
        "    finally:\n",
        "            return function(*args, **kwargs)\n"
        "        except OSError:\n"
        "            raise\n"
        "        else:\n"
        "            for group, params in groups:\n"
        '                group["params"] = params\n'
        "    except OSError:\n",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "an interrupted step counts as running",
        _SHARDING + "sharded_optimizer.py",
        "            finally:\n                self._is_stepping = False",
        "            except OSError:\n                raise\n"
        "            else:\n                self._is_stepping = False",
        (_SHARDING_TESTS + "test_interrupted_swaps.py",),
    ),
    Fault(
        "an interrupted step loses its update",
        _SHARDING + "sharded_optimizer.py",
        "            self._sync.keep_update()",
        "            pass",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "an interrupted update of state does not end",
        _SHARDING + "sharded_state.py",
        "        finally:\n"
        "            # Peers wait for the end of a version that has begun, whatever error ended "
        "the step.\n",
        "        except OSError:\n            raise\n        else:\n",
        (_SHARDING_TESTS + "test_state.py",),
    ),
    Fault(
        "a dropped model takes its shards along",
        _SHARDING + "sharded_grads.py",
        "weakref.finalize(self._reducer(), retention.retain, self.group, self._peers).atexit = "
        "False",
        "pass",
        (_SHARDING_TESTS + "test_local_afterwards.py",),
    ),
    Fault(
        "a parameter that is frozen when its wrapper is freed is not watched",
        _SHARDING + "sharded_grads.py",
        "        if param is None:\n            continue\n        # The class of a pending",
        "        if param is None or not param.requires_grad:\n            continue\n        # The class of a pending",
        (_SHARDING_TESTS + "test_local_afterwards.py",),
    ),
    Fault(
        "shards of a dropped optimizer are freed before slower peers have read them",
        _SHARDING + "sharded_optimizer.py",
        "            retention.shorten_retention(model.group)\n",
        "            retention.shorten_retention(model.group)\n            retention.release_retained(model.group)\n",
        (_SHARDING_TESTS + "test_whole_parameters_state.py",),
    ),
    Fault(
        "a gradient that the script keeps is lost in the next backward",
        _SHARDING + "sharded_grads.py",
        "if self._is_own(grad) and grad is not self.params[index].grad",
        "if grad is None",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a step does not wait for readers",
        _SHARDING + "sharded_state.py",
        'PeerRpc.for_group(self.group).call(self._topic, {"next step": self._next_step}, self._shards.holders.peers)',
        "pass",
        (
            _SHARDING_TESTS
            + "test_state.py::test_a_rank_that_has_read_waits_until_its_peers_have_read_as_well",
        ),
    ),
    Fault(
        "parameters are gathered in the optimizer's order",
        _SHARDING + "param_sync.py",
        "sorted(params, key=lambda sharded: (models.index(sharded.shards), sharded.index))",
        "list(params)",
        (_SHARDING_TESTS + "test_orders_by_rank.py",),
    ),
    Fault(
        "a step overwrites parameters that another optimizer gathers",
        _SHARDING + "sharded_optimizer.py",
        "                    sharded_optimizer._sync.finish()",
        "                    pass",
        (_SHARDING_TESTS + "test_models.py",),
    ),
    Fault(
        "a microbatch is added to a lazy gradient",
        _SHARDING + "sharded_grads.py",
        "if self.has_lazy_grads and self.is_lazy(index):",
        "if False:",
        (_SHARDING_TESTS + "test_loop_styles.py",),
    ),
    Fault(
        "a staged gradient is no copy",
        _SHARDING + "sharded_bucket.py",
        "self._make_rows(i, self.params[i].grad).clone()",
        "self._make_rows(i, self.params[i].grad)",
        (_SHARDING_TESTS + "test_hooks_and_failures.py",),
    ),
    Fault(
        "a gradient whose memory the script holds is not filled",
        _SHARDING + "sharded_bucket.py",
        "states[index] = GradState.ALIASED",
        "states[index] = GradState.SHARDED",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "a gradient is read that the running backward has freed",
        _SHARDING + "sharded_grads.py",
        "if self._grads.states[index] is GradState.IN_FLIGHT:",
        "if False:",
        (_SHARDING_TESTS + "test_in_flight.py",),
    ),
    Fault(
        "the transport of parameters is chosen after the update",
        _SHARDING + "sharded_optimizer.py",
        "        if self._sync.copy_places:\n            self._sync.choose_transport()",
        "        pass",
        (
            _SHARDING_TESTS
            + "test_copy_engines.py::test_ranks_choose_the_transport_before_they_update",
        ),
    ),
    Fault(
        "the owner of moved state does not wait for its readers",
        _SHARDING + "sharded_optimizer.py",
        "                state.note_read()",
        "                pass",
        (
            _SHARDING_TESTS
            + "test_whole_parameters.py::test_a_rank_that_owns_all_moved_state_waits_for_its_readers",
        ),
    ),
    Fault(
        "updates by another owner are no writes",
        _SHARDING + "owned_state.py",
        "[self._writes.get(sharded.index, 1) for sharded in foreign]",
        "[0] * len(foreign)",
        (_SHARDING_TESTS + "test_whole_parameters.py",),
    ),
    Fault(
        "bytes of state: an optimizer that has ended counts",
        _SHARDING + "sharded_state.py",
        "        attached_values(self).pop(_BYTES, None)\n        retain(",
        "        retain(",
        (_SHARDING_TESTS + "test_state_bytes.py",),
    ),
    Fault(
        "bytes of state: an optimizer that fell back counts",
        _SHARDING + "sharded_state.py",
        "        attached_values(self).pop(_BYTES, None)\n        is_reachable",
        "        is_reachable",
        (_SHARDING_TESTS + "test_state_bytes.py",),
    ),
    Fault(
        "a main parameter misses the script's writes",
        _SHARDING + "main_params.py",
        "            self._refresh_main(mains, roundings)",
        "            pass",
        (_SHARDING_TESTS + "test_main_params.py",),
    ),
    Fault(
        "a gradient that was read is clipped without its shard",
        _SHARDING + "sharded_param.py",
        "model.reduced_shard(index).copy_(model.local_shard(index))",
        "pass",
        (_SHARDING_TESTS + "test_reads_of_gradients.py",),
    ),
    Fault(
        "the shards of each host count in norms",
        _SHARDING + "clip_grad.py",
        "if not shards.holders.is_first:",
        "if False:",
        ("tests/hosts/test_shards.py",),
    ),
    Fault(
        "a rank reads state from other hosts",
        _SHARDING + "sharded_state.py",
        "call(self._topic, arguments, holders.peers)",
        "call(self._topic, arguments)",
        ("tests/hosts/test_shards.py",),
    ),
    Fault(
        "the shard of a full gradient does not follow an update in place",
        _SHARDING + "sharded_param.py",
        "                    model.reduced_shard(index).copy_(model.local_shard(index))",
        "                    pass",
        (_SHARDING_TESTS + "test_clipping.py",),
    ),
    Fault(
        "a state dict replaces the tensors into which a loader writes",
        _SHARDING + "state_dicts.py",
        "                    value.data = kept\n",
        "                    shown[name] = kept\n",
        (
            _SHARDING_TESTS
            + "test_state.py::test_a_distributed_checkpoint_is_loaded_into_the_tensors_of_a_state_dict",
        ),
    ),
    Fault(
        "a model is sharded over hosts that cannot keep all state each",
        _SHARDING + "sharding_choice.py",
        'facts.objection_to_hosts(len(layout.ranks), objection) if objection else ""',
        '""',
        (
            _SHARDING_TESTS
            + "test_sharding_choice.py::test_a_model_on_several_hosts_is_not_sharded",
        ),
    ),
)
