"""Functions that ask a tensor for its metadata, not for its elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_READ: Final = """
    shape ndim dtype device layout names name is_leaf grad_fn output_nr itemsize nbytes retains_grad _version _cdata
    is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_vulkan is_xla is_xpu
"""

_READ_AND_WRITTEN: Final = "grad requires_grad grad_dtype _backward_hooks _post_accumulate_grad_hooks"

_METHODS: Final = """
    size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous dim_order __len__
    __hash__ is_floating_point is_complex is_signed is_inference is_conj is_neg is_same_size has_names _is_view
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad
"""

_FUNCTIONS: Final = "is_floating_point is_complex is_signed is_inference is_conj is_neg numel is_same_size get_device"


def grad_of(param: Tensor) -> Tensor | None:
    """Return ``param.grad``; ten times as fast where the parameter is pending, whose class answers by Python."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad


def _metadata() -> frozenset[Any]:
    written = _existing(Tensor, _READ_AND_WRITTEN)
    found = [attribute.__get__ for attribute in (*_existing(Tensor, _READ), *written)]
    found += [getattr(attribute, how) for attribute in written for how in ("__set__", "__delete__")]
    return frozenset([*found, *_existing(Tensor, _METHODS), *_existing(torch, _FUNCTIONS)])


def _existing(owner: Any, names: str) -> list[Any]:
    """Return the attributes that this version of torch has."""
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


#: The functions that may be called on a parameter whose values are not there yet.
METADATA: Final = _metadata()


def leaves(values: Any) -> Iterator[Any]:
    """Yield what is in tuples, lists and the values of mappings, at any depth; ``values`` itself if it is none."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from leaves(value)
    else:
        yield values
