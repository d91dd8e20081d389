"""The optimizers whose steps can be sharded, and the patches of their steps.

An element-wise optimizer computes the update of each element from the gradient and state of that
element alone, so it can be given any shard of a parameter. Other optimizers need a full parameter,
but no second one, so one rank can update that parameter for all ranks. A class does not show from
outside whether it does so. The feature knows the classes of torch, and the user may name others. A
subclass with its own ``step`` may do anything there.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.optim import Optimizer

from ovpatch_plugins.dist_optimizer.dist_optimizer_report import note_unmanaged

if TYPE_CHECKING:
    from ovpatch.hookspecs import Registrar

ELEMENT_WISE: Final[tuple[type[Optimizer], ...]] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

# Some versions of torch lack one of these classes. The names and tensors of a parameter's state do
# not change after its first step.
PER_PARAMETER: Final[tuple[type[Optimizer], ...]] = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)


class Kind(enum.Enum):
    """The ways to shard a step: by shards of every parameter, or by full parameters.

    A ``NAMED`` kind belongs to classes that the user has named. Their steps may call peers.
    """

    ELEMENT_WISE = enum.auto()
    ELEMENT_WISE_NAMED = enum.auto()
    PER_PARAMETER = enum.auto()
    PER_PARAMETER_NAMED = enum.auto()


@dataclass(frozen=True)
class NamedClasses:
    """Classes that the user has named, as ``module.Class``. The user is trusted.

    Nothing tests whether the step of a class is element-wise, so a wrong name gives wrong values.

    The ``step`` of each class is a target of a patch. A class of a module that is not imported yet
    is patched after the import.

    Attributes:
        element_wise: Those that update each element by itself.
        per_parameter: Those that update each parameter by itself.
    """

    element_wise: Sequence[str] = ()
    per_parameter: Sequence[str] = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> NamedClasses:
        """Read the feature's options."""
        texts = (options["element_wise"], options["per_parameter"])
        return cls(*([name.strip() for name in text.split(",") if name.strip()] for text in texts))


def list_step_classes(named: NamedClasses) -> list[str]:
    """Return the names of the known classes that define ``step``; subclasses inherit it."""
    known = [cls for cls in (*ELEMENT_WISE, *PER_PARAMETER) if "step" in vars(cls)]
    return list(dict.fromkeys([*map(_full_name, known), *named.element_wise, *named.per_parameter]))


def find_kind(cls: type[Optimizer], named: NamedClasses) -> Kind | None:
    """Return the way to shard the steps of a class; None if the class is unknown.

    The ``step`` of a named class is patched in that class. So the function that it may have kept
    from before ``apply()`` does not matter (:func:`_inherits_step`).
    """
    for base in cls.__mro__:
        if _full_name(base) in named.per_parameter:
            return Kind.PER_PARAMETER_NAMED
        if _full_name(base) in named.element_wise:
            return Kind.ELEMENT_WISE_NAMED
        if base in ELEMENT_WISE:
            return Kind.ELEMENT_WISE
        if base in PER_PARAMETER:
            return Kind.PER_PARAMETER
        # A subclass that overrides one of these may compute another update.
        if "_init_group" in vars(base) or not _inherits_step(base):
            return None
    return None


# The code of the wrapper that runs the step hooks.
_HOOKS_CODE: Final = Optimizer.profile_hook_step(lambda: None).__code__


def _inherits_step(cls: type[Optimizer]) -> bool:
    """Return whether the steps of a class are those that its next base class has now.

    The first instance of a class whose ``step`` has no hooks yet makes torch write the inherited
    function, within a wrapper for hooks, into that class. A class without its own ``step`` may so keep the function
    from before ``apply()``, or from an earlier ``apply()``. That function is not patched, and its steps must not be
    sharded.
    """
    if "step" not in vars(cls):
        return True
    inherited: Any = getattr(super(cls, cls), "step", None)
    return _without_hooks(vars(cls)["step"]) is _without_hooks(inherited)


