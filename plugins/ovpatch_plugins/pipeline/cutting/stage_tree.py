"""A stage of a plain model: its modules, and around them the model's own forward.

A stage's module is the tree of the model with the same names and classes. Its own blocks, and all other modules that
the stage computes, are the model's. The remaining modules have no parameters. The block before the own blocks returns
the tensors that the previous stage sent. The block after them ends the forward with the tensors for the next stage.

[Note: nothing of a stage hooks its blocks] Received tensors enter as the output of the block before the own blocks.
The forward ends at the entry of the block after them. So a checkpointed block gets the tensors as its input, and
recomputes alone. :class:`~ovpatch_plugins.pipeline.cutting.cut_check.BoundaryCheck` sees the calls of the first and the
last own block from outside of their hooks, and only while the stage's forward runs.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ovpatch.overlap.comm.lifetimes import outside_modes
from ovpatch_plugins.pipeline.cutting.block_stack import (
    MODULE_STATE,
    BlockStack,
    CutError,
    ModuleCall,
    Path,
    Trace,
    find_tensors,
    list_outside,
    map_leaves,
    read_path,
)
from ovpatch_plugins.pipeline.cutting.cut_check import ARG, BoundaryCheck, describe_skip
from ovpatch_plugins.pipeline.graph import walk_graph

# The attribute of a module that has the data of its role.
_ROLE: Final = "_ovpatch_role"


class _StageEnd(BaseException):
    """The exception that ends the model's forward after the last own block; the stage's root catches it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


@dataclass
class StagePlan:
    """The part of the model that a stage computes.

    Attributes:
        index: The stage.
        low: Its first block.
        high: The block after its last block.
        stack: All blocks.
        outputs: Places of the received tensors in the output of block ``low - 1``.
        sent: Places of the tensors for the next stage in the inputs of block ``high``.
        select: Makes a tensor, or several, of the model's output.
        nodes: The nodes of the traced graph that belong to the stage.
        params: Ids of the parameters on which the stage's outputs depend.
        received: The tensors that the previous stage sent, while the forward runs.
        due: The block of another stage that the forward must call next.
        check: Checks the stage's boundaries in each forward. None until the stage has been built.
    """

    index: int
    low: int
    high: int
    stack: BlockStack
    outputs: list[Path]
    sent: list[Path]
    select: Callable[[Any], Any]
    nodes: set[Any] = field(default_factory=set)
    params: set[int] = field(default_factory=set)
    received: tuple[Tensor, ...] = ()
    due: int = 0
    check: BoundaryCheck | None = None

    @property
    def is_last(self) -> bool:
        """True if the stage has the last block."""
        return self.high == len(self.stack.blocks)


def make_plans(
    trace: Trace, stack: BlockStack, starts: Sequence[int], select: Callable[[Any], Any]
) -> list[StagePlan]:
    """Return the plans of all stages, from the graph of a traced forward.

    Raises:
        CutError: A stage depends on an earlier stage by more than the inputs of its first block.
    """
    plans = []
    # The block of each parameter.
    owners = {
        id(param): index for index, block in enumerate(stack.blocks) for param in block.parameters()
    }
    for stage, (low, high) in enumerate(zip(starts, [*starts[1:], len(stack.blocks)], strict=True)):
        before, after = trace.boundaries.get(low), trace.boundaries.get(high)
        outputs = (
            [tensor for _, tensor in find_tensors(trace.output)] if after is None else after.tensors
        )
        nodes, leaves = walk_graph(outputs)
        # Blocks of other stages on whose parameters this stage depends, other than through its inputs.
        foreign = sorted(
            owners[key] for key in leaves if key in owners and not low <= owners[key] < high
        )
        if foreign:
            raise CutError(
                f"{stack.name(low)} to {stack.name(high - 1)} depend on {stack.name(foreign[0])} "
                f"by more than the hidden states that {stack.name(low - 1)} returns. Have each block "
                "return that, too, so that it passes through all blocks, or cut elsewhere with "
                "blocks_per_stage=."
            )
        plans.append(
            StagePlan(
                stage,
                low,
                high,
                stack,
                [] if before is None else before.outputs,
                [] if after is None else after.inputs,
                select,
                nodes,
                {key for key, leaf in leaves.items() if isinstance(leaf, nn.Parameter)},
            )
        )
    return plans


