"""DTensors in the places of parameters that are their local tensors.

[Note: DTensors over parameters] ``DistributedDataParallel(device_mesh=)`` takes the local tensors of a model's DTensors
for parameters. In the first forward it puts DTensors of them in the module, made by ``_unflatten_tensor``, and there
they stay: views of the parameters' memory, through which all of forward reads. Such a view can be pending with its
parameter (pending.py, [Note: pending by type]): torch asks its class as well, and who goes round that, as DTensor's
own methods do, looks at ``_local_tensor``. Any other view of the memory is one too many, as ever, and so is a graph
that holds this one, or its local tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ovpatch.overlap.memory import handles
from ovpatch.overlap.weakly import forget

_views: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any]]] = {}  # by id() of the parameter


def noting_views(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's ``_unflatten_tensor``: notes of which parameter a DTensor is a view."""

    @functools.wraps(original)
    def unflatten(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        view = original(tensor, *args, **kwargs)
        _views[id(tensor)] = (
            weakref.ref(tensor, functools.partial(forget, _views, id(tensor))),
            weakref.ref(view),
        )
        return view

    return unflatten


def view_of(param: Tensor) -> Any:
    """Return the DTensor that stands in a parameter's place, or None."""
    entry = _views.get(id(param))
    return entry[1]() if entry is not None and entry[0]() is param else None


def any_views() -> bool:
    """Tell whether there may be such DTensors."""
    return bool(_views)


def is_sole(view: Any, param: Tensor) -> bool:
    """Tell whether a view that is not pending is its parameter's, and Python alone holds it and its local tensor."""
    local = view._local_tensor
    return handles(view) == handles(local) == 1 and local._base is param
