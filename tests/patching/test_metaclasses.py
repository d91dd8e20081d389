"""Patches of classes whose metaclass is written in C."""

from __future__ import annotations

from typing import Any

import pytest

from ovpatch.patching import PatchManager

from .tools import plus

torch: Any = pytest.importorskip("torch")


class Store(torch._C._distributed_c10d.HashStore):  # type: ignore[misc]
    """A class below one made by pybind11, whose metaclass is written in C, as that of ``torch.cuda.CUDAGraph``."""

    def add(self, key: str, amount: int) -> int:
        count: int = super().add(key, amount)
        return count


class Below(Store):
    """Inherits what is patched, so reverting deletes."""


@pytest.mark.parametrize("cls", [Store, Below])
def test_classes_below_those_of_pybind11(pm: PatchManager, cls: Any) -> None:
    assert isinstance(vars(type(cls)).get("__setattr__"), type(type.__setattr__)), (
        "the metaclass has its own, in C"
    )
    before = dict(vars(cls))
    pm.register_patch(f"{__name__}.{cls.__name__}.add", wrap=plus(100), feature="a", why="test")
    pm.apply("a")
    assert cls().add("k", 1) == 101
    pm.revert("a")
    assert cls().add("k", 1) == 1
    assert dict(vars(cls)) == before
    assert ("add" in before) == (cls is Store)
