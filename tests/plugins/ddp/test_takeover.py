"""The patched reducer attaches, detaches and falls back: always completely, and on all ranks."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import ovpatch
from ovpatch_plugins.ddp import ddp_feature
from tests.plugins.ddp.arms import Record, both, data, seen
from tests.plugins.ddp.checks import same_bits
from tests.support.equality import compare
from tests.support.errors import error_of
from tests.support.gloo import destroy_group
from tests.support.worker import fresh_store


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def steps(wrapped: DDP, count: int, start: int = 0) -> list[Record]:
    records = []
    for step in range(start, start + count):
        wrapped.zero_grad()
        wrapped(data(step, 4, 6)).square().mean().backward()
        records.append(seen(wrapped.module))
    return records


def is_ours(wrapped: DDP) -> bool:
    return type(wrapped.reducer).__module__.startswith("ovpatch_plugins")


def loop_comm_hook() -> list[Record]:
    wrapped = DDP(net())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return steps(wrapped, 3)


def loop_builtin_hook() -> list[Record]:
    wrapped = DDP(net())
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return steps(wrapped, 3)


def loop_join() -> list[Record]:
    wrapped = DDP(net())
    records = steps(wrapped, 2)
    with wrapped.join():
        records += steps(wrapped, 2 + dist.get_rank(), start=2)
    return [*records, seen(wrapped.module)]


def loop_generic_join() -> list[Record]:
    """Join like accelerate, which does not use ``DistributedDataParallel.join``."""
    wrapped = DDP(net())
    with Join([wrapped]):
        return steps(wrapped, 2 + dist.get_rank())


def loop_copies_in_join() -> list[Record]:
    """Copy wrappers in a join. The copies keep its settings, so their forwards notify ranks that have joined."""
    wrapped = DDP(net())
    buffer = io.BytesIO()
    with wrapped.join():
        records = steps(wrapped, 2)
        copies = [copy.deepcopy(wrapped)]
        torch.save(wrapped, buffer)
    copies.append(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
    for model in copies:
        records += steps(model, 2, start=2)
    return records


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("loop", "models"),
    [
        (loop_comm_hook, 1),
        (loop_builtin_hook, 1),
        (loop_join, 1),
        (loop_generic_join, 1),
        (loop_copies_in_join, 3),
    ],
)
def test_models_that_need_the_stock_reducer_fall_back_and_are_reported(ranks, world, loop, models):
    for result in ranks(world)(both_with_remarks, loop):
        # Bits may differ on 3 ranks: the stock reducer that replaces the patched one finds its buckets later.
        compare(result["stock"], result["patched"]).assert_equal()
        assert result["counters"]["stock_models"] == models
        assert "keeps the stock reducer" in result["remarks"][0]


def both_with_remarks(loop: Any) -> dict[str, Any]:
    from ovpatch_plugins.ddp.ddp_report import REMARKS

    REMARKS.clear()
    result = both(loop)
    return {**result, "remarks": list(REMARKS)}


def copied() -> dict[str, Any]:
    with ovpatch.applied("ddp"):
        torch.manual_seed(0)
        wrapped = DDP(net())
        first = steps(wrapped, 2)
        twin = copy.deepcopy(wrapped)
        buffer = io.BytesIO()
        torch.save(wrapped, buffer)
        text = buffer.getvalue()
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        if dist.get_rank() == 0:
            # A copy on one rank alone needs no collective, so it must not wait.
            copy.deepcopy(wrapped)
        ours = [is_ours(w) for w in (wrapped, twin, loaded)]
        after = [steps(w, 2, start=2) for w in (wrapped, twin, loaded)]
        return {"first": first, "after": after, "ours": ours, "clean": b"ovpatch" not in text}


def test_copies_and_pickles_reduce_separately_and_contain_no_object_of_ovpatch(ranks):
    for result in ranks(2)(copied):
        assert result["clean"]
        assert result["ours"] == [True, True, True]
        compare(result["after"][0], result["after"][1]).assert_bitwise()
        compare(result["after"][0], result["after"][2]).assert_bitwise()


def copied_and_called_alone(static_graph: bool) -> list[Any]:
    """Run a forward of a copy on one rank alone, with gradients enabled; then train the copy on all ranks."""
    with ovpatch.applied("ddp"):
        torch.manual_seed(0)
        wrapped = DDP(net(), static_graph=static_graph)
        twin = copy.deepcopy(wrapped)
        if dist.get_rank() == 1:
            assert twin(data(0, 4, 6)).requires_grad
        dist.barrier()
        return [is_ours(twin), steps(wrapped, 3), steps(twin, 3)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_forward_of_a_copy_waits_for_no_rank(ranks, world, static_graph):
    for ours, wrapped, twin in ranks(world)(copied_and_called_alone, static_graph):
        assert ours
        compare(wrapped, twin).assert_bitwise()


def update_and_drop(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.data.sub_(0.1 * param.grad)
    param.grad = None


def reverted_without_gradients(how: str) -> dict[str, Any]:
    """Revert while all parameters are frozen, or while hooks have dropped every gradient in its backward."""

    def run() -> list[Record]:
        torch.manual_seed(0)
        module = net()
        wrapped = DDP(module, static_graph=how == "dropped", find_unused_parameters=how == "frozen")
        if how == "dropped":
            for p in module.parameters():
                p.register_post_accumulate_grad_hook(update_and_drop)
        records = steps(wrapped, 2)
        module.requires_grad_(how != "frozen")
        ovpatch.revert()
        if how == "frozen":
            module[2].requires_grad_()
        return [*records, *steps(wrapped, 3, start=2)]

    stock = run()
    ovpatch.apply("ddp")
    return {"stock": stock, "patched": run()}


@pytest.mark.parametrize("how", ["frozen", "dropped"])
def test_revert_of_a_model_without_gradients(ranks, how):
    for result in ranks(2)(reverted_without_gradients, how):
        compare(result["stock"], result["patched"]).assert_bitwise()


def reverted_with_a_search_of_a_static_graph() -> dict[str, Any]:
    def run() -> list[Record]:
        torch.manual_seed(0)
        wrapped = DDP(net(), static_graph=True, find_unused_parameters=True)
        records = steps(wrapped, 2)
        ovpatch.revert()
        return [*records, *steps(wrapped, 3, start=2)]

    stock = run()
    ovpatch.apply("ddp")
    return {"stock": stock, "patched": run()}


def test_revert_of_a_static_graph_that_is_searched_as_well(ranks):
    for result in ranks(2)(reverted_with_a_search_of_a_static_graph):
        compare(result["stock"], result["patched"]).assert_bitwise()


def reverted_inside_backward() -> dict[str, Any]:
    torch.manual_seed(0)
    expected = steps(DDP(net()), 2)
    torch.manual_seed(0)
    errors: list[str] = []

    def interfere(_param: torch.Tensor) -> None:
        try:
            ovpatch.revert()
        except RuntimeError as error:
            errors.append(str(error))
        # The wrap of another model must not treat this backward as failed.
        DDP(nn.Linear(2, 2))

    with ovpatch.applied("ddp"):
        wrapped = DDP(net())
        handle = wrapped.module[0].bias.register_post_accumulate_grad_hook(interfere)
        got = steps(wrapped, 1)
        handle.remove()
        got += steps(wrapped, 1, start=1)
        return {"stock": expected, "patched": got, "ours": is_ours(wrapped), "errors": errors}


def test_revert_inside_a_backward_is_refused_and_loses_no_gradient(ranks):
    for result in ranks(2)(reverted_inside_backward):
        compare(result["stock"], result["patched"]).assert_bitwise()
        assert result["ours"]
        assert "between two steps" in result["errors"][0]


def reverted_between_forward_and_backward(ddp: dict[str, Any], before: int) -> dict[str, Any]:
    def run(revert: bool) -> list[Record]:
        torch.manual_seed(0)
        wrapped = DDP(net(), **ddp)
        records = steps(wrapped, before)
        wrapped.zero_grad()
        loss = wrapped(data(2, 4, 6)).square().mean()
        if revert:
            assert is_ours(wrapped)
            ovpatch.revert()
            assert not is_ours(wrapped)
        loss.backward()
        return [*records, seen(wrapped.module, loss), *steps(wrapped, 2, start=3)]

    stock = run(False)
    ovpatch.apply("ddp")
    return {"stock": stock, "patched": run(True)}


@pytest.mark.parametrize(
    ("mode", "before"),
    [
        (None, 2),
        ("gradient_as_bucket_view", 2),
        ("find_unused_parameters", 2),
        ("static_graph", 2),
        pytest.param("static_graph", 0, id="the first forward of a static graph"),
    ],
)
def test_revert_between_forward_and_backward_still_reduces(ranks, mode, before):
    ddp = {mode: True} if mode else {}
    for result in ranks(2)(reverted_between_forward_and_backward, ddp, before):
        compare(result["stock"], result["patched"]).assert_bitwise()


def reverted_with_one_model_in_backward() -> list[bool]:
    ours: list[bool] = []
    with ovpatch.applied("ddp"):
        models = [DDP(net()) for _ in range(3)]

        def interfere(_param: torch.Tensor) -> None:
            with pytest.raises(RuntimeError, match="between two steps"):
                ovpatch.revert()
            ours.extend(is_ours(model) for model in models)

        models[1].module[0].bias.register_post_accumulate_grad_hook(interfere)
        steps(models[1], 1)
    return ours


def test_a_revert_that_is_refused_for_one_model_leaves_all_as_they_are(ranks):
    assert ranks(2)(reverted_with_one_model_in_backward) == [[True, True, True]] * 2


class OwnWrapper(DDP):
    """A subclass, as frameworks have them."""


def released() -> bool:
    with ovpatch.applied("ddp"):
        wrapped = DDP(net())
        steps(wrapped, 2)
        reducer = weakref.ref(wrapped.reducer)
        gc.collect()
        gc.disable()
        try:
            del wrapped
            return reducer() is None
        finally:
            gc.enable()


def test_the_reducer_is_freed_with_its_model_without_the_garbage_collector(ranks):
    assert ranks(2)(released) == [True, True]


def missing_on(who: int) -> str:
    if dist.get_rank() == who:
        DDP(net())
        return "stock"
    with ovpatch.applied("ddp", options={"ddp": {"agreement_timeout_s": 1.0}}):
        return error_of(DDP, net())


def test_a_rank_without_ovpatch_is_named(ranks):
    *texts, last = ranks(3)(missing_on, 2)
    assert last == "stock"
    for text in texts:
        assert "no reply from rank 2" in text
        assert "ovpatch.apply() on every rank" in text


def objecting_alone() -> dict[str, Any]:
    """Make one rank refuse the patched reducer, so that all ranks keep the stock reducer."""
    from ovpatch_plugins.ddp import ddp_attach
    from ovpatch_plugins.ddp.ddp_report import REMARKS

    original = ddp_attach.find_reason_for_stock
    ddp_attach.find_reason_for_stock = lambda *a: (
        "planted" if dist.get_rank() == 1 else original(*a)
    )
    try:
        with ovpatch.applied("ddp"):
            wrapped = DDP(net())
            return {
                "ours": is_ours(wrapped),
                "records": steps(wrapped, 2),
                "remarks": list(REMARKS),
            }
    finally:
        ddp_attach.find_reason_for_stock = original


def test_a_reason_against_the_reducer_on_one_rank_applies_to_all(ranks):
    for result in ranks(3)(objecting_alone):
        assert not result["ours"]
        assert any("planted (rank 1)" in remark for remark in result["remarks"])


def group_made_again() -> list[Any]:
    results = []
    with ovpatch.applied("ddp"):
        for _ in range(3):
            torch.manual_seed(0)
            half = dist.new_group([0, 1])
            wrapped = DDP(net())
            results.append(steps(wrapped, 2))
            if dist.get_rank() < 2:
                inner = DDP(net(), process_group=half)
                steps(inner, 2)
                assert is_ours(inner)
                del inner
            destroy_group(half)
    return results


def test_groups_and_subgroups_made_again(ranks):
    for results in ranks(3)(group_made_again):
        compare(results[0], results[1]).assert_bitwise()
        compare(results[0], results[2]).assert_bitwise()


def early_model(cls: type[DDP]) -> list[str]:
    wrapped = cls(net())
    report = ovpatch.apply("ddp").to_json()
    steps(wrapped, 1)
    return [remark for f in report["features"] for remark in f["remarks"]]


# Each group needs its own keys in the store.
_made = itertools.count()


def loop_group_of_its_own(init_sync: bool) -> list[Record]:
    """Train over a group that ``torch.distributed`` did not make, so it has no store for this group."""
    store, rank, size = fresh_store(f"own {next(_made)}"), dist.get_rank(), dist.get_world_size()
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(
        torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    )
    torch.manual_seed(0)
    return steps(DDP(net(), process_group=group, init_sync=init_sync), 3)


@pytest.mark.parametrize("init_sync", [True, False])
def test_a_group_without_a_store_keeps_the_stock_reducer(ranks, init_sync):
    for result in same_bits(ranks(2)(both, loop_group_of_its_own, init_sync)):
        assert result["counters"]["stock_models"] == 1
        assert result["counters"]["models"] == 0


@pytest.mark.parametrize("cls", [DDP, OwnWrapper])
def test_apply_after_the_wrap_reports_the_line_to_move(ranks, cls):
    for remarks in ranks(2)(early_model, cls):
        assert any(
            "Sequential was wrapped in DistributedDataParallel before ovpatch.apply()" in r
            for r in remarks
        )
        assert any("move the line" in r for r in remarks)


class _Foreign(type):
    """A metaclass whose classes have no hash and no equality, and whose instances run code if their class is read."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compares classes")


