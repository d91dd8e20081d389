"""Readers of parameters that do not ask the parameter's class, and where they pass before they read.

What a class can see is in ``pending.py``, [Note: pending by type]. The rest is wrapped at the one function through
which it goes: :data:`READ_HOOKS`, for a feature to register as patches.

[Note: compiled code] A graph reads memory, and its guards compare classes, so both need settled parameters before the
compiled frame is entered. Every way in, of ``torch.compile`` of a function, a module or DDP, of ``module.compile()``
and of code compiled before ``apply()``, is the function ``compile_wrapper`` that ``_TorchDynamoContext.__call__``
makes. It is a closure, but right before the call it looks up ``_callback_from_stance``, a function of the module,
outside of any tracing and before any guard. If what it calls belongs to a module, the parameters of that module are
settled, so that blocks that are compiled one by one keep their overlap; otherwise everything is. A block that reads
parameters that are not its own is right as well, because Dynamo breaks the graph there, but not fast.

[Note: module calls] A pre-hook on all modules would do for kernels that read raw memory: scripted functions,
extensions in C++. But torch warns about global hooks whenever a compiled module is called, Dynamo guards on their
number, and takes another way through ``Module.__call__`` if there are any. ``Module._call_impl`` calls
``torch._C._get_tracing_state`` first of all, in eager mode, and nobody guards on it. Where a compiled module is called,
Dynamo skips that frame and would look at ours (ovpatch/patching/wrapper_chain.py, [Note: skipped frames]).

[Note: CUDA graphs] A capture cannot wait for what was launched before it, and a replay reads the addresses that were
captured, so both begin with everything settled. (No gather is captured.) Inductor captures and replays below a call of
compiled code, for which what it reads has been settled; blocks that are compiled one by one keep their overlap.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ovpatch.overlap.comm.side_streams import record_numbered_switches, record_switches
from ovpatch.overlap.tensors.pending_param import any_pending, any_views, is_pending, settle, settle_all, settle_within

# How far up the caller may be: patches put frames of their own between.
_FRAMES = 8

# They read their children's parameters without calling them: C++ interprets the first and broadcasts those of the
# second.
_READ_ALL = (torch.jit.ScriptModule, nn.DataParallel)

# They take their fast path, where there is no gradient to compute and no autocast on CUDA, only if no parameter has a
# class that wants to be asked.
_FAST = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class ReadHook(NamedTuple):
    """A function of torch through which readers pass.

    Attributes:
        target: Its dotted path.
        wrap: Takes the function and returns one that settles first.
        why: Who passes there.
        optional: Whether it is missing in some versions of torch.
    """

    target: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str
    optional: bool = False


def settle_module(module: nn.Module) -> None:
    """Settle what a call of this module may read without asking.

    That is its own parameters; those of the children as well if they are not called by Python, or decide by their
    classes.
    """
    tree = isinstance(module, (*_READ_ALL, *_FAST)) or "forward" in module.__dict__
    for param in module.parameters() if tree else module._parameters.values():
        if param is not None and is_pending(param):
            settle(param)


def settle_tree(module: nn.Module) -> None:
    """Settle all parameters of a module and its children."""
    for param in module.parameters():
        settle(param)
    if any_views():  # no parameters
        settle_all()


def settling_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that pending parameters among its arguments are settled first."""

    def settled(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and any_pending():
            settle_within((args, kwargs), otherwise_all=False)
        return original(*args, **kwargs)

    return settled


def settling_module_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what ``Module._call_impl`` calls first. See [Note: module calls]."""

    def settled() -> Any:
        if torch.compiler.is_compiling():
            return None  # as Dynamo takes it to be; it knows the original by its place, where it no longer is
        if any_pending():
            (module,) = _of_a_caller("_call_impl", "self")
            if isinstance(module, nn.Module):
                settle_module(module)
        return original()

    return settled


def settling_compiled_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what every call of compiled code calls first. See [Note: compiled code]."""
    _skip_frames(settling_module_calls(original))  # Dynamo is there

    def settled(callback: Any) -> Any:
        if callback is not None and any_pending():  # None: code that is not to be compiled
            (function,) = _of_a_caller("compile_wrapper", "fn")
            _settle_for(function)
        return original(callback)

    return settled


def settling_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what begins the capture of a CUDA graph, or replays one. See [Note: CUDA graphs]."""

    @functools.wraps(original)
    def capture_or_replay(*args: Any, **kwargs: Any) -> Any:
        if any_pending() and not _within_inductor():
            settle_all()
        return original(*args, **kwargs)

    return capture_or_replay


def _within_inductor() -> bool:
    names = (frame.f_globals.get("__name__", "") for frame in _frames(sys._getframe(1)))
    return any(name.startswith("torch._inductor.") for name in names)


def _skip_frames(function: Any) -> None:
    """Have Dynamo leave frames of a function alone, in all that the same code makes; see [Note: module calls]."""
    skip = getattr(sys.modules["torch._dynamo.eval_frame"], "skip_code", None)
    if skip is not None:
        skip(function.__code__)


def _settle_for(function: Any) -> None:
    module = getattr(function, "__wrapped__", getattr(function, "__self__", function))
    if isinstance(module, nn.Module):
        settle_tree(module)
    else:
        settle_all()


def _of_a_caller(name: str, *variables: str) -> list[Any]:
    """Return variables of the nearest calling function of this name; None where there is none."""
    for frame in _frames(sys._getframe(1)):
        if frame.f_code.co_name == name:
            found = frame.f_locals  # of which Python makes a dictionary each time
            return [found.get(variable) for variable in variables]
    return [None] * len(variables)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


_OF_STREAMS: Final = (
    ReadHook(
        "torch._C._cuda_setStream",
        record_numbered_switches,
        "makes a stream current, on which parameters may be read that another one has waited for",
    ),
    ReadHook("torch._C._accelerator_setStream", record_switches, "as torch._C._cuda_setStream", optional=True),
    ReadHook("torch.cuda.streams.Stream.__enter__", record_switches, "as torch._C._cuda_setStream", optional=True),
    ReadHook(
        "torch.cuda.streams.Stream.__exit__", record_switches, "makes the stream before it current again", optional=True
    ),
)

READ_HOOKS: Final = (
    *(_OF_STREAMS if hasattr(torch._C, "_cuda_setStream") else ()),  # builds without CUDA have no streams
    ReadHook(
        "torch._dynamo.eval_frame._callback_from_stance",
        settling_compiled_calls,
        "is called right before compiled code, outside of it, whatever was compiled and when; graphs read memory, and "
        "their guards compare classes",
    ),
    ReadHook(
        "torch._C._get_tracing_state",
        settling_module_calls,
        "is what every module call in eager mode calls first; scripted functions and extensions read the memory of the "
        "module's parameters, and a global hook makes compiled modules warn",
    ),
    ReadHook(
        "torch.cuda.graphs.CUDAGraph.capture_begin",
        settling_graphs,
        "begins the capture of a CUDA graph, in which nothing can be waited for that was launched before",
    ),
    ReadHook(
        "torch.cuda.graphs.CUDAGraph.replay",
        settling_graphs,
        "replays a CUDA graph, which reads the memory of parameters",
    ),
    ReadHook(
        "torch.accelerator.graphs.Graph.capture_begin",
        settling_graphs,
        "as torch.cuda.graphs.CUDAGraph",
        optional=True,
    ),
    ReadHook("torch.accelerator.graphs.Graph.replay", settling_graphs, "as torch.cuda.graphs.CUDAGraph", optional=True),
    ReadHook(
        "torch._functorch.utils.unwrap_dead_wrappers",
        settling_arguments,
        "sees the arguments of every autograd.Function, whose kernels may read memory",
    ),
    ReadHook(
        "torch._functorch.eager_transforms._wrap_tensor_for_grad",
        settling_arguments,
        "sees the arguments of torch.func.grad, vjp, jvp and what is made of them; below it is C++",
    ),
    ReadHook(
        "torch._functorch.eager_transforms._maybe_wrap_functional_tensor",
        settling_arguments,
        "sees the arguments of torch.func.functionalize; below it is C++",
    ),
    ReadHook(
        "torch._functorch.vmap._create_batched_inputs",
        settling_arguments,
        "sees the arguments of torch.vmap; below it is C++",
    ),
    ReadHook(
        "torch.distributed.distributed_c10d._check_single_tensor",
        settling_arguments,
        "sees the tensors of torch.distributed's collectives before C++ does",
    ),
    ReadHook(
        "torch.distributed.distributed_c10d._check_tensor_list",
        settling_arguments,
        "sees the lists of tensors of torch.distributed's collectives before C++ does",
    ),
    ReadHook(
        "torch.distributed.utils._verify_param_shape_across_processes",
        settling_arguments,
        "sees the parameters of a module that is wrapped; below it C++ compares their strides",
    ),
    ReadHook(
        "torch.nn.parameter.Parameter.__new__",
        settling_arguments,
        "compares the type of what a parameter is made of with Parameter, exactly",
    ),
)
"""Where to settle on behalf of readers that do not ask."""
