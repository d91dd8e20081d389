"""The forward of a class of blocks while ``recompute`` wraps it.

A call of a marked block passes these checks, in this order:

1. Gradients are on.
2. No compiler traces the call; a compiler recomputes by itself.
3. The call is not inside of another block.
4. The script does not checkpoint the block.
5. No module inside has a hook that must not be called twice.

Only then does :class:`.Recomputation` run the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ovpatch_plugins.recompute.recomputation import Recomputation, is_inside_block
from ovpatch_plugins.recompute.recompute_options import FULL
from ovpatch_plugins.recompute.recompute_report import COUNTERS, note
from ovpatch_plugins.recompute.selective import make_compiled_contexts, make_contexts

BLOCK_MARK: Final = "_ovpatch_recompute"
"""The attribute that marks a block: granularity, further operators to keep, and the class whose forward is wrapped.

The mark is plain text, so that a pickled model loads without ovpatch. Compiled graphs guard on it, so all blocks of a
class have the same mark. Otherwise Dynamo would compile each block of a model separately, and give up after eight.
"""

BLOCK_NAME: Final = "_ovpatch_recompute_name"
"""The attribute of a block that has its name in the model."""

_LAYER_FORWARD: Final = "forward_with_checkpointing"
"""The name of the forward that transformers gives to layers, in its code."""

Mark = tuple[str, tuple[str, ...], str]


class WrappedForward:
    """The forward of a class while it is wrapped.

    Layers of transformers have a forward that calls the model's own forward, and checkpoints it on demand.
    It only does so if the class has that very function. So the model's own forward is wrapped instead, in
    the cell from which the layer reads it.

    Args:
        owner: The class.
    """

    def __init__(self, owner: type[nn.Module]) -> None:
        self._owner = owner
        self._stock: Callable[..., Any] = vars(owner)["forward"]
        # None if the class has a forward of the usual kind, which is replaced in the class.
        self._cell = _find_cell(self._stock)
        if self._cell is not None:
            self._stock = self._cell.cell_contents
        self._wrapped = wrap_forward(self._stock, f"{owner.__module__}.{owner.__qualname__}")
        self._write(self._wrapped)

    def restore(self) -> None:
        """Restore the forward of the class, unless a script has wrapped ours; without marks, ours has no effect."""
        now = vars(self._owner).get("forward") if self._cell is None else self._cell.cell_contents
        if now is self._wrapped:
            self._write(self._stock)

    def _write(self, forward: Callable[..., Any]) -> None:
        if self._cell is None:
            self._owner.forward = forward
        else:
            self._cell.cell_contents = forward


def _find_cell(forward: Callable[..., Any]) -> Any:
    """Return the cell from which a layer of transformers reads the model's own forward; None for other forwards."""
    code = getattr(forward, "__code__", None)
    cells: Any = getattr(forward, "__closure__", None)
    if code is None or code.co_name != _LAYER_FORWARD or "forward" not in code.co_freevars:
        return None
    return cells[code.co_freevars.index("forward")]


