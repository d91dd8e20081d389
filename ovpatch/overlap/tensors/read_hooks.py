"""Patched functions of torch that wait for pending parameters before they read them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ClassMethodDescriptorType, FrameType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ovpatch.overlap.comm.streams import hide_frames, record_numbered_switches, record_switches
from ovpatch.overlap.tensors.pending_param import PENDING, wait_for_all, wait_for_args, wait_for_param

# How far up a calling frame may be: patches put frames of their own between.
_FRAMES = 8

# They read their children's parameters without calling them: C++ interprets the first and broadcasts those of the
# second.
_READ_ALL = (torch.jit.ScriptModule, nn.DataParallel)

# They take their fast path (no gradient to compute, no autocast on CUDA) only if no parameter's class is to be asked.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

_BY_TREE = frozenset((*_READ_ALL, *_FAST))


class ReadHook(NamedTuple):
    """A function of torch through which readers pass."""

    target: str  # its dotted path
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]  # takes the function and returns one that waits first
    why: str  # which readers pass there
    optional: bool = False  # whether some versions of torch do not have it


def wait_for_module(module: nn.Module, *, tree: bool = False) -> None:
    """Wait for what a call of this module may read without asking.

    These are its own parameters, and those of its children if C++ calls the children or it decides by their classes.

    Args:
        module: The module.
        tree: Wait for all parameters of its children in any case.
    """
    # isinstance() would take longer; every call of a module comes here.
    tree = tree or not _BY_TREE.isdisjoint(type(module).__mro__) or "forward" in module.__dict__
    for part in module.modules() if tree else (module,):
        for param in part._parameters.values():
            if id(param) in PENDING:
                assert param is not None
                wait_for_param(param)


def wait_for_tree(module: nn.Module) -> None:
    """Wait for all parameters of a module and its children."""
    wait_for_module(module, tree=True)


def waiting_for_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that pending parameters among its arguments are waited for first."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and PENDING:
            wait_for_args((args, kwargs))
        return original(*args, **kwargs)

    return waiting


class ModuleCall:
    """Stands in the class for ``Module._call_impl``, and waits for a module's parameters where its call is looked up.

    [Note: module calls] Kernels that read raw memory (scripted functions, C++ extensions) are called in modules, so a
    module's call waits for its own parameters. A global module hook would do, but torch warns about it under
    ``torch.compile``, and Dynamo guards on it; a wrapped function would add two frames a level to every traceback and
    to Python's recursion depth. A descriptor returns the original method before that is called. Dynamo leaves our
    frame alone (``hide_frames``).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        """Return the function, or the method of a module whose parameters are there."""
        if module is None:
            return self._function
        if _is_traced():
            return functools.partial(self._function, module)  # Dynamo makes no methods
        if PENDING and not torch.compiler.is_compiling():
            wait_for_module(module)
        return MethodType(self._function, module)


_is_traced = torch.compiler.is_dynamo_compiling  # true where Dynamo traces the call, not where it runs a function


class ModuleHook:
    """Waits for what calls of modules read. See [Note: module calls]."""

    def __init__(self) -> None:
        self._call: Any = ModuleCall(vars(nn.Module)["_call_impl"])
        nn.Module._call_impl = self._call  # type: ignore[assignment]  # a descriptor, which returns the method

    def remove(self) -> None:
        """Stop waiting, unless a script has put another function there, which may call this one."""
        if vars(nn.Module)["_call_impl"] is self._call:
            nn.Module._call_impl = self._call._function  # type: ignore[method-assign]  # what was there before


class ContextHook:
    """Waits where C++ applies an ``autograd.Function`` whose ``apply`` a script took before it was wrapped.

    No wrapper sees a call of that built-in method; but each call makes a context, whose class is Python's. The
    arguments are not known there, so all parameters are waited for.
    """

    def __init__(self) -> None:
        BackwardCFunction.__init__ = _wait_for_unseen  # type: ignore[assignment]  # takes one argument, object's takes any

    def remove(self) -> None:
        """Stop waiting."""
        del BackwardCFunction.__init__


def _wait_for_unseen(_context: Any) -> None:
    # A wrapped apply() has waited. Only the caller counts: a function inside of that one may read other parameters.
    if PENDING and not torch.compiler.is_compiling() and sys._getframe(1).f_code is not _WAITING:
        wait_for_all()


