"""Every installed function can be called as the original, with every parameter by its name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

import ovpatch
from ovpatch.api import session
from ovpatch.patching.wrapper_chain import WrapperChain, compare_signatures

#: Modules whose functions are patched once they are imported.
OWNERS = (
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.parallel.ddp",
    "torch.distributed.autograd",
    "torch._dynamo.eval_frame",
    "transformers.distributed.expert_parallel",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed",
    "megatron.core.optimizer",
)

#: Their own calls work on real objects only before the original is called, so that nothing but the binding is seen.
BINDING_ERRORS = (IndexError, KeyError, ValueError)


class Anything:
    """An argument that no function can work with."""


def own_frames(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    # The first frame belongs to the test.
    return found[1:]


def call_by_names(wrap: Callable[..., Any], original: Callable[..., Any]) -> str:
    """Call a wrapper with every parameter by name; return the problem, or ""."""
    signature = inspect.signature(original)
    given = {
        name: Anything()
        for name, parameter in signature.parameters.items()
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    reached: list[dict[str, Any]] = []

    @functools.wraps(original)
    def stub(*args: Any, **kwargs: Any) -> None:
        reached.append(signature.bind_partial(*args, **kwargs).arguments)

    # torch marks a step that calls hooks so, and its own wrapper takes no names.
    vars(stub).pop("hooked", None)
    wrapper = wrap(stub)
    try:
        wrapper(**given)
    except BINDING_ERRORS as error:
        return f"{error!r}" if len(own_frames(error.__traceback__)) == 1 else ""
    except Exception as error:  # noqa: BLE001 - the wrapper was entered, and cannot work with such arguments
        return "" if own_frames(error.__traceback__) else f"{error!r}"
    found = {name: value for arguments in reached for name, value in arguments.items()}
    return (
        ""
        if not reached or given.items() <= found.items()
        else f"{sorted(found)} arrive of {sorted(given)}"
    )


def find_misfits(shard: str) -> tuple[int, dict[str, str]]:
    """Return the number of patches, and the problems of some, by target."""
    for name in OWNERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    options = {"dist_optimizer": {"shard": shard, "main_params_in_fp32": shard == "always"}}
    count, wrong = 0, {}
    names = [feature.name for feature in ovpatch.report().features]
    with ovpatch.applied(options=options), contextlib.ExitStack() as stack:
        for name in names:
            # The package that the feature patches may be missing.
            with contextlib.suppress(ovpatch.FeatureError):
                stack.enter_context(ovpatch.applied(name))
        if shard == "auto":
            from ovpatch_plugins.dist_optimizer.dist_optimizer_feature import _Registration

            assert _Registration.late.prepare() == ""
        states = {status.target: status for status in session._features._manager.statuses()}
        wrong |= {
            name: status.reason
            for name, status in states.items()
            if status.state.value == "incompatible"
        }
        assert "torch.optim.optimizer.Optimizer.state_dict" in states
        for chain in session._features._manager._chains:
            if chain.wrappers:
                count += len(chain.wrappers)
                wrong |= look_at(chain)
    return count, wrong


def look_at(chain: WrapperChain) -> dict[str, str]:
    wrong = {}
    path, original = chain.slot.path, chain.original
    if chain.dispatcher.function.__wrapped__ is not original:
        wrong[path] = "another original"
    for wrapper in chain.wrappers:
        problem = compare_signatures(original, wrapper.function)
        # Functions written in C may have no signature.
        with contextlib.suppress(ValueError):
            inspect.signature(original)
            assert inspect.signature(chain.dispatcher.function) == inspect.signature(original)
            assert wrapper.patch.wrap is not None
            problem = problem or call_by_names(wrapper.patch.wrap, original)
        if problem:
            wrong[path] = problem
    return wrong


@pytest.mark.parametrize("shard", ["always", "auto"])
def test_every_installed_function_takes_every_parameter_by_name(ranks, shard):
    ((count, wrong),) = ranks(1)(find_misfits, shard)
    assert count > 40
    assert not wrong


def first_by_place(original):
    def wrapper(*args, **kwargs):
        return original(args[0], *args[1:], **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "wrap",
    [
        first_by_place,
        lambda original: lambda optimizer, *args, **kwargs: original(optimizer, *args, **kwargs),
        lambda original: lambda self, *args, **kwargs: original(self),
    ],
    ids=["first one by place", "first one renamed", "others dropped"],
)
def test_a_wrapper_that_takes_less_is_found(wrap):
    def original(self, state_dict): ...

    assert call_by_names(wrap, original)
