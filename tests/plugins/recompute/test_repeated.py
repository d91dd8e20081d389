"""A forward that runs again is the same forward, with its random streams, counters, caches and hooks.

Parts are habits of scripts in a block. Each is a case, and random blocks have several of them. If the recomputation
restores their modules and random generators, they have the bits of stock PyTorch. State that cannot be restored is an
error.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ovpatch
from ovpatch.insight.verify.verification import Request
from ovpatch_plugins.recompute import RecomputeError, recomputation, recompute
from ovpatch_plugins.recompute import recompute_attach as attach
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from tests.plugins.recompute.models import count_differences
from tests.plugins.recompute.parts import (
    CALLS,
    LOST,
    NOTIFIED,
    PARTS,
    UNNOTIFIED,
    WIDTH,
    Part,
    Stack,
    count_in_place,
    keep_loss,
    note_call,
    scale,
    train,
)
from tests.support.rarely import ALL_CASES, RARELY

BLOCKS = {"recompute": {"blocks": "layers.*"}}


def _compare(names: list[str]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in names:
        blocks = [[nn.SiLU, PARTS[name]]] * 2
        stock = train(blocks)
        calls, left = COUNTERS.calls, COUNTERS.stock_calls
        with ovpatch.applied("recompute", options=BLOCKS):
            patched = train(blocks)
        found[name] = (
            count_differences(stock, patched),
            COUNTERS.calls - calls,
            COUNTERS.stock_calls - left,
        )
    return found


def test_each_part_has_the_bits_of_torch(ranks: Any) -> None:
    (found,) = ranks(1)(_compare, list(PARTS))
    assert {name: changed for name, (changed, _, _) in found.items() if changed} == {}
    forwards = 2 * 2 * 5
    for name, (_, calls, left) in found.items():
        is_hooked = name in ("forward hook", "forward pre-hook")
        assert (calls, left) == ((0, forwards) if is_hooked else (forwards, 0)), name


def _compile_model(model: Stack) -> Any:
    return torch.compile(model, backend="aot_eager")


def _compile_blocks(model: Stack) -> Any:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def _compare_compiled(names: list[str], compile_model: Callable[[Any], Any]) -> dict[str, Any]:
    found = {}
    for name in names:
        blocks = [[nn.SiLU, PARTS[name]]] * 2
        # A compiled norm with two forwards before their backwards is an error: recompute-reference.md, "Limits".
        micro = 1 if name == "batch norm" else 2
        # Compiled stock programs have other numbers where the compiler replaces a Random, or a deque with a limit.
        stock = train(blocks, micro=micro)
        torch.compiler.reset()
        calls, compiled = COUNTERS.calls, COUNTERS.compiled_calls
        with ovpatch.applied("recompute", options=BLOCKS):
            patched = train(blocks, micro=micro, compile_model=compile_model)
        found[name] = (
            count_differences(stock, patched),
            COUNTERS.calls - calls,
            COUNTERS.compiled_calls - compiled,
        )
    return found


# Parts in which a compiler recomputes by itself, without a break of the graph.
_COMPILED = ("training flag", "dropout", "batch norm")
_SOME_PARTS = (
    *_COMPILED,
    "Python",
    "counter",
    "tensors of containers changed in place",
    "tensor replaced",
    "list",
    "lazy cache",
)


@pytest.mark.parametrize(
    "compile_model", [_compile_model, pytest.param(_compile_blocks, marks=RARELY)]
)
def test_compiled_parts_have_the_bits_of_torch(ranks: Any, compile_model: Any) -> None:
    """The compiler leaves parts that change state to the recomputation outside of graphs."""
    names = list(PARTS) if ALL_CASES else list(_SOME_PARTS)
    (found,) = ranks(1)(_compare_compiled, names, compile_model, timeout=280)
    assert {name: changed for name, (changed, _, _) in found.items() if changed} == {}
    for name, (_, calls, compiled) in found.items():
        if name in _COMPILED:
            assert compiled, name
            assert not calls, name
        elif not name.startswith("forward "):
            assert (calls, compiled) == (2 * 2 * 5, 0), name


def _lose(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with ovpatch.applied("recompute", options=BLOCKS):
            try:
                train([[nn.SiLU, LOST[name]]] * 2)
                found[name] = "no error"
            except RecomputeError as error:
                found[name] = str(error)
    return found


def test_state_out_of_reach_is_an_error(ranks: Any) -> None:
    (found,) = ranks(1)(_lose, list(LOST))
    for name, text in found.items():
        assert text.startswith(
            "ovpatch: block layers.1 does not compute the same again: tensor "
        ), f"{name}: {text}"
        assert text.endswith("set OVPATCH_RECOMPUTE=0."), name


def _collect_warnings() -> dict[str, tuple[int, list[str]]]:
    found = {}
    for name, part in (NOTIFIED | UNNOTIFIED).items():
        stock = train([[nn.SiLU, part]] * 2)
        with (
            ovpatch.applied("recompute", options=BLOCKS),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            patched = train([[nn.SiLU, part]] * 2)
        texts = [str(warning.message) for warning in caught]
        found[name] = (
            count_differences(stock, patched),
            [text for text in texts if "number" in text],
        )
    return found


def test_a_number_that_is_counted_twice_gives_a_warning(ranks: Any) -> None:
    (found,) = ranks(1)(_collect_warnings)
    for name, (changed, texts) in found.items():
        assert changed == 0, name
        if name in UNNOTIFIED:
            assert texts == []
        else:
            assert f"the number {name} outside of the modules of block layers." in texts[0], texts
            assert texts[0].endswith("or leave the block out with OVPATCH_RECOMPUTE_BLOCKS.")


def _draw_late(part: Part, x: Tensor) -> Tensor:
    part.calls += 1
    return scale(part, x, float(np.random.rand()) if part.calls > 3 else 0.0)


def _write_late(part: Part, x: Tensor) -> Tensor:
    part.calls += 1
    return count_in_place(part, x) if part.calls > 3 else scale(part, x, 0.0)


# Parts that first change state in a late call, which is an error with its own remedy.
LATE: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a draw from numpy": (
        lambda: Part(_draw_late, calls=0),
        "its forward changes 'numpy.random', which earlier ones did not",
        "Draw from a random generator that is an attribute of the module",
    ),
    "a write in place": (
        lambda: Part(_write_late, calls=0, total=torch.zeros(())),
        "its forward changes 'total', which earlier ones did not",
        "have the first forward change the tensor, too",
    ),
}


def _be_late(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with ovpatch.applied("recompute", options=BLOCKS):
            try:
                train([[nn.SiLU, LATE[name][0]]] * 2)
                found[name] = "no error"
            except RecomputeError as error:
                found[name] = str(error)
    return found


def test_state_that_first_changes_in_a_late_call_is_an_error(ranks: Any) -> None:
    (found,) = ranks(1)(_be_late, list(LATE))
    for name, (_, what, remedy) in LATE.items():
        assert found[name].startswith(
            f"ovpatch: block layers.0 does not compute the same again: {what}"
        ), found[name]
        assert f". {remedy}" in found[name] or f", {remedy}" in found[name], found[name]
        assert found[name].endswith(
            ", leave the block out with OVPATCH_RECOMPUTE_BLOCKS, or set OVPATCH_RECOMPUTE=0."
        )


def _lose_attribute() -> str:
    class Once(nn.Module):
        """A module that reads a graph of an earlier call, and removes it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x + self.before.detach()).sigmoid()
            self.before = y * 2
            return y

    with ovpatch.applied("recompute", options={"recompute": {"blocks": "layers.*"}}):
        model = Stack([[nn.SiLU, Once], [nn.SiLU, Once]])
        for part in model.modules():
            if isinstance(part, Once):
                part.before = torch.zeros(4, WIDTH, requires_grad=True) * 1
        torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            model(torch.ones(4, WIDTH)).backward()
        except RecomputeError as error:
            return f"{error} {type(error.__cause__).__name__}"
    return "no error"