def _without_hooks(step: Any) -> Any:
    """Return the function inside of torch's wrapper for hooks."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKS_CODE else step


def _has_kept_step(cls: type[Optimizer]) -> bool:
    """Return whether an unknown class has kept a function that is not patched, see :func:`_inherits_step`."""
    owner: Any = next(
        base for base in cls.__mro__ if "_init_group" in vars(base) or not _inherits_step(base)
    )
    if "step" not in vars(owner):
        return False
    kept = _list_wrapped(_without_hooks(vars(owner)["step"]))
    current = _list_wrapped(getattr(super(owner, owner), "step", None))
    # A script's own step may name torch's as the function that it wraps, but has other code.
    codes = [getattr(inner, "__code__", None) for inner in current]
    return kept[-1] is current[-1] and getattr(kept[0], "__code__", None) in codes


def _list_wrapped(step: Any) -> list[Any]:
    """Return a function and the functions inside of it, the innermost one last."""
    found = [step]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


def unsupported_reason(optimizer: Optimizer, named: NamedClasses) -> str:
    """Return the reason to leave an optimizer's steps to torch; "" if they can be sharded."""
    cls = type(optimizer)
    if find_kind(cls, named) is None:
        if _has_kept_step(cls):
            return (
                f"{_full_name(cls)} has kept the step of its base class from before this "
                "ovpatch.apply(), when its "
                "first instance was created. Call ovpatch.apply() once, before you create an "
                "optimizer"
            )
        return (
            f"{_full_name(cls)} is not known to be element-wise, nor to update each parameter by "
            "itself. "
            "If it is element-wise, name it in OVPATCH_DIST_OPTIMIZER_ELEMENT_WISE; if it updates "
            "each "
            "parameter by itself, in OVPATCH_DIST_OPTIMIZER_PER_PARAMETER"
        )
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        return "differentiable=True differentiates through the update"
    if any(group.get("capturable") for group in groups):
        return "capturable=True: it may step in a CUDA graph, and no Python code runs when the graph replays"
    if isinstance(optimizer, PER_PARAMETER) and any(map(_shares_epsilon, groups)):
        return "Adafactor without eps takes that of the first parameter for all of a group, and these differ in dtype"
    return ""


def _shares_epsilon(group: Mapping[str, Any]) -> bool:
    """Return whether Adafactor uses the epsilon of one dtype for parameters of another dtype."""
    epsilon = group.get("eps")
    return (
        isinstance(epsilon, tuple)
        and epsilon[0] is None
        and len({param.dtype for param in group["params"]}) > 1
    )


def find_inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer inside a ``ZeroRedundancyOptimizer``, which differs by rank, or None."""
    # A script that uses this class has imported its module. Other scripts must not pay for that.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer.optim  # type: ignore[no-any-return]
    return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- the patches ---

#: Returns Dynamo's callback for the Python frames that its caller calls, None outside of compiled
#: functions. It must be a function in C, because Dynamo would examine the frame of a Python one.
get_dynamo_callback: Final = torch._C._dynamo.eval_frame.get_eval_frame_callback

#: Whether there are sharded optimizers or lazy gradients. It is a global variable, because compiled
#: graphs guard on it, and a graph cannot read a table of optimizers.
is_any_sharded = False


def note_sharded(*, is_any: bool) -> None:
    """Set :data:`is_any_sharded`, the condition on which compiled steps unshard their optimizer."""
    global is_any_sharded
    is_any_sharded = is_any


class Attachment(Protocol):
    """The interface of :class:`.OptimizerAttachment`, whose module imports this one."""

    def step(
        self, inner: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Step an optimizer; ``inner`` is the stock function of its class."""

    def unshard_for_compile(self, optimizer: Optimizer) -> None:
        """Make state and gradients full, because a compiled step reads memory that shards lack."""


class StepPatches:
    """The patches of ``step`` functions.

    ``apply()`` registers them, because schedulers of learning rates keep the function that they
    find. The modules that shard a step are imported later, when a model's gradients are sharded.

    Args:
        named: Classes that the user has named.

    Attributes:
        attachment: Shards the steps; None as long as no model is sharded.
    """

    def __init__(self, named: NamedClasses) -> None:
        self._named = named
        self.attachment: Attachment | None = None

    def register(self, patches: Registrar) -> None:
        """Register the patches of all known classes."""
        for name in list_step_classes(self._named):
            patches.register_patch(
                f"{name}.step",
                wrap=self.wrap_step,
                why="is the innermost place: torch's step hooks, official and global, are outside of the script's own "
                "hooks and closures, which would see shards",
            )

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the ``step`` of a class, inside of torch's own wrapper, which calls step hooks."""
        patches = self
        inner = (
            getattr(original, "__wrapped__", original)
            if getattr(original, "hooked", False)
            else original
        )

        @functools.wraps(inner)
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Torch's optimizers break the graph before this step. Dynamo is then about to compile
            # the functions that this one calls.
            if torch.compiler.is_compiling() or get_dynamo_callback() is not None:
                if is_any_sharded:
                    patches._unshard_for_compile(self)
                return inner(self, *args, **kwargs)
            if patches.attachment is None:
                note_unmanaged(type(self).__name__)
                return inner(self, *args, **kwargs)
            return patches.attachment.step(inner, self, *args, **kwargs)

        if inner is original:
            return step
        # Torch calls step hooks in a wrapper that it creates per class and marks as `hooked`.
        hooked: Any = Optimizer.profile_hook_step(step)
        hooked.hooked = True
        return hooked  # type: ignore[no-any-return]

    # Dynamo would trace into the collectives that gather the state.
    @torch._disable_dynamo
    def _unshard_for_compile(self, optimizer: Optimizer) -> None:
        if self.attachment is not None:
            self.attachment.unshard_for_compile(optimizer)
