"""The expert-parallel layers of transformers, computed by the feature.

transformers gives the experts of a model with ``ep_size > 1`` to an implementation of a registry.
``all_to_all`` and, in training, ``auto`` use ``AllToAllEP``. While the feature is on, this module
computes the calls of that class. It also registers ``ovpatch``, for scripts that name it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ovpatch.overlap.tensors.linear_ops import autocast_dtype
from ovpatch_plugins.pipe_experts.experts import Activation, ExpertFactory, IndexedExperts
from ovpatch_plugins.pipe_experts.layer import make_stacked_factory, run_layer
from ovpatch_plugins.pipe_experts.pipe_experts_options import STATE
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS

NAME: Final = "ovpatch"

# The methods of an implementation that this module replaces; a script may override them.
_STEPS: Final = ("_dispatch_tokens", "_combine_tokens")
# The attributes of an implementation that this module reads.
_READ: Final = ("ep_mesh", "tp_mesh", "num_local_experts", "experts_forward")

# The functions of transformers that compute two GEMMs with stacked weights and no more, by implementation.
_PLAIN: Final = {
    "grouped_mm": "grouped_mm_experts_forward",
    "batched_mm": "batched_mm_experts_forward",
}


def wrap_call(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``AllToAllEP.__call__``: the feature computes the experts while it is on."""

    @functools.wraps(original)
    def __call__(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        compute = compute_experts if STATE.is_on and is_stock_implementation(self) else original
        return compute(self, hidden_states, top_k_index, top_k_weights)

    return __call__


def wrap_install(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``EpDispatchExpertsParallel.install_forward``: scripts may name the implementation ``ovpatch``."""

    @functools.wraps(original)
    def install_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        register_implementation()
        return original(self, *args, **kwargs)

    return install_forward


def register_implementation() -> None:
    """Register ``ovpatch`` as an implementation, unless the registry has one of that name."""
    from transformers.distributed import expert_parallel

    registry: Any = expert_parallel.EPImplementationInterface
    if NAME not in registry():
        registry.register(NAME, type("OvpatchEP", (expert_parallel.AllToAllEP,), {}))


def is_stock_implementation(implementation: Any) -> bool:
    """Return whether an ``AllToAllEP`` dispatches and combines tokens as transformers' own does.

    False also for a release whose class lacks the attributes that are read here.
    """
    from transformers.distributed.expert_parallel import AllToAllEP

    own = [getattr(AllToAllEP, name, None) for name in _STEPS]
    methods = [getattr(type(implementation), name, None) for name in _STEPS]
    return (
        None not in own and methods == own and all(hasattr(implementation, name) for name in _READ)
    )


# Dynamo would compile this code again in each step, because counters change.
@torch._disable_dynamo
def compute_experts(
    implementation: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts instead of ``AllToAllEP.__call__``.

    The ranks of the tensor-parallel mesh hold the same tokens; experts are numbered over all ranks.

    Args:
        implementation: The ``AllToAllEP``.
        hidden_states: ``[tokens, h]``.
        top_k_index: ``[tokens, k]``.
        top_k_weights: ``[tokens, k]``.
    """
    mesh, tokens = implementation.tp_mesh, len(hidden_states)
    x, index, weights = hidden_states, top_k_index, top_k_weights
    if mesh.size() > 1:
        x, index, weights = (_shard_tokens(tensor, mesh) for tensor in (x, index, weights))
    group, num_local_experts = implementation.ep_mesh.get_group(), implementation.num_local_experts
    dtype, factory = _make_factory(implementation, x)
    out = run_layer(x, index, weights, factory, num_local_experts, group, STATE.config, dtype=dtype)
    COUNTERS.taken_over += 1
    if mesh.size() == 1:
        return out
    shape = torch.Size((tokens, out.shape[1]))
    own = DTensor.from_local(out.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
    full: Tensor = own.full_tensor()
    return full


def _shard_tokens(tensor: Tensor, mesh: Any) -> Tensor:
    """Return this rank's shard of a replicated tensor; the shard's gradient is all-gathered."""
    sharded = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).redistribute(
        mesh, [Shard(0)]
    )
    local: Tensor = sharded.to_local()
    return local


def _make_factory(implementation: Any, x: Tensor) -> tuple[torch.dtype | None, ExpertFactory]:
    """Return the dtype of dispatched rows (None for the tokens' dtype) and the factory of the experts."""
    forward = implementation.experts_forward
    experts = getattr(forward, "__self__", None)
    stacked = _find_stacked_weights(experts, forward) if isinstance(experts, nn.Module) else None
    if stacked is None:
        COUNTERS.library_experts += 1
        return None, functools.partial(
            IndexedExperts, function=functools.partial(_call_library_experts, forward)
        )
    weights, activation, is_grouped = stacked
    # Autocast leaves grouped GEMMs alone: they run in the dtype of the weights.
    dtype = weights[0].dtype if is_grouped else autocast_dtype(x.device.type, x.dtype)
    return dtype, make_stacked_factory(weights, activation, dtype, STATE.config)


def _call_library_experts(forward: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """Call transformers' experts as its own all-to-all does: one expert per row, with weight 1."""
    index = experts.unsqueeze(-1)
    return forward(rows, index, torch.ones_like(index, dtype=rows.dtype))


def _find_stacked_weights(
    experts: nn.Module, forward: Any
) -> tuple[tuple[Tensor, Tensor], Activation, bool] | None:
    """Return the weights and the activation of experts that are two GEMMs, and whether these are grouped.

    The result is None for any other experts, and if a script has replaced a function of transformers.
    """
    from transformers.integrations import moe

    # transformers' decorator of expert classes sets these attributes.
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
    """Return the code of the forward that transformers gives to expert classes with implementations."""
    from transformers.integrations.moe import use_experts_implementation

    wrapper = _find_nested_code(use_experts_implementation.__code__, "wrapper")
    return None if wrapper is None else _find_nested_code(wrapper, "forward")


def _find_nested_code(code: CodeType, name: str) -> CodeType | None:
    constants = (const for const in code.co_consts if isinstance(const, CodeType))
    return next((const for const in constants if const.co_name == name), None)
