"""Losses, gradients, parameters, buffers and random numbers have the bits of stock PyTorch for blocks of all kinds."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ovpatch
from ovpatch_plugins.recompute import RecomputeError, recompute
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from ovpatch_plugins.recompute.selective import make_policy
from tests.plugins.recompute.models import (
    WIDTH,
    Block,
    Decoder,
    Derived,
    count_differences,
    data,
    plain_call,
    record,
)


def _mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    return loss


def _twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def _grad_of_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    # No other backend has second derivatives.
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
    return loss


def _two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = model(x).square().mean(), model(-x).square().mean()
    first.backward()
    second.backward()
    return first


def _fails_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    hook = model.layers[0].up.weight.register_hook(lambda _grad: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    hook.remove()
    model.zero_grad()
    return _mean(model, x)


def _moved_to_host(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().mean()
    loss.backward()
    return loss


def _autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss


def _evaluated_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model(x)
    model.eval()
    with torch.inference_mode():
        model(x)
    model.train()
    return _mean(model, x)


@dataclass(frozen=True)
class Case:
    """A training loop.

    Attributes:
        make: Makes a block.
        step: Runs forward and backward.
        model: Arguments of the model.
        wrap: Changes the model.
        dtype: The dtype of parameters.
        calls: Recomputed calls of all blocks in two steps.
    """

    make: Callable[[], nn.Module] = Block
    step: Callable[[Any, torch.Tensor], torch.Tensor] = _mean
    model: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], object] = lambda model: None
    dtype: torch.dtype = torch.float32
    calls: int = 6


def _wrap_blocks(model: Any) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)


def _kind(kind: str) -> Callable[[], nn.Module]:
    return functools.partial(Block, kind, 0.2)


CASES = {
    "plain": Case(),
    "dropout": Case(functools.partial(Block, "", 0.3)),
    "bf16": Case(functools.partial(Block, "", 0.3), dtype=torch.bfloat16),
    "autocast": Case(functools.partial(Block, "", 0.3), _autocast),
    "batch norm": Case(_kind("batch norm")),
    "buffer changed": Case(_kind("counted")),
    "buffer replaced": Case(_kind("replaced")),
    "spectral norm": Case(_kind("spectral")),
    "frozen": Case(_kind("frozen")),
    "several outputs": Case(_kind("several outputs")),
    "checkpoint inside": Case(_kind("checkpoint inside")),
    "forward of a base class": Case(functools.partial(Derived, "", 0.2)),
    "two backwards": Case(step=_twice),
    "gradient of a gradient": Case(step=_grad_of_grad),
    "two forwards": Case(functools.partial(Block, "", 0.2), _two_forwards, calls=12),
    "a failed backward": Case(functools.partial(Block, "", 0.2), _fails_first, calls=12),
    "saved tensors on the host": Case(_kind(""), _moved_to_host),
    "evaluated between": Case(_kind(""), _evaluated_between),
    "checkpointed by the script": Case(
        _kind(""), model={"call": functools.partial(checkpoint, use_reentrant=False)}, calls=0
    ),
    "checkpoint wrappers": Case(_kind(""), wrap=_wrap_blocks, calls=0),
}


def _train(case: Case) -> list[Any]:
    torch.manual_seed(1)
    model = Decoder(case.make, **case.model).to(case.dtype)
    case.wrap(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(2):
        loss = case.step(model, data(step, case.dtype))
        found += record(model, loss)
        optimizer.step()
        optimizer.zero_grad()
    return found + record(model)


def _compare(names: list[str]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in names:
        case = CASES[name]
        stock = _train(case)
        for granularity in ("full", "selective"):
            calls, again = COUNTERS.calls, COUNTERS.recomputations
            with ovpatch.applied("recompute", options={"recompute": {"granularity": granularity}}):
                patched = _train(case)
            changed = count_differences(stock, patched)
            found[f"{name}, {granularity}"] = (
                changed,
                COUNTERS.calls - calls,
                COUNTERS.recomputations - again,
            )
    return found


def test_as_stock(ranks: Any) -> None:
    (found,) = ranks(1)(_compare, list(CASES))
    for name, (changed, calls, again) in found.items():
        case = CASES[name.rpartition(", ")[0]]
        assert not changed, f"{name}: {changed} tensors differ"
        assert calls == case.calls, name
        assert bool(again) == bool(calls), name


# --- kept tensors ---


def _saved_bytes(granularity: str) -> tuple[int, list[int]]:
    """Return the bytes that a forward keeps, without parameters, and the count of forwards of each block in a step."""
    torch.manual_seed(0)
    model = Decoder(layers=4)
    recompute(model, granularity)
    sizes = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(data(0)).square().mean()
    kept = sum(size for key, size in sizes.items() if key not in params)
    loss.backward()
    runs = [layer.runs for layer in model.layers]
    recompute(model, "none")
    return kept, runs


def test_inputs_of_blocks_alone_are_kept(ranks: Any) -> None:
    ((stock, runs),) = ranks(1)(_saved_bytes, "none")
    assert runs == [1] * 4
    ((kept, runs),) = ranks(1)(_saved_bytes, "full")
    # A block that counts its forwards counts as in stock PyTorch.
    assert runs == [1] * 4
    assert kept < stock / 4


def _count_operators() -> dict[str, int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.attention = self.gemms = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name
            self.attention += "attention" in name and "backward" not in name
            self.gemms += name in ("aten::mm", "aten::addmm")
            return func(*args, **(kwargs or {}))

    found = {}
    for granularity in ("full", "selective"):
        for dropout in (0.0, 0.5):
            model = Decoder(layers=2)
            recompute(model, granularity)
            loss = model(data(0)).square().mean()
            with Count() as count:
                loss.backward()
            recompute(model, "none")
            found[f"{granularity} {dropout}"] = count.attention, count.gemms
    return found


def test_selective_keeps_attention_and_full_does_not(ranks: Any) -> None:
    (found,) = ranks(1)(_count_operators)
    assert found["full 0.0"][0] == 2
    assert found["selective 0.0"][0] == 0
    assert found["full 0.0"][1] == found["selective 0.0"][1] > 0


def _count_calls() -> tuple[int, int]:
    """Return the calls of Python functions in a step with torch's selective checkpoint, and with ``selective``."""
    kept = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)

    def policy(_ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    counts = []
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for call in (
        functools.partial(checkpoint, use_reentrant=False, context_fn=contexts),
        plain_call,
    ):
        model = Decoder(layers=2, call=call)
        if call is plain_call:
            recompute(model, "selective")
        # The first step makes the calls that run only once.
        model(data(0)).square().mean().backward()
        calls = 0

        def count(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            model(data(0)).square().mean().backward()
        finally:
            sys.setprofile(None)
        counts.append(calls)
    recompute(model, "none")
    return counts[0], counts[1]


def test_selective_calls_less_python_than_torchs_checkpoint(ranks: Any) -> None:
    """If the host bounds a step, these calls are the cost of a block with kept operators."""
    ((torchs, ours),) = ranks(1)(_count_calls)
    assert ours < 0.75 * torchs


class _ChangesAttention(Block):
    """A block that changes the output of attention in place."""

    def forward(self, x: torch.Tensor, rotary: Any, *, mask: Any = None) -> torch.Tensor:
        h = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        y.detach().add_(1)
        return x + self.down(self.up(y.transpose(1, 2).reshape(x.shape)))


class _ChangesLinear(Block):
    """A block that changes the output of a linear without a bias in place."""

    def forward(self, x: torch.Tensor, rotary: Any, *, mask: Any = None) -> torch.Tensor:
        h = torch.nn.functional.linear(x.unsqueeze(1), self.up.weight)
        h.mul_(0.5)
        return x + self.down(h.squeeze(1).cos())


def _change_a_kept_output(block: type[Block], keep: str) -> str:
    model = Decoder(block, layers=2)
    # Without a comparison of values, only versions show the change.
    with ovpatch.applied("recompute", options={"recompute": {"check": "never"}}):
        recompute(model, "selective", keep=keep)
        try:
            model(data(0)).square().mean().backward()
        except RuntimeError as error:
            return str(error)
        finally:
            recompute(model, "none")
    return ""


@pytest.mark.parametrize(
    ("block", "keep"),
    [
        (_ChangesAttention, ""),
        (_ChangesLinear, "aten.mm"),
        (_ChangesLinear, "aten._unsafe_view"),
        (_ChangesLinear, "aten.mm,aten._unsafe_view"),
    ],
)
def test_a_kept_output_that_was_changed_is_an_error(
    ranks: Any, block: type[Block], keep: str
) -> None:
    (text,) = ranks(1)(_change_a_kept_output, block, keep)
    assert "was changed in place after the call" in text
    assert text.endswith("use granularity=full.")


class _ChangesOther(Block):
    """A block that changes the output of a linear in place, after a linear with a bias."""

    def forward(self, x: torch.Tensor, rotary: Any, *, mask: Any = None) -> torch.Tensor:
        h = self.down(self.up(x))
        h.mul_(0.5)
        return x + h.cos()


def _change_without_rows() -> torch.Size:
    """Return the shape of the gradient of an empty batch, of which only outputs of addmm are kept."""
    model = Decoder(_ChangesOther, layers=2)
    empty = data(0)[:0].requires_grad_()
    with ovpatch.applied("recompute"):
        recompute(model, "selective", keep="aten.addmm")
        model(empty).sum().backward()
        recompute(model, "none")
    assert empty.grad is not None
    return empty.grad.shape


def test_an_empty_output_is_no_view_of_another_one(ranks: Any) -> None:
    (shape,) = ranks(1)(_change_without_rows)
    assert shape == data(0)[:0].shape


class _WritesThroughView(Block):
    """A block that changes a tensor in place, through a view and directly."""

    def forward(self, x: torch.Tensor, rotary: Any, *, mask: Any = None) -> torch.Tensor:
        h = self.up(x)
        h.transpose(0, 1).mul_(2)
        h.add_(1)
        return x + self.down(h.cos())


def _keep_views() -> int:
    found = []
    for granularity in ("none", "selective"):
        torch.manual_seed(0)
        model = Decoder(_WritesThroughView, layers=2)
        recompute(model, granularity, keep="aten.transpose,aten.mul_,aten.add_")
        found.append(record(model, _mean(model, data(0))))
        recompute(model, "none")
    return count_differences(*found)


def test_changes_in_place_and_views_are_repeated_although_keep_names_them(ranks: Any) -> None:
    assert ranks(1)(_keep_views) == [0]


@pytest.mark.parametrize(
    ("operator", "arguments", "keep", "kept"),
    [
        ("_scaled_dot_product_flash_attention", (None, None, None, 0.0), (), True),
        ("_scaled_dot_product_flash_attention", (None, None, None, 0.1), (), False),
        ("_scaled_dot_product_efficient_attention", (None, None, None, None, True, 0.1), (), False),
        ("_scaled_dot_product_flash_attention", (None, None, None), (), True),
        ("mm", (None, None), (), False),
        ("mm", (None, None), ("aten.mm",), True),
        ("bernoulli", (None,), ("aten::bernoulli",), False),
        ("relu_", (torch.ones(1),), ("aten.relu_",), False),
        ("t", (None,), ("aten.t",), False),
    ],
)
def test_operators_that_must_run_again_are_not_kept(
    operator: str, arguments: tuple[Any, ...], keep: tuple[str, ...], kept: bool
) -> None:
    """If attention with dropout were kept, a later dropout would draw other numbers in the recomputation.

    If a view or a change in place were kept, the recomputation would not change its own tensors.
    """
    policy = make_policy(keep)(None, getattr(torch.ops.aten, operator).default, *arguments)
    assert policy is (CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE)


# --- errors ---


class _Breaks(Block):
    """A block that cannot be computed again, for the reason ``how``.

    Attributes:
        forwards: A count of forwards that no recomputation restores, because it is an attribute of the class.
    """

    forwards = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, rotary: Any, *, mask: Any = None) -> torch.Tensor:
        has_run = _Breaks.forwards > 1
        _Breaks.forwards += 1
        if self.how == "other tensors" and has_run:
            x = x * torch.ones(1, WIDTH)
        if self.how == "fewer tensors" and has_run:
            return x + self.norm(x)
        if self.how == "other shapes" and has_run:
            x = x[:, :3].repeat(1, 2, 1)[:, :4]
            mask, rotary = None, [part[:4] for part in rotary]
        result = super().forward(x, rotary, mask=mask)
        if self.how == "gradient inside":
            torch.autograd.grad(result.sum(), self.up.weight, retain_graph=True)
        return result


BROKEN = {
    "other tensors": "does not compute the same again",
    "fewer tensors": "it saved",
    "other shapes": "and now is",
    "gradient inside": "takes gradients inside its forward",
    "input changed": "was changed in place after its forward",
    "parameter changed": "parameter up.weight of block layers.1 was changed in place",
}


def _break(how: str) -> str:
    _Breaks.forwards = 0
    model = Decoder(lambda: _Breaks(how), layers=2)
    recompute(model)
    inputs = []
    model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        loss = model(data(0)).square().mean()
        if how == "input changed":
            inputs[0].detach().add_(1)
        if how == "parameter changed":
            model.layers[1].up.weight.data.add_(1)
            with torch.no_grad():
                model.layers[1].up.weight.add_(1)
        loss.backward()
    except RecomputeError as error:
        return str(error)
    finally:
        recompute(model, "none")
    return ""


def _break_all() -> dict[str, str]:
    return {how: _break(how) for how in BROKEN}


def test_blocks_that_cannot_be_computed_again_are_an_error_with_a_remedy(ranks: Any) -> None:
    (found,) = ranks(1)(_break_all)
    for how, text in found.items():
        assert BROKEN[how] in text, f"{how}: {text}"
        assert "layers." in text
        assert text.endswith(".")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"granularity": "half"},
            "granularity='half' is unknown. Give one of none, full, selective",
        ),
        ({"blocks": "layers.*.attention"}, "has no module that blocks='layers.*.attention' names"),
    ],
)
def test_unknown_names_are_errors(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("*", r"\*")):
        recompute(Decoder(), **arguments)
