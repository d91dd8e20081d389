"""Experts that differ from rank to rank get the gradients that one process with all experts computes."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ovpatch
from ovpatch_plugins.pipe_experts import (
    ExpertParallelFFN,
    MoEConfig,
    expert_data_parallel,
    run_experts,
)
from tests.plugins.ddp.checks import on, some
from tests.plugins.ddp.test_declared import InChunks
from tests.plugins.ddp.test_failures import Bomb
from tests.support.equality import compare
from tests.support.errors import error_of

# Experts of each rank.
LOCAL = 2
TOKENS = 12
FEATURES = {"stock": (), "ddp": ("ddp",), "sharded": ("ddp", "dist_optimizer")}


class Model(nn.Module):
    """A model of a dense layer, top-1 experts and a dense layer.

    Args:
        count: The number of experts of all ranks.
        group: The ranks that partition the experts, ``LOCAL`` each; None if this rank has all experts.
    """

    def __init__(self, count: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.router = nn.Linear(8, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 8, bias=False))
            for _ in range(count)
        )
        self.group, self.bombs = group, ""
        # The kind of checkpoint around the experts, or None.
        self.reentrant: bool | None = None
        self.config: MoEConfig | None = None

    def forward(self, x: torch.Tensor, closed: tuple[int, ...] = ()) -> torch.Tensor:
        h = self._bomb("late", torch.tanh(self.first(x)))
        logits = self.router(h)
        mask = logits.new_zeros(logits.shape[1]).index_fill(
            0, torch.tensor(closed, dtype=torch.long), -1e9
        )
        weights, chosen = (logits + mask).softmax(-1).max(-1)
        # A checkpoint sees all tensors that have gradients, because they are arguments.
        routed = h, weights, chosen
        kind = self.reentrant
        h = h + (
            self._mix(*routed)
            if kind is None
            else checkpoint(self._mix, *routed, use_reentrant=kind)
        )
        return self.last(self._bomb("early", h))

    def _mix(self, h: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if self.config is not None:
            return run_experts(
                self.experts, h, chosen[:, None], weights[:, None], self.group, self.config
            )
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        tokens = h[order]
        out = (
            self._here(tokens, counts)
            if self.group is None
            else self._elsewhere(tokens, counts, self.group)
        )
        return weights[:, None] * torch.zeros_like(h).index_copy(0, order, out)

    def _here(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run the experts of this rank; an expert without tokens gets no gradient."""
        parts = tokens.split(counts.tolist())
        return torch.cat(
            [
                expert(part) if len(part) else part
                for expert, part in zip(self.experts, parts, strict=True)
            ]
        )

    def _elsewhere(
        self, tokens: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ranks = group.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, got = (
            counts.view(ranks, LOCAL).sum(1).tolist(),
            arriving.view(ranks, LOCAL).sum(1).tolist(),
        )
        here = all_to_all_single(tokens.new_empty(sum(got), 8), tokens, got, sent, group=group)
        # Rows arrive by sender, then by expert. The experts need them by expert, then by sender.
        expert = torch.arange(LOCAL).repeat(ranks).repeat_interleave(arriving)
        order = expert.argsort(stable=True)
        out = self._here(here[order], expert.bincount(minlength=LOCAL))
        back = torch.zeros_like(out).index_copy(0, order, out)
        return all_to_all_single(torch.empty_like(tokens), back, sent, got, group=group)

    def _bomb(self, place: str, h: torch.Tensor) -> torch.Tensor:
        return Bomb.apply(h) if self.bombs == place else h


class Setup:
    """This rank's part of a model whose experts are partitioned among ``ep`` ranks, and the model of one process."""

    def __init__(self, ep: int, *, chunked: bool = False, spoil: bool = True, **ddp: Any) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ep, count = ep, LOCAL * ep
        blocks = [list(range(first, first + ep)) for first in range(0, self.world, ep)]
        copies = [list(range(first, self.world, ep)) for first in range(ep)]
        (tokens_group,) = (g for ranks in blocks if (g := _group(ranks)) is not None)
        (self.copies,) = (g for ranks in copies if (g := _group(ranks)) is not None)
        # The dense parameters have the same group.
        if ep == 1:
            self.copies = dist.distributed_c10d._get_default_group()
        torch.manual_seed(0)
        self.reference = Model(count)
        self.model = Model(count, tokens_group)
        self.offset = LOCAL * (self.rank % ep)
        self.model.load_state_dict(self.reference.state_dict())
        self.model.experts = self.model.experts[self.offset : self.offset + LOCAL]
        # The wrapper must give later copies the values of the first one.
        if spoil and self.rank >= ep:
            for param in self.model.experts.parameters():
                param.data.add_(1)
        if chunked:
            self.model.experts = nn.ModuleList(InChunks(expert) for expert in self.model.experts)
        self.ddp = expert_data_parallel(
            self.model, self.model.experts, self.copies if ep < self.world else None, **ddp
        )

    def data(self, step: int, rank: int) -> torch.Tensor:
        data = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        return data.to(self.model.last.weight.dtype)

    def loss(self, step: int, closed: int = 0) -> torch.Tensor:
        return self.ddp(self.data(step, self.rank), self.closed(closed, self.rank)).square().mean()

    def reference_loss(self, step: int, closed: int = 0) -> torch.Tensor:
        outs = [
            self.reference(self.data(step, r), self.closed(closed, r)) for r in range(self.world)
        ]
        return torch.stack([out.square().mean() for out in outs]).mean()

    def closed(self, kind: int, rank: int) -> tuple[int, ...]:
        """Return the experts that get no token from a rank, which differ between expert-parallel groups.

        Args:
            kind: 0: none; 1: all experts of one rank, whose copies on other ranks get some tokens; 2: one expert in
                each group; 3: all experts but one, the same in all groups.
            rank: The rank.
        """
        block, count = rank // self.ep, LOCAL * self.ep
        there = LOCAL * (block % self.ep)
        all_of_rank = (there, there + 1) if self.ep > 1 else (block % LOCAL,)
        return ((), all_of_rank, (block % count,), tuple(range(1, count)))[kind]

    def seen(self, model: nn.Module | None = None, *, grads: bool = True) -> dict[str, Any]:
        """Record gradients, None as zeros, and parameters, under their names in the model of one process."""
        named = {}
        for name, param in (model or self.model).named_parameters():
            parts = name.replace("inner.", "").split(".")
            if parts[0] == "experts" and model is not self.reference:
                parts[1] = str(int(parts[1]) + self.offset)
            named[".".join(parts)] = param
        values = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in named.items()
            if grads
        }
        return {"grad": values, "param": {n: p.detach().clone() for n, p in named.items()}}

    def both(self, *, grads: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the records that this rank should have, from the model of one process, and those that it has."""
        mine, everything = self.seen(grads=grads), self.seen(self.reference, grads=grads)
        return {kind: {name: everything[kind][name] for name in mine[kind]} for kind in mine}, mine


def _group(ranks: list[int]) -> dist.ProcessGroup | None:
    group = dist.new_group(ranks)
    return group if dist.get_rank() in ranks else None


@contextlib.contextmanager
def features(arm: str) -> Iterator[None]:
    names = FEATURES[arm]
    options = {"dist_optimizer": {"min_param_numel": 8}} if "dist_optimizer" in names else {}
    with ovpatch.applied(*names, options=options) if names else contextlib.nullcontext():
        yield


def train(
    arm: str,
    ep: int,
    *,
    micro: int = 1,
    keep: bool = False,
    closed: bool = False,
    reentrant: bool | None = None,
    config: MoEConfig | None = None,
    more: int = 0,
    **kw: Any,
) -> list[Any]:
    """Train four steps of ``micro`` microbatches and reduce the last one.

    Args:
        arm: A name of :data:`FEATURES`.
        ep: The number of ranks that partition the experts.
        micro: Microbatches of a step.
        keep: Whether gradients are never zeroed.
        closed: Whether some experts get no tokens.
        reentrant: The kind of checkpoint around the experts, or None.
        config: The cut of the experts, or None.
        more: The number of contributions that chunks mark beyond the declared number; negative if they mark fewer.
        **kw: Arguments of :class:`Setup`.
    """
    setup = Setup(ep, **kw)
    _spoil(setup, more)
    setup.model.reentrant, setup.model.config = reentrant, config
    optimizers = [
        torch.optim.SGD(model.parameters(), 0.3) for model in (setup.ddp, setup.reference)
    ]
    records = []
    for step in range(4):
        shut = step if closed else 0
        for number in range(micro):
            with setup.ddp.no_sync() if number < micro - 1 else contextlib.nullcontext():
                setup.loss(10 * step + number, closed=shut).backward()
            setup.reference_loss(10 * step + number, closed=shut).backward()
        # A read gradient is not reduced and scattered, so these records leave sharded gradients out.
        records.append(setup.both(grads=arm != "sharded"))
        for optimizer in optimizers:
            optimizer.step()
            if not keep:
                optimizer.zero_grad()
    return [*records, setup.both(grads=False)]


def _spoil(setup: Setup, more: int) -> None:
    for expert in setup.model.experts:
        if isinstance(expert, InChunks):
            expert.marks.surplus = more


# The number of ranks, and how many of them partition the experts.
WORLDS = [(4, 2), (2, 2), (2, 1)]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {"micro": 3},
    "gradients kept": {"keep": True},
    "kept, no_sync": {"micro": 2, "keep": True},
    "experts without tokens": {"closed": True},
    "without tokens, kept": {"closed": True, "keep": True, "micro": 2},
    "reentrant checkpoint": {"reentrant": True},
    "in chunks": {"chunked": True, "closed": True},
    "in chunks, no_sync": {"chunked": True, "micro": 2, "keep": True},
    "in chunks, one too few, checkpoint": {
        "chunked": True,
        "more": -1,
        "reentrant": False,
        "closed": True,
    },
    "in chunks, reentrant": {"chunked": True, "reentrant": True},
    "split": {"config": MoEConfig("tokens", 3), "closed": True},
    "split, no_sync": {"config": MoEConfig("experts"), "micro": 2, "keep": True},
    "split, reentrant": {"config": MoEConfig("experts"), "reentrant": True},
    "split, checkpoint": {"config": MoEConfig("tokens", 2), "reentrant": False},
}


def all_cases(arm: str, ep: int) -> dict[str, Any]:
    from ovpatch_plugins.ddp.ddp_report import COUNTERS as REDUCED
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS as SHARDED

    before = REDUCED.backwards, SHARDED.steps, SHARDED.grads_sharded
    world = dist.get_world_size()
    # Each case runs if ranks have their own experts, by each reducer. If all ranks have copies of all experts, this is
    # plain data parallelism, and some cases suffice.
    cases = on(world, CASES) if ep == 2 else some(CASES)
    with features(arm):
        results: dict[str, Any] = {name: train(arm, ep, **case) for name, case in cases.items()}
    after = REDUCED.backwards, SHARDED.steps, SHARDED.grads_sharded
    return results | {"ran": [now > then for now, then in zip(after, before, strict=True)]}


@pytest.mark.parametrize(("world", "ep"), WORLDS)
@pytest.mark.parametrize("arm", FEATURES)
def test_training(ranks, world, ep, arm):
    for result in ranks(world)(all_cases, arm, ep):
        assert result.pop("ran") == [arm != "stock", arm == "sharded", arm == "sharded"]
        for name, records in result.items():
            for step, (wanted, mine) in enumerate(records):
                try:
                    compare(wanted, mine).assert_equal()
                except AssertionError as error:
                    raise AssertionError(f"case {name}, step {step}: {error}") from None


def with_shared_experts(arm: str) -> list[Any]:
    """Train a ready layer whose shared experts are dense: the same on all ranks, and averaged over all ranks."""
    with features(arm):
        torch.manual_seed(0)
        layer = ExpertParallelFFN(6, 5, 2 * dist.get_world_size(), shared=nn.Linear(6, 6))
        model = nn.Sequential()
        model.layer = layer
        layer.shared.weight.data.add_(dist.get_rank())
        model.forward = lambda x: layer(
            x, torch.zeros(len(x), 1, dtype=torch.long), torch.ones(len(x), 1)
        )
        ddp = expert_data_parallel(model, [layer], None)
        x = torch.full((3, 6), 1.0 + dist.get_rank())
        ddp(x).sum().backward()
        return [layer.shared.weight.detach(), layer.shared.weight.grad]


@pytest.mark.parametrize("arm", ["stock", "ddp"])
def test_shared_experts_are_dense(ranks, arm):
    (weight, grad), (other_weight, other_grad) = ranks(2)(with_shared_experts, arm)
    assert torch.equal(weight, other_weight)
    assert torch.equal(grad, other_grad)
    assert torch.equal(grad, torch.full((6, 6), 3 * 1.5)), (
        "the mean of three tokens of ones and three of twos"
    )


def frozen_later() -> list[bool]:
    """Freeze an expert after the wrap; return whether it has no gradient and does not move."""
    setup = Setup(2)
    optimizer = torch.optim.AdamW(setup.ddp.parameters(), 0.1)
    setup.loss(0).backward()
    optimizer.step()
    optimizer.zero_grad()
    frozen = setup.model.experts[0][0].weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    for step in (1, 2):
        setup.loss(step).backward()
        found = [frozen.grad is None, setup.model.experts[0][2].weight.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, torch.equal(before, frozen)]


def test_experts_that_are_frozen_later_stay_as_they_are(ranks):
    for found in ranks(4)(frozen_later):
        assert found == [True, True, True]


def without_synchronisation() -> dict[str, Any]:
    setup = Setup(1)
    with setup.ddp.no_sync():
        setup.loss(0).backward()
        inside = setup.seen()["grad"]
    setup.ddp.zero_grad()
    with setup.ddp.no_sync():
        loss = setup.loss(0)
    # As in stock PyTorch, the forward decides.
    loss.backward()
    after = setup.seen()["grad"]
    compare(inside, after).assert_bitwise()
    return inside


def test_no_sync_leaves_gradients_local(ranks):
    first, second = ranks(2)(without_synchronisation)
    assert all(not torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- exceptions


def around_an_exception(arm: str, ep: int, place: str, search: bool) -> list[Any]:
    """Run two clean steps around a step whose backward fails before or after the experts have their gradients."""
    with features(arm):
        setup = Setup(ep, **({"find_unused_parameters": True} if search else {}))
        setup.model.bombs = setup.reference.bombs = place
        records = []
        for step in range(4):
            Bomb.armed = step in (0, 2)
            with (
                pytest.raises(RuntimeError, match="not really")
                if Bomb.armed
                else contextlib.nullcontext()
            ):
                setup.loss(step).backward()
            if not Bomb.armed:
                setup.reference_loss(step).backward()
                records.append(setup.both())
            setup.ddp.zero_grad()
            setup.reference.zero_grad()
        return records


@pytest.mark.parametrize(("world", "ep"), WORLDS)
@pytest.mark.parametrize("place", ["early", "late"])
def test_an_exception_in_backward_and_a_clean_step(ranks, world, ep, place):
    for result in ranks(world)(around_an_exception, "ddp", ep, place, False):
        assert len(result) == 2
        for wanted, mine in result:
            compare(wanted, mine).assert_equal()


def failing_alone() -> tuple[str, list[Any]]:
    """Fail on rank 1 alone; no all-to-all ties it to rank 0, which would otherwise wait for its experts' gradients."""
    with features("ddp"):
        setup = Setup(1)
        setup.model.bombs = "early"
        setup.loss(0).backward()
        setup.ddp.zero_grad()
        Bomb.armed, text = setup.rank == 1, ""
        try:
            # One expert's collective is launched only at the end.
            setup.loss(1, closed=1).backward()
        except RuntimeError as error:
            text = str(error)
        Bomb.armed = False
        setup.ddp.zero_grad()
        setup.loss(2).backward()
        setup.reference_loss(2).backward()
        return text, [setup.both()]


def test_an_exception_on_one_rank_keeps_no_peer_waiting(ranks):
    (there, clean), (here, also_clean) = ranks(2)(failing_alone)
    assert "on another rank" in there
    assert "not really" in here
    for wanted, mine in clean + also_clean:
        compare(wanted, mine).assert_equal()


def one_too_many(alone: bool) -> tuple[str, list[Any]]:
    """Let chunks mark more gradients than declared, on all ranks or on one that no all-to-all ties to its peers."""
    with features("ddp"):
        setup = Setup(1, chunked=True)
        setup.loss(0).backward()
        setup.ddp.zero_grad()
        _spoil(setup, int(setup.rank == 1 or not alone))
        with pytest.raises(RuntimeError) as caught:
            setup.loss(1).backward()
        _spoil(setup, 0)
        setup.ddp.zero_grad()
        setup.loss(2).backward()
        setup.reference_loss(2).backward()
        return f"{caught.typename}: {caught.value}", [setup.both()]


@pytest.mark.parametrize("alone", [False, True])
def test_a_surplus_is_an_error_on_all_ranks(ranks, alone):
    for rank, (text, records) in enumerate(ranks(2)(one_too_many, alone)):
        wanted = (
            "on another rank"
            if alone and rank == 0
            else "SurplusGradientError: ovpatch: parameter 'experts.1.inner"
        )
        assert wanted in text
        for right, mine in records:
            compare(right, mine).assert_equal()


# ---------------------------------------------------------------- other backwards


def other_backwards() -> list[Any]:
    """Compute a gradient with ``autograd.grad()``, and run a forward without a backward."""
    with features("ddp"):
        setup = Setup(2)
        loss = setup.loss(0)
        torch.autograd.grad(loss, list(setup.model.last.parameters()), retain_graph=True)
        assert all(param.grad is None for param in setup.model.parameters())
        loss.backward()
        setup.reference_loss(0).backward()
        records = [setup.both()]
        setup.loss(1)
        with torch.no_grad():
            setup.loss(1)
        setup.loss(2).backward()
        setup.reference_loss(2).backward()
        return [*records, setup.both()]


def test_backwards_that_add_no_gradient_and_later_ones(ranks):
    for result in ranks(4)(other_backwards):
        for wanted, mine in result:
            compare(wanted, mine).assert_equal()


def second_backwards() -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a second backward through one forward, and the same backward inside of no_sync()."""
    with features("ddp"):
        twice, local = Setup(2), Setup(2)
        loss = twice.loss(0)
        loss.backward(retain_graph=True)
        loss.backward()
        local.loss(0).backward()
        with local.ddp.no_sync():
            local.loss(0).backward()
        found = twice.seen(), local.seen()
        # Neither disturbs the reduction of the next step.
        for setup in (twice, local):
            setup.ddp.zero_grad()
            setup.loss(1).backward()
        compare(twice.seen(), local.seen()).assert_bitwise()
        return found


def test_a_second_backward_stays_local_as_for_dense_parameters(ranks):
    for twice, local in ranks(4)(second_backwards):
        compare(twice, local).assert_bitwise()


def hooked(ep: int) -> list[Any]:
    """Register hooks after the wrap that change gradients before they are averaged, as of dense parameters."""

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    setup = Setup(ep)
    for model in (setup.model, setup.reference):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(halve)
    records = []
    for step in range(2):
        setup.loss(step).backward()
        setup.reference_loss(step).backward()
        records.append(setup.both())
        setup.ddp.zero_grad()
        setup.reference.zero_grad()
    return records


@pytest.mark.parametrize(("world", "ep"), [(4, 2), (2, 1)])
def test_hooks_of_the_script_come_before_the_average(ranks, world, ep):
    for result in ranks(world)(hooked, ep):
        for wanted, mine in result:
            compare(wanted, mine).assert_equal()


# ---------------------------------------------------------------- copies and more wrappers


def copies(arm: str, ep: int) -> list[Any]:
    """Train a step each with the wrapper, a copy, a loaded copy and an fp64 cast, which stock PyTorch cannot train."""
    with features(arm):
        setup = Setup(ep)
        group = setup.model.group
        # In stock PyTorch and here, a group cannot be copied.
        setup.model.group = None
        # A copy of a frozen parameter may be thawed.
        setup.model.experts[0][0].weight.requires_grad_(False)
        buffer = io.BytesIO()
        torch.save(setup.ddp, buffer)
        buffer.seek(0)
        twins = [setup.ddp, copy.deepcopy(setup.ddp), torch.load(buffer, weights_only=False)]
        twins += [setup.ddp] if arm == "ddp" else []
        records = []
        for step, twin in enumerate(twins):
            assert type(twin) is DistributedDataParallel
            setup.ddp, setup.model = twin, twin.module
            setup.model.group = group if ep > 1 else None
            setup.model.experts[0][0].weight.requires_grad_(True)
            if step == 3:
                setup.model.double()
                setup.reference.double()
            for model in (setup.ddp, setup.reference):
                model.zero_grad()
            setup.loss(step).backward()
            setup.reference_loss(step).backward()
            records.append(setup.both())
        return records


@pytest.mark.parametrize(("world", "ep"), WORLDS)
@pytest.mark.parametrize("arm", ["stock", "ddp"])
def test_copies_average_their_experts_too(ranks, world, ep, arm):
    for result in ranks(world)(copies, arm, ep):
        for wanted, mine in result:
            compare(wanted, mine).assert_equal()


def lost_group() -> str:
    setup = Setup(1)
    setup.model.group = None
    twin = copy.deepcopy(setup.ddp)
    gradients = next(iter(twin._forward_hooks.values())).__self__
    gradients._place = ("another one", [0, 1])
    return error_of(twin, setup.data(0, 0))


def test_a_copy_without_its_group_is_an_error(ranks):
    for text in ranks(2)(lost_group):
        assert "the ranks [0, 1]" in text
        assert text.endswith("expert_data_parallel(ddp.module, ...).")


def wrapped_again(ep: int) -> tuple[list[Any], str]:
    setup = Setup(ep)
    first = setup.ddp
    setup.ddp = expert_data_parallel(
        setup.model, setup.model.experts, setup.copies if ep < setup.world else None
    )
    setup.loss(0).backward()
    setup.reference_loss(0).backward()
    with pytest.raises(RuntimeError) as caught:
        first(setup.data(0, 0))
    return [setup.both()], str(caught.value)


@pytest.mark.parametrize(("world", "ep"), WORLDS)
def test_the_later_of_two_wrappers_has_the_experts(ranks, world, ep):
    for records, text in ranks(world)(wrapped_again, ep):
        for wanted, mine in records:
            compare(wanted, mine).assert_equal()
        assert "a later wrapper has taken the experts" in text
