"""Run functions twice in one worker, in stock PyTorch and patched; helpers of such functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import ovpatch
from tests.plugins.ddp import arms
from tests.plugins.ddp.checks import check_all
from tests.support.equality import compare

Record = dict[str, Any]
SCHEDULES = ["stock", "bulk", "ring", "chunk"]


def both(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Record:
    """Return the results of ``function`` in stock PyTorch and patched, and the counters."""
    return arms.both(function, *args, apply=partial(apply, options), counters=counters, **kwargs)


def all_both(
    function: Callable[..., Any], cases: arms.Cases, *, options: dict[str, Any] | None = None
) -> Record:
    """Do the same for the keyword arguments of every case, with one ``apply()``."""
    return arms.all_both(function, cases, apply=partial(apply, options), counters=counters)


def call(function: Callable[..., Any], **kwargs: Any) -> Any:
    return function(**kwargs)


def check_same(
    run: Callable[..., Any],
    cases: Mapping[Callable[..., Any], tuple[arms.Cases, dict[str, int]] | dict[str, int]],
    *,
    options: dict[str, Any] | None = None,
) -> None:
    """Compare the results of functions with those of stock PyTorch, in one call of ``run``, which is ``ranks(world)``.

    Args:
        run: Runs on the ranks.
        cases: The expected counters of each function; if the function has arguments, a table of them comes first.
        options: Options of the feature.
    """
    calls, counted = {}, {}
    for function, what in cases.items():
        arguments, counts = what if isinstance(what, tuple) else ({"": {}}, what)
        for name, kwargs in arguments.items():
            case = f"{function.__name__} {name}"
            calls[case], counted[case] = {"function": function, **kwargs}, counts
    results = run(all_both, call, calls, options=options, timeout=120)

    def check(results: list[Record]) -> None:
        for result in results:
            compare(result["stock"], result["patched"], floor=1e-10).assert_equal()

    check_all(results, check=check)
    for result in results:
        for case, counts in counted.items():
            found = {name: result[case]["counters"][name] for name in counts}
            assert found == counts, case


def apply(options: dict[str, Any] | None) -> AbstractContextManager[Any]:
    return ovpatch.applied("tp_linear", options={"tp_linear": options or {}})


def counters() -> dict[str, int]:
    from ovpatch_plugins.tp_linear.tp_linear_report import COUNTERS

    return COUNTERS.as_dict()


def mesh(*sizes: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
    """Return a mesh of all ranks, of one dimension if no sizes are given."""
    return init_device_mesh(device().type, sizes or (dist.get_world_size(),), mesh_dim_names=names)


def device() -> torch.device:
    """Return the device of this rank."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def copy_full(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; a DTensor is gathered."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def part(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; of a DTensor, the part of this rank, or the sum if its parts are terms of a sum."""
    if isinstance(tensor, DTensor) and not any(
        placement.is_partial() for placement in tensor.placements
    ):
        return tensor.detach().to_local().clone()
    return copy_full(tensor)


def seen(model: nn.Module, *, gathered: bool = False) -> Record:
    """Return all gradients and parameters, and their layouts.

    Args:
        model: The model.
        gathered: Whether to gather all tensors, to compare them with a model that is not cut. Otherwise, a rank returns
            its own parts. A gather of each takes as long as the step, and ranks compare the parts of both arms.
    """
    named, of = dict(model.named_parameters()), copy_full if gathered else part
    return {
        "grad": {name: of(param.grad) for name, param in named.items()},
        "param": {name: of(param) for name, param in named.items()},
        "layout": {name: (layout(param), layout(param.grad)) for name, param in named.items()},
    }


def layout(tensor: Tensor | None) -> str:
    """Describe the dtype, shape and placements of a tensor."""
    if isinstance(tensor, DTensor):
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.placements}"
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device())
