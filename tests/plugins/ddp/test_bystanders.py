"""The reason why no model reached the feature, found in the imported modules, without a search for objects."""

from __future__ import annotations

import gc
import sys
import types

import pytest
from torch import nn

from ovpatch_plugins.ddp import ddp_report as report

FSDP, DTENSOR = "torch.distributed.fsdp", "torch.distributed.tensor"
DEEPSPEED, MEGATRON = "deepspeed.runtime.engine", "megatron.core.distributed"
POSSIBLE_REASONS = (
    "no model was wrapped in DistributedDataParallel; FSDP, tensor parallelism and other engines "
    "reduce "
    "gradients themselves"
)


@pytest.fixture(autouse=True)
def imported(monkeypatch):
    """Return a function that makes a module look imported. At first no library looks imported."""

    def imported(name, **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    def refuse():
        raise AssertionError("walks all objects")

    for name in (FSDP, DTENSOR, DEEPSPEED, MEGATRON):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(gc, "get_objects", refuse)
    return imported


def fsdp_module():
    """Return the base class of FSDP2 as it is after the import, and the subclass that torch itself makes."""
    base = type("FSDPModule", (), {})
    return base, type("ReplicateModule", (base,), {})


def test_a_plain_script_gets_no_remark():
    assert report.describe_other_reducers() == ""


@pytest.mark.parametrize("name", [FSDP, DTENSOR])
def test_an_imported_module_alone_is_no_evidence(imported, name):
    base, _replicate = fsdp_module()
    imported(name, FSDPModule=base)
    assert report.describe_other_reducers() == POSSIBLE_REASONS


@pytest.mark.parametrize("which", [0, 1])
def test_a_class_that_fsdp2_made_is_evidence(imported, which):
    bases = fsdp_module()
    imported(FSDP, FSDPModule=bases[0])
    imported(DTENSOR)
    made = type("FSDPLinear", (bases[which], nn.Linear), {})
    assert "FSDP2 (fully_shard): no model is wrapped" in report.describe_other_reducers(), made


def test_engines_are_named(imported):
    imported(DEEPSPEED)
    assert (
        report.describe_other_reducers()
        == "gradients are left to DeepSpeed: no model is wrapped in DistributedDataParallel"
    )
    imported(MEGATRON)
    assert "left to DeepSpeed and Megatron-Core:" in report.describe_other_reducers()
