"""Runs a function twice in one worker, stock and patched, and what such functions share."""

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
    """Return what ``function`` returns stock and patched, and what it counted."""
    return arms.both(function, *args, apply=partial(apply, options), counters=counters, **kwargs)


def all_both(
    function: Callable[..., Any], cases: arms.Cases, *, options: dict[str, Any] | None = None
) -> Record:
    """Do so for the keyword arguments of every case, under one ``apply()``."""
    return arms.all_both(function, cases, apply=partial(apply, options), counters=counters)


def call(function: Callable[..., Any], **kwargs: Any) -> Any:
    return function(**kwargs)


def check_same(
    run: Callable[..., Any],
    cases: Mapping[Callable[..., Any], tuple[arms.Cases, dict[str, int]] | dict[str, int]],
    *,
    options: dict[str, Any] | None = None,
) -> None:
    """Demand stock's results of functions, in one call of ``run``, which is ``ranks(world)``.

    Args:
        run: Runs on the ranks.
        cases: For each function, what is counted in it; before that, where it has arguments, a table of these.
        options: Of the feature.
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
    """Return where this rank computes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; of a DTensor all of it."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def part(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; of a DTensor what this rank has of it, or all of it where that is a term of a sum."""
    if isinstance(tensor, DTensor) and not any(
        placement.is_partial() for placement in tensor.placements
    ):
        return tensor.detach().to_local().clone()
    return whole(tensor)


def seen(model: nn.Module, *, gathered: bool = False) -> Record:
    """Return all gradients and parameters, and how they are laid out.

    Args:
        model: The model.
        gathered: Whether all of each, to be held against a model that is not cut. Otherwise a rank returns its own
            parts: a gather of each takes as long as the step, and both arms' parts are compared on all ranks.
    """
    named, of = dict(model.named_parameters()), whole if gathered else part
    return {
        "grad": {name: of(param.grad) for name, param in named.items()},
        "param": {name: of(param) for name, param in named.items()},
        "layout": {name: (layout(param), layout(param.grad)) for name, param in named.items()},
    }


def layout(tensor: Tensor | None) -> str:
    """Return what a tensor is, in words."""
    if isinstance(tensor, DTensor):
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.placements}"
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device())