def test_an_attribute_whose_graph_was_freed_is_an_error(ranks: Any) -> None:
    (text,) = ranks(1)(_lose_attribute)
    assert text.startswith(
        "ovpatch: block layers.1 does not compute the same again: its forward found an attribute that no"
    )
    assert (
        "Have the forward write the attribute before it reads it, store a detached tensor in it, "
        "leave" in text
    )
    assert text.endswith("AttributeError")


# --- random blocks ---


def _draw_blocks(seed: int) -> tuple[list[list[str]], bool]:
    draw = random.Random(seed)
    blocks = [
        [draw.choice(list(PARTS)) for _ in range(draw.randint(1, 4))]
        for _ in range(draw.randint(2, 3))
    ]
    is_lost = draw.random() < 0.25
    if is_lost:
        draw.choice(blocks)[0] = draw.choice(list(LOST))
    return blocks, is_lost


def _fuzz(seeds: list[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        names, is_lost = _draw_blocks(seed)
        blocks = [[nn.SiLU, *({**PARTS, **LOST}[name] for name in parts)] for parts in names]
        is_lost = is_lost and any(
            not any("forward" in name for name in parts) and any(name in LOST for name in parts)
            for parts in names
        )
        granularity = ("full", "selective")[seed % 2]
        stock, text = train(blocks, steps=2), "no error"
        with ovpatch.applied(
            "recompute", options={"recompute": {**BLOCKS["recompute"], "granularity": granularity}}
        ):
            try:
                changed = count_differences(stock, train(blocks, steps=2))
            except RecomputeError as error:
                text, changed = str(error), 0
        if changed or is_lost != ("does not compute the same again" in text):
            wrong.append(f"seed {seed}: {names} {granularity}: {changed} tensors differ, {text}")
    return wrong


def test_random_blocks(ranks: Any) -> None:
    (wrong,) = ranks(1)(_fuzz, list(range(30)))
    assert not wrong


# --- more dependencies on the state of a forward ---


class _Noisy(nn.Module):
    """A block that adds noise of a generator that it gets as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, generator: Any) -> Tensor:
        noise = torch.rand(x.shape, generator=generator["torch"]) * generator["Python"].random()
        return x + (self.linear(x) * noise).sigmoid()


def _pass_generators() -> int:
    found: list[list[Tensor]] = []
    for granularity in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList(_Noisy() for _ in range(3))
        recompute(model, granularity)
        generators = {"torch": torch.Generator().manual_seed(3), "Python": random.Random(3)}
        x = torch.ones(2, WIDTH)
        for layer in model.layers:
            x = layer(x, generators)
        x.sum().backward()
        found.append([param.grad.clone() for param in model.parameters()])
        found[-1] += [
            torch.rand(2, generator=generators["torch"]),
            torch.tensor(generators["Python"].random()),
        ]
        recompute(model, "none")
    return count_differences(*found)


def test_generators_may_be_arguments(ranks: Any) -> None:
    assert ranks(1)(_pass_generators) == [0]


def _hook_all_modules() -> tuple[list[int], list[str]]:
    counts = []
    handle = nn.modules.module.register_module_forward_hook(note_call)
    try:
        for feature in ((), ("recompute",)):
            with (
                ovpatch.applied(*feature, options=BLOCKS if feature else None)
                if feature
                else _nothing()
            ):
                train([[PARTS["dropout"]]] * 2, steps=1)
                counts.append(len(CALLS))
                report = ovpatch.report().features if feature else []
    finally:
        handle.remove()
    return counts, [
        text for feature in report if feature.name == "recompute" for text in feature.remarks
    ]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_hooks_of_all_modules_are_called_once(ranks: Any) -> None:
    ((counts, remarks),) = ranks(1)(_hook_all_modules)
    assert counts[0] == counts[1] > 0
    assert [
        text
        for text in remarks
        if "forward hook note_call of all modules would be called again" in text
    ]


def _leave_outputs() -> int:
    """Return the number of calls of blocks that live after steps that leave an unused loss in an attribute."""
    model = Stack([[lambda: Part(keep_loss)]] * 2)
    recompute(model, blocks="layers.*")
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        h = model.enter(x)
        for layer in model.layers:
            h = layer(h)
        h.sum().backward()
    del h
    gc.collect()
    calls = [found for found in gc.get_objects() if type(found) is recomputation.Recomputation]
    alive = [call for call in calls if call._block in list(model.layers)]
    recompute(model, "none", blocks="layers.*")
    return len(alive)


def test_a_call_does_not_keep_the_previous_one(ranks: Any) -> None:
    """The graph of an unused attribute keeps its own call. In stock PyTorch, it keeps its own tensors."""
    assert ranks(1)(_leave_outputs) == [2]


# --- when values are compared ---


def _count_digests() -> dict[str, list[int]]:
    found = {}
    real = recomputation._digest
    for when in ("auto", "always", "never"):
        counts = found[when] = []

        def count(tensor: Tensor, counts: list[int] = counts) -> Any:
            counts[-1] += 1
            return real(tensor)

        options = {"recompute": {**BLOCKS["recompute"], "check": when}}
        with (
            ovpatch.applied("recompute", options=options),
            mock.patch.object(recomputation, "_digest", count),
        ):
            model = Stack([[PARTS["dropout"]]] * 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(9):
                counts.append(0)
                model(torch.ones(4, WIDTH)).backward()
                optimizer.step()
    return found


def test_auto_takes_digests_in_few_calls(ranks: Any) -> None:
    (found,) = ranks(1)(_count_digests)
    assert [index for index, count in enumerate(found["auto"]) if count] == [0, 1, 2, 4, 8]
    assert all(found["always"])
    assert not any(found["never"])


def test_verify_compares_values_in_every_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    request = Request(["true"], tmp_path)
    assert request.make_variant("patched", None).variables["OVPATCH_RECOMPUTE_CHECK"] == "always"
    assert "OVPATCH_RECOMPUTE_CHECK" not in request.make_variant("stock").variables
    monkeypatch.setenv("OVPATCH_RECOMPUTE_CHECK", "never")
    assert "OVPATCH_RECOMPUTE_CHECK" not in request.make_variant("patched", None).variables


def _sample_on_device(names: list[str]) -> dict[str, str]:
    """Train as on a device, which compares samples and reads their flags at the end of a backward."""
    reads = 0
    real = recomputation._check_pending

    def check_pending(task: int) -> None:
        nonlocal reads
        assert task != -1
        reads += 1
        real(task)

    found = {}
    exact = mock.patch.object(recomputation, "_is_exact", return_value=False)
    with exact, mock.patch.object(recomputation, "_check_pending", check_pending):
        for name in names:
            reads = 0
            with ovpatch.applied("recompute", options=BLOCKS):
                try:
                    train([[{**PARTS, **LOST}[name]]] * 3, steps=1, micro=1)
                    text = "no error"
                except RecomputeError as error:
                    text = str(error)
            found[name] = f"{reads} {text}"
    return found


def test_samples_on_devices_are_read_once_per_backward(ranks: Any) -> None:
    (found,) = ranks(1)(_sample_on_device, ["generator", "iterator of the script", "dropout"])
    assert found["generator"] == found["dropout"] == "1 no error"
    assert found["iterator of the script"].startswith("1 ovpatch: block layers.")


@pytest.mark.parametrize(
    ("dtype", "change", "is_other"),
    [
        (torch.float32, lambda x: x, False),
        (torch.float32, lambda x: x * (1 + 1e-6), False),
        (torch.float32, lambda x: x * 1.01, True),
        # Rounding errors may change a route.
        (torch.float32, lambda x: x * (torch.arange(len(x)) != 3), False),
        (torch.float32, lambda x: x * (torch.arange(len(x)) % 8 != 3), True),
        (torch.float32, lambda x: torch.where(torch.arange(len(x)) % 8 != 3, x, torch.nan), True),
        (torch.bfloat16, lambda x: x * (1 + 2**-7), False),
        (torch.bfloat16, lambda x: x * 1.2, True),
        (torch.complex64, lambda x: x * 1j, True),
        (torch.int64, lambda x: x, False),
        (torch.int64, lambda x: x.flip(0), True),
        (torch.bool, lambda x: ~x, True),
    ],
)
def test_samples_allow_for_other_orders_of_sums(
    dtype: torch.dtype, change: Any, is_other: bool
) -> None:
    x = (torch.arange(4000) - 1000).to(dtype)
    changed = change(x).to(dtype)
    assert bool(recomputation._differ(*map(recomputation._take_sample, (x, changed)))) is is_other


# --- optimizers ---


def _walks_of_many_optimizers() -> tuple[int, int, int, int]:
    walks = 0
    real, referrers = gc.get_objects, gc.get_referrers

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal walks
        walks += 1
        return real(*args, **kwargs)

    def count_referrers(*args: Any) -> Any:
        nonlocal walks
        walks += 1
        return referrers(*args)

    early = Stack([[PARTS["dropout"]]] * 2)
    loaded = copy.deepcopy(early)
    with ovpatch.applied("recompute", options=BLOCKS):
        searches = mock.Mock(wraps=attach._find_models)
        with (
            mock.patch.object(gc, "get_objects", count),
            mock.patch.object(gc, "get_referrers", count_referrers),
        ):
            models = [Stack([[PARTS["dropout"]]] * 2), early, loaded]
            models.append(copy.deepcopy(Stack([[PARTS["dropout"]]] * 2)))
            params = [param for model in models for param in model.parameters()]
            with mock.patch.object(attach, "_find_models", searches):
                kept = [torch.optim.SGD([param], lr=0.1) for param in params]
                kept += [
                    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(20)
                ]
        before = COUNTERS.calls
        for model in models:
            model(torch.ones(4, WIDTH)).backward()
    return walks, searches.call_count, len(kept), COUNTERS.calls - before


def test_optimizers_find_their_models_without_a_walk(ranks: Any) -> None:
    """Optimizers of single parameters search each model's parameters once, and never search all objects."""
    ((walks, searches, optimizers, calls),) = ranks(1)(_walks_of_many_optimizers)
    assert walks == 0
    assert calls == 4 * 2
    assert searches == 4
    assert optimizers > 50
