"""What ``DistributedDataParallel`` calls of a C++ reducer or logger only after our feature has brought that back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ovpatch_plugins.ddp import messages


def needs_stock(name: str) -> Callable[..., NoReturn]:
    """Return a method that says that the stock reducer is needed; so an ``AttributeError`` is never what users see."""

    def method(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(messages.needs_stock(name))

    method.__name__ = method.__qualname__ = name
    return method


class StockOnly:
    """Base of our reducer."""

    _autograd_hook = needs_stock("_autograd_hook")
    _get_zeros_like_grad_buckets = needs_stock("_get_zeros_like_grad_buckets")
    _push_all_rebuilt_params = needs_stock("_push_all_rebuilt_params")
    _run_comm_hook = needs_stock("_run_comm_hook")
    _set_forward_pass_work_handle = needs_stock("_set_forward_pass_work_handle")
    _set_mixed_precision_param_dtype = needs_stock("_set_mixed_precision_param_dtype")
    _set_optimizer_in_backward = needs_stock("_set_optimizer_in_backward")
    _set_sparse_metadata = needs_stock("_set_sparse_metadata")