def select_output(output: Any) -> Any:
    """Return the last stage's output for a model's output: of a mapping or a dataclass, its first tensor.

    Raises:
        CutError: There is no tensor.
    """
    if isinstance(output, Tensor) or type(output) in (tuple, list):
        return output
    first = next((tensor for _, tensor in find_tensors(output)), None)
    if first is None:
        raise CutError(
            f"the model returns a {type(output).__name__} without a tensor. Pass a function that "
            "selects the values for the loss: cut(..., output=lambda result: result.logits)."
        )
    return first


class _ContiguousGrad(torch.autograd.Function):
    """A received tensor whose gradient is contiguous, as messages are."""

    @staticmethod
    def forward(_ctx: Any, received: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


# --- roles ---


class _Root:
    """The root of a stage, which takes received tensors and runs the model's own forward up to the stage's end."""

    def forward(self, *received: Tensor, **kwargs: Any) -> Any:
        plan: StagePlan = self.__dict__[_ROLE]
        args = [
            kwargs.pop(f"{ARG}{index}")
            for index in range(sum(key.startswith(ARG) for key in kwargs))
        ]
        if torch.is_grad_enabled():
            make: Any = _ContiguousGrad.apply  # untyped in torch
            received = tuple(
                make(tensor) if tensor.requires_grad else tensor for tensor in received
            )
        plan.received = received
        plan.due = 0
        # Dynamo calls the forward of modules that it inlines, so it would pass the check by.
        check = None if torch.compiler.is_compiling() else plan.check
        if check is not None:
            check.start(received)
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        except _StageEnd as end:
            return end.tensors[0] if len(end.tensors) == 1 else end.tensors
        finally:
            plan.received = ()
            if check is not None:
                check.finish()
        if plan.due < plan.low:
            raise CutError(describe_skip(plan))
        if not plan.is_last:
            raise CutError(
                f"the model's forward ended before {plan.stack.name(plan.high)}, unlike with the "
                "microbatch that it was cut with. Cut it with a microbatch that takes the same path "
                "as those of training."
            )
        return plan.select(output)


class _SkippedBlock:
    """A block of another stage."""

    # This is torch's method, because the block's own __call__ may checkpoint the forward.
    __call__ = nn.Module.__call__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan, index, template = self.__dict__[_ROLE]
        # Received tensors enter as the output of the last block before the own blocks. A forward that skips that block
        # would continue with the zeros that represent hidden states.
        if index != (plan.due if plan.due < plan.low else plan.high):
            raise CutError(describe_skip(plan, index))
        if index == plan.high:
            if plan.check is not None:
                plan.check.check_exit((args, kwargs))
            # Senders and receivers of all transports expect contiguous messages, and T5 passes transposed tensors.
            raise _StageEnd(
                tuple(read_path((args, kwargs), path).contiguous() for path in plan.sent)
            )
        plan.due += 1
        given = dict(zip(plan.outputs, plan.received, strict=True))
        return map_leaves(template, lambda path, leaf: given.get(path, leaf))


class _Placeholder:
    """A module that a stage does not have; the model's forward may read its parameters."""

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield zeros instead of parameters; the model's forward may read a dtype or a device from them.

        The stage's root has no such zeros. Blocks of other stages have no parameters, and other features recognize them
        by that.
        """
        return _list_zeros(self, recurse)


class _Blank(_Placeholder):
    """A module whose output the stage does not need; it returns zeros of the right shapes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (twins,) = self.__dict__[_ROLE]
        tensors = (tensor for _, tensor in find_tensors((args, kwargs)))
        given = next(itertools.chain(tensors, self.parameters()), None)
        device = torch.device("cpu") if given is None else given.device
        with torch.no_grad():
            output = twins.compute(args, kwargs, device)
        return map_leaves(
            output,
            lambda _, leaf: (
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
                if isinstance(leaf, Tensor)
                else leaf
            ),
        )


def _list_zeros(module: Any, recurse: bool) -> Iterator[Tensor]:
    own = vars(module)
    yield from (param for param in module._parameters.values() if param is not None)
    yield from (own[name] for name, is_param in own.get(_ZEROS, {}).items() if is_param)
    if recurse:
        for child in (*module._modules.values(), *own.values()):
            if isinstance(child, nn.Module):
                yield from _list_zeros(child, recurse)


class _Twins:
    """Copies of a module without its parameters, which compute the shapes of its output.

    The copy on the meta device computes shapes alone. Its forward fails if the module's forward depends on values, such
    as the sizes of pictures. Then another copy computes with zeros without memory as parameters.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        # The copy from which the other copies are made; it has the module's own buffers.
        self._shell = _make_twin(module, None)
        # The copy that computes.
        self._twin = _make_twin(module, torch.device("meta"))
        self._is_meta = True

    def compute(self, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Return an output of the module with the right shapes and wrong values.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
            device: Their device.
        """
        if self._is_meta:
            try:
                return self._twin(
                    *map_leaves(
                        args, lambda _, leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf
                    ),
                    **map_leaves(
                        kwargs,
                        lambda _, leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf,
                    ),
                )
            except Exception:  # noqa: BLE001 - torch raises several classes, and another error is raised again below
                self._is_meta = False
                self._twin = _make_twin(self._shell, device)
        return self._twin(*args, **kwargs)


class _Absent(_Placeholder):
    """A module that the stage does not call.

    If the model calls the module after all blocks, its role has the stage's plan, because the stage ends before.
    """

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        name, plan = self.__dict__[_ROLE]
        if plan is not None:
            raise CutError(describe_skip(plan))
        raise CutError(
            f"the stage has no {name}, which it did not call with the microbatch that the model "
            "was cut with. Cut the model with a microbatch that takes the same path as those of "
            "training, and have only a module's own forward call its parts."
        )


_classes: dict[tuple[type, type], Any] = {}


def make_subclass(role: type, cls: type) -> Any:
    """Return a class that plays a role and is otherwise ``cls``, by its name and for ``isinstance()``."""
    if (role, cls) not in _classes:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[role, cls] = type(cls.__name__, (role, cls), names)
    return _classes[role, cls]


_ZEROS: Final = "_ovpatch_zeros"
"""The attribute of a module with the names of its zeros, and whether each represents a parameter."""

# The attributes of torch of which a copy of a module has its own.
_FRESH: Final = MODULE_STATE - {"training"}


def _play(
    role: type,
    module: nn.Module,
    part: Any,
    find_own: Callable[[nn.Module], nn.Module | None] = lambda _: None,
) -> nn.Module:
    """Return a module without parameters and buffers that replaces another module.

    Its children are plain attributes, which the model's forward can read, for example to get the dtype of a weight. If
    they were modules, features that look for linears to shard or to defer would find them.

    Args:
        role: A class of roles.
        module: The module.
        part: The data of the role.
        find_own: Returns the stage's own module for a module that the model also calls outside of ``module``, None for
            others.
    """
    cls = make_subclass(role, type(module))
    made: nn.Module = cls.__new__(cls)
    nn.Module.__init__(made)
    for name, value in module.__dict__.items():
        if name not in _FRESH and name != "forward" and not isinstance(value, nn.Module):
            made.__dict__[name] = value
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            made.__dict__[name] = None
            if tensor is not None:
                _set_zeros(made, name, tensor)
    # Containers look their members up among their modules, so these must be there.
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for name, child in module._modules.items():
        own = None if child is None else find_own(child)
        if own is not None:
            nn.Module.__setattr__(made, name, own)
            continue
        absent = (f"{type(module).__name__}.{name}", None)
        played = None if child is None else _play(_Absent, child, absent, find_own)
        (made._modules if is_container else made.__dict__)[name] = played
    made.__dict__[_ROLE] = part
    return made


def _set_zeros(
    module: nn.Module, name: str, tensor: Tensor, device: torch.device | None = None
) -> None:
    """Let a module hold zeros without memory instead of a parameter or buffer that the stage does not have."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device if device is None else device
    with outside_modes():
        module.__dict__[name] = torch.zeros((), dtype=dtype, device=device).expand(shape)
    module.__dict__.setdefault(_ZEROS, {}).setdefault(name, isinstance(tensor, nn.Parameter))


def move_zeros(tree: nn.Module, device: torch.device) -> None:
    """Move the zeros of a stage's absent parameters, which ``tree.to()`` and ``to_empty()`` do not see."""
    for module in tree.modules():
        for name in tuple(module.__dict__.get(_ZEROS, ())):
            _set_zeros(module, name, module.__dict__[name], device)
        if _ROLE in module.__dict__:
            for value in module.__dict__.values():
                if isinstance(value, nn.Module) and isinstance(value, _Absent):
                    move_zeros(value, device)


# --- the tree of a stage ---


class StageTree:
    """The maker of the stages' modules.

    Args:
        model: The full model, which stays as it is.
        stack: Its blocks.
        trace: One forward of it.
        plans: The plans of all stages.
    """

    def __init__(
        self, model: nn.Module, stack: BlockStack, trace: Trace, plans: Sequence[StagePlan]
    ) -> None:
        self._model = model
        self._stack = stack
        self._trace = trace
        self._plans = plans
        self._outside = {id(module) for module in list_outside(model, stack)}
        self._blocks = {id(block): index for index, block in enumerate(stack.blocks)}
        self._names = {id(module): name for name, module in model.named_modules()}
        # Ids of the parameters on which some stage depends.
        self._reached = set().union(*(plan.params for plan in plans))
        # Modules of stages, with the modules of the model that they copy.
        self._sources: list[tuple[nn.Module, nn.Module]] = []

    def build(self, plan: StagePlan) -> nn.Module:
        """Return the module of a stage; its parameters are the model's."""
        # Each module of the model has one copy in a stage, also if it occurs several times.
        made: dict[int, nn.Module] = {}
        root = self._copy(self._model, plan, made)
        for source_id, module in made.items():
            if source_id not in self._blocks:
                _redirect(module, made)
        root.__dict__[_ROLE] = plan
        root.__class__ = make_subclass(_Root, type(self._model))
        return root

    def _copy(self, module: nn.Module, plan: StagePlan, made: dict[int, nn.Module]) -> nn.Module:
        if id(module) not in made:
            made[id(module)] = self._make(module, plan, made)
            self._sources.append((made[id(module)], module))
        return made[id(module)]

    def copy_modes(self) -> None:
        """Set the modules of stages to train or evaluate as those of the model do."""
        for made, source in self._sources:
            made.training = source.training

    def _make(self, module: nn.Module, plan: StagePlan, made: dict[int, nn.Module]) -> nn.Module:
        index = self._blocks.get(id(module))
        if index is not None:
            if plan.low <= index < plan.high:
                return module
            return _play(_SkippedBlock, module, (plan, index, self._trace.templates[index]))
        is_complete = False
        if id(module) in self._outside:
            call = self._trace.calls.get(id(module))
            if call is not None:

                def find_own(child: nn.Module) -> nn.Module | None:
                    inner = self._trace.calls.get(id(child))
                    return (
                        None
                        if inner is None or id(module) in inner.callers
                        else self._copy(child, plan, made)
                    )

                if self._is_blank(module, call, plan):
                    return _play(_Blank, module, (_Twins(module),), find_own)
                if self._is_after_blocks(call) and not plan.is_last:
                    return _play(_Absent, module, (self._names[id(module)], plan), find_own)
                is_complete = True
            elif not self._has_calls(module) and not self._keeps_any(module, plan):
                return _play(_Absent, module, (self._names[id(module)], None))
        copied = _copy_shallow(module)
        if not is_complete:
            for name, param in module._parameters.items():
                if param is not None and not self._keeps(param, plan):
                    del copied._parameters[name]
                    _set_zeros(copied, name, param)
        for name, child in module._modules.items():
            if child is None:
                copied._modules[name] = None
            else:
                # Torch calls registration hooks, by which other features find the stage. The class of the model may
                # define __setattr__, which must not act on the copy.
                nn.Module.__setattr__(copied, name, self._copy(child, plan, made))
        return copied

    def _is_blank(self, module: nn.Module, call: ModuleCall, plan: StagePlan) -> bool:
        """Return whether a stage calls a module, but needs neither its output nor its parameters."""
        if not plan.low or not call.is_differentiable or self._is_after_blocks(call):
            return False
        return not any(node in plan.nodes for node in call.nodes) and not self._reaches(
            module, plan
        )

    def _is_after_blocks(self, call: ModuleCall) -> bool:
        return call.blocks_before == len(self._stack.blocks)

    def _has_calls(self, module: nn.Module) -> bool:
        return any(id(inner) in self._trace.calls for inner in module.modules())

    def _reaches(self, module: nn.Module, plan: StagePlan) -> bool:
        return any(id(param) in plan.params for param in module.parameters())

    def _keeps_any(self, module: nn.Module, plan: StagePlan) -> bool:
        params = list(module.parameters())
        return not params or any(self._keeps(param, plan) for param in params)

    def _keeps(self, param: nn.Parameter, plan: StagePlan) -> bool:
        """Return whether a stage has a parameter: it depends on it, or it is the first and no stage does."""
        return id(param) in plan.params or (plan.index == 0 and id(param) not in self._reached)


def _copy_shallow(module: nn.Module) -> nn.Module:
    copied: nn.Module = type(module).__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name in _FRESH and isinstance(value, (dict, set)):
            copied.__dict__[name] = value.copy()
    copied._modules = {}
    return copied


def _make_twin(module: nn.Module, device: torch.device | None) -> nn.Module:
    """Return a copy of a module whose parameters are zeros without memory.

    Args:
        module: The module.
        device: The device of the parameters and of copied buffers. None: the meta device, and the module's own buffers.
    """
    twin = _copy_shallow(module)
    for name, param in module._parameters.items():
        if param is not None:
            zero = torch.zeros((), dtype=param.dtype, device="meta" if device is None else device)
            twin._parameters[name] = nn.Parameter(zero.expand(param.shape), requires_grad=False)
    for name, buffer in module._buffers.items():
        if device is not None and buffer is not None:
            copied = twin._buffers[name] = torch.zeros_like(buffer, device=device)
            if not buffer.is_meta and device.type != "meta":
                copied.copy_(buffer)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _make_twin(child, device)
    return twin


def _redirect(module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Let plain attributes of a copied module refer to the copies of the full model's modules."""
    for name, value in module.__dict__.items():
        if name in _FRESH or name == _ROLE:
            continue
        if isinstance(value, nn.Module):
            module.__dict__[name] = made.get(id(value), value)
        elif type(value) in (list, tuple) and any(isinstance(item, nn.Module) for item in value):
            module.__dict__[name] = type(value)(made.get(id(item), item) for item in value)
        elif isinstance(value, types.MethodType) and id(value.__self__) in made:
            module.__dict__[name] = types.MethodType(value.__func__, made[id(value.__self__)])


# --- parameters of several stages ---


@dataclass(frozen=True)
class SharedParam:
    """A parameter that several stages have, such as a tied embedding.

    Attributes:
        name: Its first name in the full model.
        stages: The stages.
        owners: The modules of this rank's stages that have it, and its name in each.
    """

    name: str
    stages: tuple[int, ...]
    owners: tuple[tuple[nn.Module, str], ...]

    def find_params(self) -> list[nn.Parameter]:
        """Return this rank's copies; wrappers of stages may have replaced them."""
        params = [owner._parameters[name] for owner, name in self.owners]
        return [param for param in params if param is not None]


def find_shared_params(
    model: nn.Module, trees: Mapping[int, nn.Module], held: Sequence[Iterable[int]]
) -> list[SharedParam]:
    """Find the parameters of several stages, and give each of this rank's stages its own copy.

    Args:
        model: The full model.
        trees: This rank's stages.
        held: Ids of the parameters of each stage.
    """
    stages: dict[int, list[int]] = {}
    for stage, params in enumerate(held):
        for key in set(params):
            stages.setdefault(key, []).append(stage)
    found = []
    for name, param in model.named_parameters():
        if len(stages.get(id(param), ())) < 2 or not param.requires_grad:
            continue
        owners: list[tuple[nn.Module, str]] = []
        is_first = True
        for tree in trees.values():
            # The modules of the stage that have the parameter, with its names in them.
            inner = [
                (module, at)
                for module in tree.modules()
                for at, own in module._parameters.items()
                if own is param
            ]
            if inner and not is_first:
                copied = nn.Parameter(param.detach().clone())
                for module, attribute in inner:
                    module._parameters[attribute] = copied
            is_first = is_first and not inner
            owners += inner[:1]
        found.append(SharedParam(name, tuple(stages[id(param)]), tuple(owners)))
    return found
