"""Patched functions of torch that get the content of pending parameters and lazy tensors before they read it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ClassMethodDescriptorType, FrameType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ovpatch.overlap.comm.streams import (
    hide_frames,
    record_numbered_switches,
    record_switches,
)
from ovpatch.overlap.tensors.lazy_tensor import LazyTensor, materialize
from ovpatch.overlap.tensors.pending_param import (
    PENDING,
    has_dtensors,
    register_dtensor,
    wait_for_all,
    wait_for_args,
    wait_for_param,
)

_DYNAMO: Final = "torch._dynamo.eval_frame"

# Number of calling frames that are searched, since patches add frames between caller and callee.
_MAX_FRAMES: Final = 8

# Modules that read the parameters of their children without calling the children. C++ interprets a
# ScriptModule, and broadcasts the parameters of a DataParallel.
_READERS_OF_CHILDREN: Final = (torch.jit.ScriptModule, nn.DataParallel)

# Modules whose fast path (no gradient to compute, no autocast on CUDA) requires that the class of
# no parameter overrides `__torch_function__`. A pending parameter would silently disable it.
_MODULES_WITH_FAST_PATH: Final = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
)

_TREE_READERS: Final = frozenset((*_READERS_OF_CHILDREN, *_MODULES_WITH_FAST_PATH))


class ReadHook(NamedTuple):
    """A function of torch through which readers pass.

    Attributes:
        target: The dotted path of the function.
        wrap: Takes the function and returns a function that waits first.
        why: The readers that pass there, for the report.
        optional: Whether some supported versions of torch lack the function.
    """

    target: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str
    optional: bool = False


def wait_for_module(module: nn.Module, *, tree: bool = False) -> None:
    """Wait for the parameters that a call of the module may read unseen.

    These are its own parameters. They include those of its children if C++ calls the children, or
    if the module decides by the classes of their parameters.

    Args:
        module: The module.
        tree: If true, wait for all parameters of its children in any case. Default: False.
    """
    # Every call of a module passes here, and isinstance() would take longer.
    tree = (
        tree or not _TREE_READERS.isdisjoint(type(module).__mro__) or "forward" in module.__dict__
    )
    for part in module.modules() if tree else (module,):
        for param in part._parameters.values():
            if id(param) in PENDING:
                assert param is not None
                wait_for_param(param)


def wait_for_tree(module: nn.Module) -> None:
    """Wait for all parameters of a module and its children."""
    wait_for_module(module, tree=True)
    # A DTensor in the place of a parameter is no parameter, so the search above misses it.
    if has_dtensors():
        wait_for_all()


def wrap_to_wait_for_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it first waits for the pending parameters among its arguments."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and PENDING:
            wait_for_args((args, kwargs))
        return original(*args, **kwargs)

    return waiting


def wrap_to_fetch_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it first gets the content of all tensors among its arguments.

    It waits for pending parameters, and materializes lazy tensors that are arguments or elements of
    a list or tuple.
    """

    def fetching(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if PENDING:
                wait_for_args((args, kwargs))
            for value in (*args, *kwargs.values()):
                values = value if isinstance(value, (tuple, list)) else (value,)
                # Each collective passes here, and mostly without a lazy tensor. So this line makes
                # no call of Python, which Dynamo would compile after a graph break.
                if LazyTensor in map(type, values):
                    fetch = materialize
                    if _DYNAMO in sys.modules:
                        fetch = torch.compiler.disable(materialize)
                    fetch(values)
        return original(*args, **kwargs)

    return fetching


def wrap_make_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's ``_make_grads``, whose results the autograd engine reads, as wrap_to_fetch_args does."""
    fetching = wrap_to_fetch_args(original)

    def fetching_given(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        for grad in grads:
            if grad is not None:
                return fetching(outputs, grads, *args, **kwargs)
        # The outputs are losses without a gradient.
        return original(outputs, grads, *args, **kwargs)

    return fetching_given


def wrap_unflatten(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's ``_unflatten_tensor`` so that a DTensor over a parameter is known.

    See [Note: DTensors over parameters].
    """

    @functools.wraps(original)
    def unflatten(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # An earlier DTensor over the parameter must not stay pending, because the record of the
        # parameter forgets it.
        wait_for_param(tensor)
        dtensor = original(tensor, *args, **kwargs)
        register_dtensor(tensor, dtensor)
        return dtensor

    return unflatten


class ModuleCall:
    """A descriptor that replaces ``Module._call_impl`` and waits when a module's call is looked up.

    [Note: module calls] Kernels that read raw memory (scripted functions, C++ extensions) are
    called in modules, so a module's call waits for its own parameters. A global module hook would
    do, but torch warns about it under ``torch.compile``, and Dynamo guards on it. A wrapped
    function would add two frames per level to every traceback and to Python's recursion depth. A
    descriptor returns the original method and is done before the method runs. ``hide_frames`` keeps
    Dynamo from tracing the descriptor.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        """Return the function, or the bound method of a module whose parameters are ready."""
        if module is None:
            return self._function
        if _is_traced():
            # Dynamo cannot create method objects.
            return functools.partial(self._function, module)
        if PENDING and not torch.compiler.is_compiling():
            wait_for_module(module)
        return MethodType(self._function, module)


# True while Dynamo traces the call, but not while it runs a function for real.
_is_traced: Final = torch.compiler.is_dynamo_compiling


class ModuleHook:
    """The installation of :class:`ModuleCall`. See [Note: module calls]."""

    def __init__(self) -> None:
        self._call: Any = ModuleCall(vars(nn.Module)["_call_impl"])
        # mypy expects a function, and the descriptor returns one.
        nn.Module._call_impl = self._call  # type: ignore[assignment]

    def remove(self) -> None:
        """Put the original back, unless a script has installed another function over this one.

        That function may call this one.
        """
        if vars(nn.Module)["_call_impl"] is self._call:
            nn.Module._call_impl = self._call._function  # type: ignore[method-assign]


class ContextHook:
    """A hook for an ``autograd.Function`` whose ``apply`` a script took before the patch.

    No wrapper sees a call of that built-in method. But each call creates a context, and the class
    of the context is Python code. The arguments are unknown there, so the hook waits for all
    parameters.
    """

    def __init__(self) -> None:
        # mypy compares with `object.__init__`, which takes no further argument.
        BackwardCFunction.__init__ = _wait_for_unseen_args  # type: ignore[assignment]

    def remove(self) -> None:
        """Stop waiting."""
        del BackwardCFunction.__init__


def _wait_for_unseen_args(_context: Any) -> None:
    # A wrapped apply() has waited for its arguments. Only the direct caller counts, because a
    # Function inside of a wrapped one may read other parameters. Dynamo guards on all that it
    # reads, so the test for it comes first.
    if (
        not torch.compiler.is_compiling()
        and PENDING
        and sys._getframe(1).f_code is not _ARGS_WRAPPER_CODE
    ):
        wait_for_all()


def wrap_to_wait_for_compiled_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that runs right before every call of compiled code.

    A graph reads memory and its guards compare classes, so the wait must precede the compiled
    frame. Every entry (``torch.compile`` of a function, a module or DDP, ``module.compile()``, code
    compiled before ``apply()``) runs ``compile_wrapper``. This closure calls ``original`` right
    before the compiled code, outside of tracing and guards. If it calls a module, the wrapper waits
    for the parameters of that module, so models compiled block by block keep their overlap.
    Otherwise it waits for all parameters.
    """
    # Dynamo is imported by now, so this costs scripts nothing that do not compile.
    # The first forward of a compiled wrapper over a mesh makes DTensors.
    hide_frames(
        ModuleCall.__get__,
        _wait_for_unseen_args,
        register_dtensor,
        wait_for_args,
        wait_for_all,
        wait_for_param,
        wait_for_module,
    )

    def waiting(callback: Any) -> Any:
        # The callback is None for code that is not compiled.
        if callback is not None and PENDING:
            function = _find_compiled_function(sys._getframe(1))
            module = getattr(function, "__wrapped__", getattr(function, "__self__", function))
            if isinstance(module, nn.Module):
                wait_for_tree(module)
            else:
                wait_for_all()
        return original(callback)

    return waiting


def wrap_to_wait_for_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that begins the capture of a CUDA graph, or replays one.

    A capture cannot wait for work that was launched before it, and a replay reads the captured
    addresses. Inductor captures and replays inside of a call of compiled code, which has waited for
    the parameters that it reads.
    """

    @functools.wraps(original)
    def capture_or_replay(*args: Any, **kwargs: Any) -> Any:
        if PENDING and not _is_within_inductor(sys._getframe(1)):
            wait_for_all()
        return original(*args, **kwargs)

    return capture_or_replay


def _is_within_inductor(frame: FrameType | None) -> bool:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch._inductor."):
            return True
        frame = frame.f_back
    return False


def _find_compiled_function(frame: FrameType | None) -> Any:
    """Return the function that was compiled, from the frames of its call; None if not found."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "compile_wrapper":
            return frame.f_locals.get("fn")
        frame = frame.f_back
    return None


_STREAM_HOOKS: Final = (
    ReadHook(
        "torch._C._cuda_setStream",
        record_numbered_switches,
        "makes a stream current, which may read parameters that another stream has waited for",
    ),
    ReadHook(
        "torch._C._accelerator_setStream", record_switches, "as torch._C._cuda_setStream", True
    ),
    ReadHook(
        "torch.cuda.streams.Stream.__enter__", record_switches, "as torch._C._cuda_setStream", True
    ),
    ReadHook(
        "torch.cuda.streams.Stream.__exit__",
        record_switches,
        "makes the previous stream current again",
        True,
    ),
)

_ARGS_WRAPPER_CODE: Final = wrap_to_wait_for_args(len).__code__

#: Whether ``autograd.Function.apply`` is a built-in method, so that :class:`ContextHook` is needed.
APPLIES_IN_C: Final = isinstance(
    vars(torch.autograd.Function).get("apply"), ClassMethodDescriptorType
)

#: The hooks for C++ functions that ignore the classes of their arguments. ``torch.tensor`` is one, but has none: torch
#: recognizes it by its identity, to create its tensors on the default device.
ARGUMENT_HOOKS: Final = (
    ReadHook(
        "torch._functorch.eager_transforms._wrap_tensor_for_grad",
        wrap_to_fetch_args,
        "sees the arguments of torch.func.grad, vjp, jvp and functions built on them; it calls C++",
    ),
    ReadHook(
        "torch._functorch.eager_transforms._maybe_wrap_functional_tensor",
        wrap_to_fetch_args,
        "sees the arguments of torch.func.functionalize; it calls C++",
    ),
    ReadHook(
        "torch._functorch.vmap._create_batched_inputs",
        wrap_to_fetch_args,
        "sees the arguments of torch.vmap; it calls C++",
    ),
    *(
        ReadHook(
            f"torch.distributed.distributed_c10d._check_{what}",
            wrap_to_fetch_args,
            "sees the tensors of torch.distributed's collectives, alone or in lists, before C++ "
            "does; before torch 2.13 most collectives ignore the class of their arguments",
        )
        for what in ("single_tensor", "tensor_list")
    ),
    ReadHook(
        "torch.autograd._make_grads",
        wrap_make_grads,
        "sees the gradients of outputs that backward() and grad() get, before C++ does",
    ),
)

#: The hooks for readers that do not see a parameter's class.
READ_HOOKS: Final = (
    # Builds without CUDA have no streams.
    *(_STREAM_HOOKS if hasattr(torch._C, "_cuda_setStream") else ()),
    ReadHook(
        "torch._dynamo.eval_frame._callback_from_stance",
        wrap_to_wait_for_compiled_code,
        "runs right before compiled code and outside of it, for all code however and whenever it "
        "was compiled; graphs read memory, and their guards compare classes",
    ),
    ReadHook(
        "torch.cuda.graphs.CUDAGraph.capture_begin",
        wrap_to_wait_for_graphs,
        "begins the capture of a CUDA graph, which cannot wait for work launched before it",
    ),
    ReadHook(
        "torch.cuda.graphs.CUDAGraph.replay",
        wrap_to_wait_for_graphs,
        "replays a CUDA graph, which reads the memory of parameters",
    ),
    # Older versions of torch have no such class, so nothing is missing from a report.
    *(
        ReadHook(
            f"torch.accelerator.graphs.Graph.{name}",
            wrap_to_wait_for_graphs,
            "as torch.cuda.graphs.CUDAGraph",
        )
        for name in ("capture_begin", "replay")
        if hasattr(getattr(torch, "accelerator", None), "graphs")
    ),
    ReadHook(
        "torch.autograd.function.Function.apply"
        if APPLIES_IN_C
        else "torch._functorch.utils.unwrap_dead_wrappers",
        wrap_to_wait_for_args,
        "gets the arguments of every autograd.Function, whose kernels may read memory; calls C++",
    ),
    ReadHook(
        "torch.distributed.utils._verify_param_shape_across_processes",
        wrap_to_wait_for_args,
        "sees the parameters of a module that DDP wraps, before C++ compares their strides",
    ),
    ReadHook(
        "torch.nn.parameter.Parameter.__new__",
        wrap_to_wait_for_args,
        "compares the type of its data with Tensor and Parameter, exactly",
    ),
)