def wrap_forward(stock: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """Wrap the forward of a class named ``owner``, so that calls of marked instances keep no activations."""

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mark: Mark | None = self.__dict__.get(BLOCK_MARK)
        # A subclass may call the forward of its base class, which is wrapped for other blocks.
        if mark is None or mark[2] != owner or not torch.is_grad_enabled():
            return stock(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return run_compiled(stock, self, mark, args, kwargs)
        return _run_eager(stock, self, mark, args, kwargs)

    forward.__ovpatch__ = True  # type: ignore[attr-defined]  # a mark of ours
    return forward


def _run_eager(stock: Callable[..., Any], block: Any, mark: Mark, args: Any, kwargs: Any) -> Any:
    """Compute a marked block, and keep no activations unless something needs its forward to run once."""
    if is_inside_block() or not _may_save():
        return stock(block, *args, **kwargs)
    if _is_checkpointed():
        COUNTERS.stock_calls += 1
        return stock(block, *args, **kwargs)
    # A script may add hooks at any time, so each call looks for them.
    modules = list(block.modules())
    if hooked := _find_hook(block, modules):
        COUNTERS.stock_calls += 1
        note(hooked)
        return stock(block, *args, **kwargs)
    name, contexts = block.__dict__[BLOCK_NAME], make_contexts(mark[0], mark[1])
    call = Recomputation(block, name, modules, stock, args, kwargs, contexts)
    return call.run(args, kwargs)


def run_compiled(stock: Callable[..., Any], block: Any, mark: Mark, args: Any, kwargs: Any) -> Any:
    """Let the compiler recompute: it knows ``torch.utils.checkpoint``, and saves and orders in its own graph.

    The compiler cannot trace a checkpoint whose forward changes attributes of modules, such as a counter. It
    breaks the graph and runs this function as it is. :func:`_call_traced` breaks the graph for tensors that
    the forward changes in place.
    """
    if not torch.compiler.is_compiling():
        return _run_eager(stock, block, mark, args, kwargs)
    # transformers checkpoints the block itself, around this forward.
    if getattr(block, "gradient_checkpointing", False) and block.training:
        return stock(block, *args, **kwargs)
    # Full recomputation needs no contexts.
    more: dict[str, Any] = {}
    if mark[0] != FULL:
        more["context_fn"] = functools.partial(make_compiled_contexts, mark[1])
    # Not stock.__get__(block), which the compiler of torch 2.11 does not trace.
    bound = functools.partial(_call_traced, stock, block)
    output = checkpoint(bound, *args, use_reentrant=False, **more, **kwargs)
    # A graph that breaks at the checkpoint does not come here.
    _count_compiled()
    return output


def _call_traced(stock: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a block inside of a traced checkpoint, and break the graph if it changes tensors in place.

    A compiled recomputation would read the tensors as the forward has left them, and change them again.
    """
    output = stock(block, *args, **kwargs)
    if _changes_inputs():
        torch._dynamo.graph_break()
    return output


# Buffers that a norm changes in place and does not read while it trains.
_AVERAGES: Final = ("running_mean", "running_var", "num_batches_tracked")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # not typed in torch
def _changes_inputs() -> bool:
    """Return whether the graph that is being traced changes one of its inputs in place."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    inputs = [
        node
        for node in tracer.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["example_value"], torch.Tensor)
    ]
    return any(
        node.meta["example_value"]._version != version
        and not node.name.rstrip("_").endswith(_AVERAGES)
        for node, version in zip(inputs, tracer._input_versions_at_beginning, strict=True)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # not typed in torch
def _count_compiled() -> int:
    COUNTERS.compiled_calls += 1
    return 0


def _find_hook(block: nn.Module, modules: Sequence[nn.Module]) -> str:
    """Return a remark on a hook inside of a block that a second forward would call twice, or "".

    Hooks of torch and of ovpatch may be called again, because they belong to the computation: they gather
    parameters, and make weights or inputs.
    """
    # Hooks of the block itself run outside of its forward, once.
    own = [
        module
        for module in modules
        if module is not block and (module._forward_hooks or module._forward_pre_hooks)
    ]
    for module in [torch.nn.modules.module, *own] if own or _has_global_hooks() else ():
        prefix = "" if isinstance(module, nn.Module) else "_global"
        for hooks in (
            getattr(module, f"{prefix}_forward_hooks"),
            getattr(module, f"{prefix}_forward_pre_hooks"),
        ):
            for hook in hooks.values():
                # The module of a partial is functools, so the wrapped function decides.
                while isinstance(hook, functools.partial):
                    hook = hook.func
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if not home.startswith(("torch.", "ovpatch")):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    where = type(module).__name__ if prefix == "" else "all modules"
                    return (
                        f"blocks of class {type(block).__name__} keep their activations, because "
                        f"forward hook {name} of {where} would be called again: remove the hook "
                        "before training to have them recomputed"
                    )
    return ""


def _has_global_hooks() -> bool:
    module: Any = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def _may_save() -> bool:
    """Return whether a forward may leave out saved tensors; torch.func and tracers refuse the hooks for that."""
    autograd: Any = torch._C._autograd
    return (
        not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
        and bool(autograd._saved_tensors_hooks_is_enabled())
    )


def _is_checkpointed() -> bool:
    """Return whether the script checkpoints this call: torch's hooks are innermost, or a backward recomputes."""
    # A forward inside of a backward is a recomputation of the script's checkpoint.
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__