def waiting_for_compiled_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that every call of compiled code calls first.

    A graph reads memory and its guards compare classes, so parameters are waited for before a compiled frame is
    entered. Every way in (``torch.compile`` of a function, a module or DDP, ``module.compile()``, code compiled before
    ``apply()``) runs ``compile_wrapper``, a closure that calls this function right before the compiled code, outside of
    tracing and guards. If it calls a module, the parameters of that module are waited for, so blocks that are compiled
    one by one keep their overlap; otherwise all are.
    """
    hide_frames(ModuleCall.__get__)  # Dynamo is there

    def waiting(callback: Any) -> Any:
        if callback is not None and PENDING:  # None: code that is not to be compiled
            function = _find_compiled_function(sys._getframe(1))
            module = getattr(function, "__wrapped__", getattr(function, "__self__", function))
            if isinstance(module, nn.Module):
                wait_for_tree(module)
            else:
                wait_for_all()
        return original(callback)

    return waiting


def waiting_for_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that begins the capture of a CUDA graph, or replays one.

    A capture cannot wait for what was launched before it, and a replay reads the addresses that were captured. Inductor
    captures and replays below a call of compiled code, which has waited for what it reads.
    """

    @functools.wraps(original)
    def capture_or_replay(*args: Any, **kwargs: Any) -> Any:
        if PENDING and not _is_within_inductor(sys._getframe(1)):
            wait_for_all()
        return original(*args, **kwargs)

    return capture_or_replay


def _is_within_inductor(frame: FrameType | None) -> bool:
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch._inductor."):
            return True
        frame = frame.f_back
    return False


def _find_compiled_function(frame: FrameType | None) -> Any:
    """Return the function that a compiled call was made of, from the frames around it; None where it is not found."""
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "compile_wrapper":
            return frame.f_locals.get("fn")
        frame = frame.f_back
    return None


_OF_STREAMS: Final = (
    ReadHook(
        "torch._C._cuda_setStream",
        record_numbered_switches,
        "makes a stream current, on which parameters may be read that another one has waited for",
    ),
    ReadHook("torch._C._accelerator_setStream", record_switches, "as torch._C._cuda_setStream", True),
    ReadHook("torch.cuda.streams.Stream.__enter__", record_switches, "as torch._C._cuda_setStream", True),
    ReadHook("torch.cuda.streams.Stream.__exit__", record_switches, "makes the stream before it current again", True),
)

_WAITING: Final = waiting_for_args(len).__code__

#: Whether ``autograd.Function.apply`` is a built-in method, so that :class:`ContextHook` is needed.
APPLIES_IN_C: Final = isinstance(vars(torch.autograd.Function).get("apply"), ClassMethodDescriptorType)

#: Where to wait on behalf of readers that do not ask.
READ_HOOKS: Final = (
    *(_OF_STREAMS if hasattr(torch._C, "_cuda_setStream") else ()),  # builds without CUDA have no streams
    ReadHook(
        "torch._dynamo.eval_frame._callback_from_stance",
        waiting_for_compiled_code,
        "is called right before compiled code, outside of it, whatever was compiled and when; graphs read memory, and "
        "their guards compare classes",
    ),
    ReadHook(
        "torch.cuda.graphs.CUDAGraph.capture_begin",
        waiting_for_graphs,
        "begins the capture of a CUDA graph, in which nothing can be waited for that was launched before",
    ),
    ReadHook(
        "torch.cuda.graphs.CUDAGraph.replay",
        waiting_for_graphs,
        "replays a CUDA graph, which reads the memory of parameters",
    ),
    *(
        ReadHook(f"torch.accelerator.graphs.Graph.{name}", waiting_for_graphs, "as torch.cuda.graphs.CUDAGraph", True)
        for name in ("capture_begin", "replay")
    ),
    ReadHook(
        "torch.autograd.function.Function.apply" if APPLIES_IN_C else "torch._functorch.utils.unwrap_dead_wrappers",
        waiting_for_args,
        "gets the arguments of every autograd.Function, whose kernels may read memory; below it is C++",
    ),
    ReadHook(
        "torch._functorch.eager_transforms._wrap_tensor_for_grad",
        waiting_for_args,
        "sees the arguments of torch.func.grad, vjp, jvp and what is made of them; below it is C++",
    ),
    ReadHook(
        "torch._functorch.eager_transforms._maybe_wrap_functional_tensor",
        waiting_for_args,
        "sees the arguments of torch.func.functionalize; below it is C++",
    ),
    ReadHook(
        "torch._functorch.vmap._create_batched_inputs",
        waiting_for_args,
        "sees the arguments of torch.vmap; below it is C++",
    ),
    *(
        ReadHook(
            f"torch.distributed.distributed_c10d._check_{what}",
            waiting_for_args,
            "sees the tensors of torch.distributed's collectives, alone or in lists, before C++ does",
        )
        for what in ("single_tensor", "tensor_list")
    ),
    ReadHook(
        "torch.distributed.utils._verify_param_shape_across_processes",
        waiting_for_args,
        "sees the parameters of a module that is wrapped; below it C++ compares their strides",
    ),
    ReadHook(
        "torch.nn.parameter.Parameter.__new__",
        waiting_for_args,
        "compares the type of what a parameter is made of with Parameter, exactly",
    ),
)
