"""Launches of schedule ``fused`` that keep a compiled kernel use the kernel that Triton would have chosen."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import _allocation
from triton.runtime.jit import create_function_from_signature

from ovpatch.overlap.kernels import workspace_kernels as prepared
from ovpatch.overlap.kernels.symmetric_memory import Memory, Scratch, Workspace
from ovpatch.overlap.tensor_parallel import triton_launch as launch
from ovpatch.overlap.tensor_parallel.triton_launch import Tiles

KERNELS = (
    "stage_kernel",
    "gather_gemm_kernel",
    "gemm_scatter_kernel",
    "scatter_kernel",
    "reduce_kernel",
)
CPU = torch.device("cpu")


@functools.cache
def binder(kernel: Any) -> Callable[..., Any]:
    """Return Triton's own binder, which returns the properties of its arguments that a kernel is compiled for."""
    return create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )


class Watched:
    """A kernel that logs launches and compares their arguments with the compiled ones."""

    def __init__(self, kernel: Any, log: list[Any]) -> None:
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def first(*args: Any, **options: int) -> Any:
            compiled_for = (binder(self.kernel)(*args)[1], options)
            self.log.append((self.kernel.__name__, grid, described(args), compiled_for, "compiled"))
            return Compiled(self, compiled_for)

        return first


class Compiled:
    def __init__(self, watched: Watched, compiled_for: Any) -> None:
        self.watched, self.compiled_for = watched, compiled_for

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            kernel = self.watched.kernel
            assert binder(kernel)(*args)[1] == self.compiled_for[0]
            self.watched.log.append(
                (kernel.__name__, grid, described(args), self.compiled_for, "as before")
            )

        return run


