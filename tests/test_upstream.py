"""The upstream ledger: each use of a name that other packages do not promise has a row, and each row a use."""

from __future__ import annotations

import ast
import importlib.metadata

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.support.torch_versions import ON_LISTED_TORCH
from tools import upstream

LEDGER = upstream.read_ledger(upstream.LEDGER_FILE.read_text(encoding="utf-8"))

# Names that some of the supported versions or builds of torch lack.
ONLY_IN_SOME_VERSIONS = {"torch._C._cuda_getCurrentRawStream"}
# Settings whose default is None.
NONE_BY_DEFAULT = {"torch._inductor.config.post_grad_custom_pre_pass"}


@pytest.fixture(scope="module")
def uses():
    return upstream.find_all_uses(upstream.ROOT)


@ON_LISTED_TORCH
def test_each_use_has_a_row(uses):
    missing = {
        use: sorted(rooms)
        for use, rooms in uses.items()
        if not any(row.covers(use) for row in LEDGER)
    }
    assert not missing, "use a public name, or give the reason in ovpatch/upstream.toml"


@ON_LISTED_TORCH
def test_each_symbol_of_the_ledger_is_used(uses):
    unused = [
        symbol
        for row in LEDGER
        for symbol in row.symbols
        if not upstream.find_matches(symbol, uses)
    ]
    assert not unused, "remove them from ovpatch/upstream.toml"


def test_the_page_shows_the_ledger():
    text = upstream.PAGE.read_text(encoding="utf-8")
    assert upstream.refresh_page(text, LEDGER) == text, "run python -m tools.upstream --write"


def test_versions_are_ranges_and_include_the_installed_ones():
    for row in LEDGER:
        for package, versions in row.versions:
            try:
                installed = Version(importlib.metadata.version(package)).public
            except importlib.metadata.PackageNotFoundError:
                installed = ""
            assert not installed or SpecifierSet(versions).contains(installed, prereleases=True), (
                row.symbols
            )


def test_names_of_the_installed_torch_exist(uses):
    """A name that only some versions have needs a hasattr() or an optional patch."""
    names = [use for use in uses if use.startswith("torch.") and "*" not in use]
    gone = [name for name in names if upstream.find_object(name) is None]
    assert len(names) > 50
    assert set(gone) <= ONLY_IN_SOME_VERSIONS | NONE_BY_DEFAULT, torch.__version__


# --- the finder ---

SOURCE = """
import sys
import torch
import torch._logging._internal as deep
from torch import _C
from torch.distributed import distributed_c10d as c10d
from . import _own

def f(stage, self):
    _C._is_tracing()
    torch._C.DisableTorchFunction()
    c10d._world.pg_map
    torch.nn.functional.linear
    torch.float32._bits.more
    stage._chunks[0]._meta.shape
    self._own_attribute = stage._own_method()
    getattr(stage, "_stage_index", 0)
    getattr(stage, "index", 0)
    type(stage.grad_fn).__name__ == "_ShardBackward" or type(stage).__name__ == "Stage"
    getattr(stage.grad_fn, "variable", None)
    sys._getframe()

class A:
    _field: int = 1
    def _own_method(self): return self._field + stage._own_attribute
"""


def test_private_names_and_attributes_are_found_and_public_and_own_ones_are_not():
    assert sorted(upstream.find_uses({"a.py": ast.parse(SOURCE)})) == [
        "._ShardBackward",
        "._chunks",
        "._meta",
        "._stage_index",
        ".variable",
        "torch._C",
        "torch._C.DisableTorchFunction",
        "torch._C._is_tracing",
        "torch._logging._internal",
        "torch.distributed.distributed_c10d._world",
        "torch.float32._bits",
    ]


def test_targets_of_patches_are_found():
    source = (
        'BASE = "torch.nn"\nbase.register_patch(f"{BASE}.Module.{name}", wrap)\nregister_patch(target)\n'
        'patches.register_patch("torch.optim.Adam.step", wrap=w)\n'
    )
    found = set(upstream.list_static_targets(ast.parse(source)))
    assert found == {"torch.nn.Module.*", "torch.optim.Adam.step"}
    assert "torch.optim.adam.Adam.step" in upstream.find_targets()["dist_optimizer"]


@pytest.mark.parametrize(
    "text",
    [
        '[[use]]\nsymbol = "a"\ntorch = ">=2"\nreason = "x"',
        '[[use]]\nsymbol = "a"\nreason = "x"\nremove_when = "y"',
        '[[use]]\ntorch = ">=2"\nreason = "x"\nremove_when = "y"',
        '[[use]]\nsymbol = "a"\ntorch = ">=2"\nreason = "x"\nremove_when = "y"\nfile = "z"',
    ],
)
def test_a_row_without_a_field_is_an_error(text):
    with pytest.raises(
        ValueError, match=r"^ledger: .* Write symbol, torch, reason and remove_when\.$"
    ):
        upstream.read_ledger(text)
