"""The expert-parallel layers of transformers, computed by the feature.

transformers hands the experts of a model with ``ep_size > 1`` to one of the implementations of a registry. Those that
exchange tokens, ``all_to_all`` and in training ``auto``, all come by ``AllToAllEP``, which is computed here while the
feature is on; ``ovpatch`` is an implementation of the registry's as well, for those who want to name it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ovpatch.overlap.tensors.autocast import autocast_dtype
from ovpatch_plugins.pipe_experts.config import STATE
from ovpatch_plugins.pipe_experts.experts import Activation, Maker, Numbered
from ovpatch_plugins.pipe_experts.layer import run, stacked
from ovpatch_plugins.pipe_experts.report import COUNTERS

NAME: Final = "ovpatch"

_STEPS: Final = ("_dispatch_tokens", "_combine_tokens")
_READ: Final = ("ep_mesh", "tp_mesh", "num_local_experts", "experts_forward")

# What computes two products of stacked weights in transformers, by implementation; others may compute more than that.
_PLAIN: Final = {"grouped_mm": "grouped_mm_experts_forward", "batched_mm": "batched_mm_experts_forward"}


def register() -> None:
    """Make the feature one of the registry's implementations, where it has none of that name."""
    from transformers.distributed import expert_parallel

    registry: Any = expert_parallel.EPImplementationInterface
    if NAME not in registry():
        registry.register(NAME, type("OvpatchEP", (expert_parallel.AllToAllEP,), {}))


def is_stock(implementation: Any) -> bool:
    """Tell whether an ``AllToAllEP`` sends tokens and brings them back as transformers' own does.

    One of a release that is built in another way, without what is read here, does not.
    """
    from transformers.distributed.expert_parallel import AllToAllEP

    own = [getattr(AllToAllEP, name, None) for name in _STEPS]
    found = [getattr(type(implementation), name, None) for name in _STEPS]
    return None not in own and found == own and all(hasattr(implementation, name) for name in _READ)


def compute(implementation: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Do what ``AllToAllEP.__call__`` does.

    Args:
        implementation: The ``AllToAllEP``.
        hidden_states: Tokens, ``[tokens, h]``; the ranks of the tensor-parallel mesh hold the same.
        top_k_index: Their experts, numbered over all ranks, ``[tokens, k]``.
        top_k_weights: ``[tokens, k]``.
    """
    mesh, tokens = implementation.tp_mesh, len(hidden_states)
    x, index, weights = hidden_states, top_k_index, top_k_weights
    if mesh.size() > 1:
        x, index, weights = (_own(tensor, mesh) for tensor in (x, index, weights))
    group, local = implementation.ep_mesh.get_group(), implementation.num_local_experts
    dtype, maker = _maker(implementation, x)
    out = run(x, index, weights, maker, local, group, STATE.how, dtype=dtype)
    COUNTERS.taken_over += 1
    if mesh.size() == 1:
        return out
    shape = torch.Size((tokens, out.shape[1]))
    own = DTensor.from_local(out.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
    whole: Tensor = own.full_tensor()
    return whole


def _own(tensor: Tensor, mesh: Any) -> Tensor:
    """Return this rank's slice of what all ranks of a mesh hold; its gradient is gathered."""
    cut = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)])
    found: Tensor = cut.to_local()
    return found


def _maker(implementation: Any, x: Tensor) -> tuple[torch.dtype | None, Maker]:
    """Return what makes the experts, and the dtype in which tokens are sent to them if it is not their own."""
    forward = implementation.experts_forward
    experts = getattr(forward, "__self__", None)
    found = _stacked(experts, forward) if isinstance(experts, nn.Module) else None
    if found is None:
        COUNTERS.library_experts += 1
        return None, functools.partial(Numbered, function=functools.partial(_numbered, forward))
    weights, activation, is_grouped = found
    # Autocast knows no grouped product, which is computed in the dtype of its weights.
    dtype = weights[0].dtype if is_grouped else autocast_dtype(x.device.type, x.dtype)
    return dtype, stacked(weights, activation, dtype, STATE.how)


def _numbered(forward: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """Call transformers' experts as its own all-to-all does: one expert for each row, with weight 1."""
    index = experts.unsqueeze(-1)
    return forward(rows, index, torch.ones_like(index, dtype=rows.dtype))


def _stacked(experts: nn.Module, forward: Any) -> tuple[tuple[Tensor, Tensor], Activation, bool] | None:
    """Return weights and activation of experts that are two products of stacked weights, or None.

    And whether these are grouped ones. Anything that a script has put in the place of transformers' own says None.
    """
    from transformers.integrations import moe

    facts = vars(experts)
    if forward.__func__.__code__ is not _decorated_forward() or facts.get("has_gate") is None:
        return None
    if facts.get("has_bias") or facts.get("is_transposed") or facts.get("has_post_expert_norm"):
        return None
    name = getattr(facts.get("config"), "_experts_implementation", None)
    registry: Any = moe.ALL_EXPERTS_FUNCTIONS
    if name in _PLAIN:
        if registry.get(name) is not getattr(moe, _PLAIN[name]):
            return None
    elif name not in (None, "eager") or name in registry:
        return None
    first = "gate_up_proj" if facts["has_gate"] else "up_proj"
    up, down = experts._parameters.get(first), experts._parameters.get("down_proj")
    activation: Any = getattr(experts, "_apply_gate" if facts["has_gate"] else "act_fn", None)
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or activation is None:
        return None
    return (up, down), activation, name == "grouped_mm"


@functools.cache
def _decorated_forward() -> Any:
    """Return the code of the forward that transformers gives to classes of experts that have implementations."""
    from transformers.integrations.moe import use_experts_implementation

    wrapper = _nested(use_experts_implementation.__code__, "wrapper")
    return None if wrapper is None else _nested(wrapper, "forward")


def _nested(code: CodeType, name: str) -> CodeType | None:
    return next((one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name), None)