def described(args: tuple[Any, ...]) -> list[Any]:
    """Return the properties of arguments that must be equal for two launches to do the same."""
    return [
        (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in args
    ]


class Group:
    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def workspace() -> Workspace:
    """Return a workspace of any size whose memory no kernel touches."""

    def allocate(size: int, group: Any, device: torch.device, prepare: Any) -> Memory:
        return Memory(torch.empty(0), [0, 0])

    return Workspace(Group(), CPU, allocate)


@pytest.fixture
def log(monkeypatch):
    found: list[Any] = []
    for name in KERNELS:
        monkeypatch.setattr(launch, name, Watched(getattr(launch, name), found))
    # The type of an address could not be seen.
    monkeypatch.setattr(prepared, "_get_address", lambda tensor: tensor)
    return found


def rows(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(m, n, dtype=dtype)


def weight(n: int, k: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    return rows(k, n, dtype).t() if transposed else rows(n, k, dtype)


def bias(n: int, kind: int, dtype: torch.dtype) -> Tensor | None:
    """Return no bias, a bias at an aligned address, or a bias at an address that is not aligned."""
    return None if not kind else torch.empty(n + 1, dtype=dtype)[kind - 1 :][:n]


MS, KS, COUNTS, DTYPES = (1, 2, 3, 16, 48), (8, 16), (1, 2, 3), (torch.bfloat16, torch.float16)


def gather(
    space: Workspace,
    m: int,
    k: int,
    count: int,
    dtype: torch.dtype,
    turn: bool,
    tiles: Tiles | None,
) -> None:
    weights = [weight(8 * (i + 1), k, turn, dtype) for i in range(count)]
    for kind in range(3):
        launch.gather_linear(
            space,
            rows(m, k, dtype),
            weights,
            [bias(len(w), kind, dtype) for w in weights],
            tiles=tiles,
        )
    launch.gather_linear(space, rows(m, k, dtype), [], [])


def scatter(
    space: Workspace,
    m: int,
    k: int,
    count: int,
    dtype: torch.dtype,
    turn: bool,
    tiles: Tiles | None,
) -> None:
    xs = [rows(2 * m, 8 * (i + 1), dtype) for i in range(count)]
    weights = [weight(k, x.shape[1], turn, dtype) for x in xs]
    launch.linear_scatter(space, xs, weights, bias(k, count % 3, dtype), tiles=tiles)
    launch.scatter(space, rows(2 * m, k, dtype))


def launches(
    log: list[Any], operator: Any, space: Workspace, case: Any
) -> tuple[list[Any], set[str]]:
    """Return the launches of an operator, and whether they were compiled or kept."""
    log.clear()
    operator(space, *case)
    return [launch[:-1] for launch in log], {launch[-1] for launch in log}


def test_kept_launches_are_the_launches_of_triton(log):
    space, tiles = workspace(), (None, Tiles(columns=128))
    cases = list(itertools.product((gather, scatter), MS, KS, COUNTS, DTYPES, (False, True), tiles))
    random.Random(0).shuffle(cases)
    assert space.begin_operator(0, 10_000)
    for operator, *case in cases:
        operator(space, *case)
    kept = space.kept
    for operator, *case in cases:
        again, how = launches(log, operator, space, case)
        assert how == {"as before"}
        space.kept = {}
        assert launches(log, operator, space, case)[0] == again
        space.kept = kept


def test_a_workspace_of_another_size_compiles_again(log):
    space, case = workspace(), (16, 8, 1, torch.bfloat16, False, None)
    before, _ = launches(log, scatter, space, case)
    # The size is so large that its number needs 64 bits.
    assert space.begin_operator(1 << 31, 0)
    after, how = launches(log, scatter, space, case)
    assert how == {"compiled"}
    assert after != before


class Recorder:
    """A kernel, and its compiled form, that keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def run(*args: Any, **options: int) -> Any:
            self.launches.append(args)
            return self

        return run


def test_tensors_are_launched_again_by_address():
    kernel, x, state = Recorder(), torch.empty(4), torch.empty(2)
    launched = prepared.Prepared(kernel, 3, None, (state, 7, None), num_warps=8)
    launched(x, None)
    y = torch.empty(5)
    launched(y, None)
    first, again = kernel.launches
    assert [
        arg is wanted for arg, wanted in zip(first, (x, None, state, 7, None), strict=True)
    ] == [True] * 5
    assert again == (y.data_ptr(), None, state.data_ptr(), 7, None)


def test_memory_for_descriptors_comes_from_the_workspace_alone():
    requests: list[tuple[int, int, int | None]] = []

    class Kernel(Recorder):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            def run(*args: Any, **options: int) -> Any:
                _allocation._allocator.get()(640, 128, None)
                return self

            return run

    def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
        requests.append((size, alignment, stream))
        return torch.empty(size)

    before = _allocation._allocator.get()
    launched = prepared.Prepared(Kernel(), 3, scratch, ())
    launched()
    launched()
    assert requests == [(640, 128, None)] * 2
    assert _allocation._allocator.get() is before, "the script may have its own allocator"


def test_ever_new_lengths_do_not_fill_memory(log, monkeypatch):
    monkeypatch.setattr(launch, "_MAX_LAUNCHES", 8)
    space = workspace()
    for m in range(1, 30):
        scatter(space, m, 8, 1, torch.bfloat16, False, None)
        assert len(space.kept) <= 8


@pytest.mark.parametrize(
    ("weights", "biases"),
    [
        ([rows(8, 24)], [None]),
        ([rows(8, 16, torch.float32)], [None]),
        ([rows(8, 16)], [torch.empty(8)]),
        ([rows(8, 16)], [torch.empty(16, dtype=torch.bfloat16)]),
    ],
)
def test_operands_that_do_not_fit_are_refused(log, weights, biases):
    space = workspace()
    for fits in (None, torch.empty(8, dtype=torch.bfloat16)):
        launch.gather_linear(space, rows(4, 16), [rows(8, 16)], [fits])
    log.clear()
    with pytest.raises(
        ValueError, match=r"does not fit .*: give all operands one dtype, and features that match"
    ):
        launch.gather_linear(space, rows(4, 16), weights, biases)
    assert not log, "no rank may wait for a launch that another rank has refused"


def test_gemms_that_do_not_fit_are_refused(log):
    for xs, weights in (
        ([rows(8, 16)], [rows(8, 24)]),
        ([rows(8, 16), rows(6, 16)], [rows(8, 16)] * 2),
        ([rows(8, 16)], [rows(8, 16, torch.float16)]),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            launch.linear_scatter(workspace(), xs, weights)
    with pytest.raises(ValueError, match=r"a bias .* does not fit"):
        launch.linear_scatter(
            workspace(), [rows(8, 16)], [rows(8, 16)], torch.empty(16, dtype=torch.bfloat16)
        )
    assert not log


def test_descriptors_have_memory_that_only_grows():
    scratch = Scratch(CPU)
    first = scratch(1000, 128, None)
    assert len(first) >= 1000
    assert scratch(10, 128, None) is first
    second = scratch(2000, 128, None)
    assert len(second) >= 2000
    assert second is not first
    assert scratch(1000, 128, None) is second
    held = weakref.ref(first)
    del first
    assert held() is not None, "a stream, or a graph, may be using it still"


def test_launches_do_not_keep_a_workspace(log):
    space = workspace()
    scatter(space, 16, 8, 1, torch.bfloat16, False, None)
    gather(space, 16, 8, 1, torch.bfloat16, False, None)
    held = weakref.ref(space)
    gc.disable()
    try:
        del space
        assert held() is None, "its memory goes with its process group, not some time later"
    finally:
        gc.enable()