def test_the_search_for_early_models_runs_no_code_of_classes_and_keeps_none():
    class Base:
        pass

    class Strange(metaclass=_Foreign):
        @property
        def __class__(self):
            raise AssertionError("reads __class__")

    class Short(Base):
        pass

    strange, found = Strange(), Short()
    assert ddp_feature._list_instances(Base) == [found]
    freed = weakref.ref(Short)
    del found, Short
    gc.collect()
    assert freed() is None
    assert type(strange) is not Base
    assert ddp_feature._list_instances(Base) == []


def alone() -> dict[str, Any]:
    with ovpatch.applied("ddp"):
        remarks = {"before": list(ddp_feature.list_remarks())}
        result = both(loop_alone)
        remarks["after"] = list(ddp_feature.list_remarks())
    return {**result, "remarks": remarks}


def loop_alone() -> list[Record]:
    return steps(DDP(net()), 2)


def test_one_rank_alone_trains_as_in_stock_pytorch_and_is_no_fallback(ranks):
    (result,) = ranks(1)(alone)
    compare(result["stock"], result["patched"]).assert_bitwise()
    assert result["counters"]["stock_models"] == 0
    assert result["remarks"]["after"] == [
        "a model is wrapped for one rank, so there is nothing to reduce"
    ]


def surfaces() -> dict[str, bool]:
    import inspect

    signature, name = inspect.signature(DDP.__init__), DDP.__qualname__
    with ovpatch.applied("ddp"):
        return {
            "signature": inspect.signature(DDP.__init__) == signature,
            "name": DDP.__qualname__ == name,
            "pickle": pickle.loads(pickle.dumps(DDP)) is DDP,
            "instance": isinstance(DDP(net()), DDP),
        }


def test_the_class_keeps_its_signature_name_and_pickles(ranks):
    for result in ranks(2)(surfaces):
        assert all(result.values()), result
    assert os.environ.get("OVPATCH") in (None, "1")
