"""Functions of torch through which readers pass that do not ask a parameter's class.

What a class can see is in pending_param.py, [Note: pending by type]. The rest is wrapped at the one function through
which it goes: :data:`READ_HOOKS`, for a feature to register as patches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ClassMethodDescriptorType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ovpatch.overlap.comm.side_streams import record_numbered_switches, record_switches
from ovpatch.overlap.tensors.pending_param import PENDING, any_dtensors, wait_for_all, wait_for_args, wait_for_param

# How far up a calling frame may be: patches put frames of their own between.
_FRAMES = 8

# They read their children's parameters without calling them: C++ interprets the first and broadcasts those of the
# second.
_READ_ALL = (torch.jit.ScriptModule, nn.DataParallel)

# They take their fast path (no gradient to compute, no autocast on CUDA) only if no parameter's class is to be asked.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

_BY_TREE = frozenset((*_READ_ALL, *_FAST))


class ReadHook(NamedTuple):
    """A function of torch through which readers pass.

    [Note: module calls] Kernels that read raw memory (scripted functions, C++ extensions) are called in modules, so a
    module's call waits for its own parameters. A global module hook would do, but torch warns about it under
    ``torch.compile``, and Dynamo guards on it; a wrapped ``Module._call_impl`` would add two frames a level to every
    traceback and to Python's recursion depth. ``_call_impl`` first asks C++ whether it is traced, in eager mode only,
    and no guard looks at that. Its frame is looked up only while something is pending. Dynamo leaves our frame alone
    (ovpatch/patching/wrapper_chain.py, [Note: skipped frames]).
    """

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
    # isinstance() would take three times as long; every call of a module comes here.
    tree = tree or not _BY_TREE.isdisjoint(type(module).__mro__) or "forward" in module.__dict__
    for part in module.modules() if tree else (module,):
        for param in part._parameters.values():
            if id(param) in PENDING:
                assert param is not None
                wait_for_param(param)


def wait_for_tree(module: nn.Module) -> None:
    """Wait for all parameters of a module and its children."""
    wait_for_module(module, tree=True)
    if any_dtensors():  # no parameters
        wait_for_all()


def waiting_for_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that pending parameters among its arguments are waited for first."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and PENDING:
            wait_for_args((args, kwargs))
        return original(*args, **kwargs)

    return waiting


def waiting_for_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that ``Module._call_impl`` calls first. See [Note: module calls]."""

    def waiting() -> Any:
        if torch.compiler.is_compiling():
            return None  # false: what Dynamo takes it to be: it knows the original by its place, where it no longer is
        if PENDING:
            module = _variable_of_caller("_call_impl", "self", sys._getframe(1))
            if isinstance(module, nn.Module):
                wait_for_module(module)
        return original()

    return waiting


class ContextHook:
    """Waits where C++ applies an ``autograd.Function`` of which a script took ``apply`` before it was wrapped.

    That is a built-in method, which no wrapper sees; but for each call it makes a context, whose class is Python's. The
    arguments are not known there, so all parameters are waited for.
    """

    def __init__(self) -> None:
        BackwardCFunction.__init__ = _wait_for_unseen  # type: ignore[assignment]  # takes one argument, object's takes any

    def remove(self) -> None:
        """Stop to wait."""
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
    _skip_frames(waiting_for_module(original))  # Dynamo is there

    def waiting(callback: Any) -> Any:
        if callback is not None and PENDING:  # None: code that is not to be compiled
            function = _variable_of_caller("compile_wrapper", "fn", sys._getframe(1))
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


def _skip_frames(function: Any) -> None:
    """Have Dynamo leave the frames of a function alone, in all that the same code makes, and the frames that it calls.

    See [Note: module calls]. ``skip_code`` alone would have Dynamo examine the functions that wait.
    """
    dynamo = sys.modules["torch._dynamo.eval_frame"]
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip = dynamo.FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo.FrameExecStrategy(skip, skip))


def _variable_of_caller(name: str, variable: str, frame: FrameType | None) -> Any:
    """Return a variable of the nearest calling function of this name; None where there is none."""
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == name:
            return frame.f_locals.get(variable)
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

# Which function of C++ a module's call asks first, and whether C++ applies functions, depends on the version of torch.
_TRACED: Final = "_is_tracing" if "_is_tracing" in nn.Module._call_impl.__code__.co_names else "_get_tracing_state"

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
        f"torch._C.{_TRACED}",
        waiting_for_module,
        "is what every module call in eager mode calls first; scripted functions and extensions read the memory of the "
        "module's parameters, and a global hook makes compiled modules warn",
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
