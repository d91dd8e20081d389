"""Subclasses without their own step are sharded as their base, in whichever order classes and instances are made.

The first instance of a class whose step has no hooks yet makes torch write the inherited step into that class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.plugins.dist_optimizer.checks import apply, ddp, train_steps
from tests.plugins.dist_optimizer.test_loops import net

Adam, AdamW = torch.optim.Adam, torch.optim.AdamW


@contextmanager
def _fresh_bases() -> Iterator[None]:
    """Restore the bases as in a new process, in which torch has not written steps with hooks into them."""
    kept = {base: vars(base)["step"] for base in (Adam, AdamW) if "step" in vars(base)}
    if hasattr(Adam.step, "hooked"):
        Adam.step = Adam.step.__wrapped__  # type: ignore[method-assign]
    if AdamW in kept:
        del AdamW.step
    try:
        yield
    finally:
        if "step" in vars(AdamW):
            del AdamW.step
        for base, step in kept.items():
            base.step = step  # type: ignore[method-assign]


def _make_classes() -> dict[str, type[Optimizer]]:
    class Plain(AdamW):
        """A subclass that changes nothing of the update."""

    class Second(Plain):
        """A subclass of the subclass."""

    class Decorated(AdamW):
        """A subclass with its own step that names torch's as the one that it wraps."""

        @functools.wraps(Adam.step)
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = torch.ones_like(param.grad) * param.grad.norm()
            return super().step(closure)

    return {"base": AdamW, "plain": Plain, "second": Second, "decorated": Decorated}


# Instances of classes that are made before and after apply(), and whether the last one is sharded.
ORDERS: dict[str, tuple[str, str, bool]] = {
    "a subclass first": ("", "plain", True),
    "the base first": ("", "base plain", True),
    "the base and then its subclass, afterwards the base": ("", "plain base", True),
    "a subclass of a subclass first": ("", "second", True),
    "both subclasses, the inner one first": ("", "plain second", True),
    "both subclasses, the outer one first": ("", "second plain second", True),
    "the base before": ("base", "plain", True),
    "the base before, a subclass of a subclass": ("base", "second", True),
    "the base and a subclass before": ("base plain", "plain", True),
    "a subclass before": ("plain", "plain", False),
    "a subclass before, then the base": ("plain", "base plain", False),
    "a subclass before, then its subclass": ("plain", "second", False),
    "an inner subclass before": ("second", "second", False),
    "an inner subclass before, then the middle one": ("second", "plain", True),
    "a base of a class before that has kept its step": ("plain base", "base", True),
    "its own step": ("", "decorated", False),
    "its own step, after the base": ("", "base decorated", False),
}


def _make(classes: dict[str, type[Optimizer]], words: str, model: nn.Module) -> Optimizer:
    made = [classes[word](model.parameters(), lr=0.01) for word in words.split()]
    return made[-1] if made else torch.optim.SGD(model.parameters(), lr=0.01)


def _train_in_order(name: str, *, patched: bool) -> tuple[list[Any], dict[str, int], str]:
    """Return parameters and calls of hooks, the counters, and the remark on a fallback."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import list_remarks

    before, after, _ = ORDERS[name]
    calls: list[str] = []
    torch.manual_seed(0)
    with _fresh_bases():
        classes, stock = _make_classes(), Adam.step
        _make(classes, before, net())
        with apply() if patched else nullcontext():
            start, model = _count(), ddp(net())
            opt = _make(classes, after, model)
            opt.register_step_pre_hook(lambda *_: calls.append("pre"))
            opt.register_step_post_hook(lambda *_: calls.append("post"))
            records: list[Any] = train_steps(model, opt, 3)
            counted = {key: value - start[key] for key, value in _count().items()}
            remarks = (
                [text for text in list_remarks() if f"{type(opt).__name__} falls back" in text]
                if patched
                else []
            )
        # Stock PyTorch continues, also within functions that the classes have kept.
        records += train_steps(model, opt, 2)
        assert Adam.step is stock
    return [*records, calls], counted, remarks[-1] if remarks else ""


def _count() -> dict[str, int]:
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import COUNTERS

    return {"steps": COUNTERS.steps, "stock": COUNTERS.stock_optimizers}


def _train_all() -> dict[str, tuple[Any, Any, dict[str, int], str]]:
    found = {}
    for name in ORDERS:
        expected, _, _ = _train_in_order(name, patched=False)
        found[name] = (expected, *_train_in_order(name, patched=True))
    return found


def test_subclasses_without_their_own_step_are_sharded_in_any_order(ranks: Any) -> None:
    for found in ranks(2)(_train_all):
        for name, (expected, records, counted, remarks) in found.items():
            is_sharded = ORDERS[name][2]
            torch.testing.assert_close(records[:-1], expected[:-1], rtol=0, atol=0, msg=name)
            assert records[-1] == expected[-1], name
            assert records[-1][0] == "pre", name
            assert counted == (
                {"steps": 3, "stock": 0} if is_sharded else {"steps": 0, "stock": 1}
            ), (name, counted)
            if not is_sharded:
                reason = (
                    "is not known to be element-wise"
                    if "own" in name
                    else "Call ovpatch.apply() once, before you"
                )
                assert reason in remarks, f"{name}: {remarks}"


def _apply_twice() -> list[tuple[dict[str, int], bool, str]]:
    """Return, for two calls of apply(), the counters, and whether stock PyTorch has the same parameters."""
    from ovpatch_plugins.dist_optimizer.dist_optimizer_report import list_remarks

    found = []
    with _fresh_bases():
        classes = _make_classes()
        for _ in range(2):
            torch.manual_seed(0)
            with apply():
                start, model = _count(), ddp(net())
                opt = classes["plain"](model.parameters(), lr=0.01)
                records = train_steps(model, opt, 2)
                counted = {key: value - start[key] for key, value in _count().items()}
                remark = " ".join(text for text in list_remarks() if "Plain falls back" in text)
            torch.manual_seed(0)
            twin = ddp(net())
            expected = train_steps(twin, AdamW(twin.parameters(), lr=0.01), 2)
            is_same = all(
                torch.equal(step[key], wanted[key])
                for step, wanted in zip(records, expected, strict=True)
                for key in step
            )
            found.append((counted, is_same, remark))
    return found


def test_a_class_steps_right_under_a_second_apply(ranks: Any) -> None:
    for (first, is_first_same, _), (second, is_second_same, remark) in ranks(2)(_apply_twice):
        assert is_first_same
        assert is_second_same
        assert first == {"steps": 2, "stock": 0}
        # The class has kept the function of the first apply().
        assert second == {"steps": 0, "stock": 1}
        assert "Call ovpatch.apply() once" in remark
