"""The kernels of schedule ``fused``, compiled for an H200 without one: they fit, and use its fast instructions."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ovpatch.overlap.tensor_parallel.triton_gemm import gather_gemm_kernel, gemm_scatter_kernel
from ovpatch.overlap.tensor_parallel.triton_launch import Tiles
from tests.support.rarely import RARELY

# The bytes of shared memory that a program may have.
SHARED = 227 * 1024
ALIGNED = ("K", "K0", "K1", "K2", "n", "n0", "n1", "n2", "half_bytes")


def compiled(kernel: Any, constants: dict[str, Any], tiles: Tiles) -> Any:
    """Compile a kernel for tensors in bfloat16 and sizes that are multiples of 16."""
    names = kernel.arg_names
    types = {
        "peers": "*i64",
        "state": "*i64",
        "arrived": "*i32",
        **dict.fromkeys((*ALIGNED, "rank", "m", "pullers"), "i32"),
    }
    cut = {
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "GROUP": tiles.group,
        "SPLIT": tiles.split,
    }
    fixed = {**cut, **constants, "WORLD": 8}
    signature = {name: "constexpr" if name in fixed else types.get(name, "*bf16") for name in names}
    aligned = [name for name in names if name in ALIGNED or signature[name].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def absent(*prefixes: str, count: int) -> dict[str, None]:
    return {f"{prefix}{i}": None for prefix in prefixes for i in range(count, 3)}


CUTS = {
    "as chosen": Tiles(),
    "narrow": Tiles(columns=128, stages=4),
    "in halves": Tiles(split=True, stages=4),
}


#: With three GEMMs, the kernels need the most memory. With one, tiles do not decide whether they compile.
RUNS = [
    pytest.param(
        count,
        tiles,
        id=f"{count}-{name}",
        marks=[RARELY] if name != "as chosen" else [],
    )
    for name, tiles in CUTS.items()
    for count in (1, 3)
]


@pytest.mark.parametrize(("count", "tiles"), RUNS)
def test_kernels_fit_and_are_asynchronous(count, tiles, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pulled = {"COUNT": count, "KN": False, "PC": tiles.width}
    gather = compiled(gather_gemm_kernel, pulled | absent("w", "bias", "out", count=count), tiles)
    scatter = compiled(
        gemm_scatter_kernel, {"COUNT": count, "KN": True} | absent("x", "w", count=count), tiles
    )
    for kernel in (gather, scatter):
        assert kernel.metadata.shared <= SHARED
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    rows = gather.asm["ptx"]
    assert "ld.global.v4" in rows, "rows are fetched by 16 bytes a thread"
    assert "fence.proxy.async.global" in rows
    assert "cp.async.bulk.wait_group 0" in scatter.asm["ptx"], (
        "tiles must be stored before they are signalled"
    )
