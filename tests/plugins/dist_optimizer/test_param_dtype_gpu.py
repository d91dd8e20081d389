"""Parameters that are kept and gathered in bf16, on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plugins.dist_optimizer import test_gpu, test_reads_of_parameters
from tests.plugins.dist_optimizer.checks import all_cases, check_all
from tests.plugins.dist_optimizer.test_gpu import NCCL
from tests.plugins.dist_optimizer.test_param_dtype import (
    HELD,
    MODELS,
    STYLES,
    check_kept,
    followed,
    modelled,
    styled,
)
from tests.plugins.dist_optimizer.test_param_dtype_uses import HOWS, NEVER, used
from tests.plugins.dist_optimizer.under_autocast import OPTIONS

pytestmark = pytest.mark.gpu(2)

WIDE: dict[str, dict[str, Any]] = {name: kwargs for name, kwargs in test_gpu.WIDE.items() if name != "fp32"}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("granularity", ["size", "layer", "module"])
def test_streams(ranks, overlap, granularity):
    options = OPTIONS | {"overlap_param_gather": overlap, "gather_granularity": granularity, "gather_bucket_mb": 3.0}
    cases = WIDE if granularity == "size" else {"autocast": {}}
    check_all(ranks(2)(all_cases, test_gpu.wide, cases, options=options, **NCCL), check=check_kept, steps=12)


@pytest.mark.parametrize("overlap", [False, True])
def test_clipped(ranks, gpus, overlap):
    options = OPTIONS | {"overlap_param_gather": overlap, "gather_bucket_mb": 3.0}
    results = ranks(gpus)(all_cases, test_gpu.wide, {"": {"clip": 0.01}}, options=options, **NCCL)
    check_all(results, check=check_kept, steps=12, bitwise=False)


def test_parameters_read(ranks):
    hows = set(test_reads_of_parameters.HOWS).difference(HELD, test_reads_of_parameters.ON_CPU)
    cases = {how: {"how": how} for how in sorted(hows)}
    check_all(ranks(2)(all_cases, followed, cases, options=OPTIONS, **NCCL), check=check_kept)


def test_loops(ranks):
    styles = {style: {"style": style} for style in STYLES}
    check_all(ranks(2)(all_cases, styled, styles, options=OPTIONS, **NCCL), check=check_kept)
    models = {name: {"case": name} for name in MODELS}
    check_all(ranks(2)(all_cases, modelled, models, options=OPTIONS, **NCCL), check=check_kept, steps=9)


def test_uses(ranks):
    cases = {how: {"how": how} for how in HOWS if how not in (*NEVER, "recurrent")}
    check_all(ranks(2)(all_cases, used, cases, options=OPTIONS, **NCCL), check=check_kept)


@pytest.mark.parametrize("around", ["model", "wrapper"])
def test_compiled_models_stay_in_fp32(ranks, around):
    results = ranks(2)(all_cases, test_gpu.wide, {"": {"compiled": around}}, options=OPTIONS, **NCCL)
    check_all(results, steps=12)
    assert all(result[""]["counters"]["params_in_param_dtype"] == 0 for result in results)
