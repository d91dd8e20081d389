"""Patches under what torch itself does to functions: compiling, rewrapping, pickling by name."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ovpatch.patching import PatchManager
from tests.support import patience
from tests.support.preloaded import Server

from .tools import only, plus, same, snapshot, states

torch: Any = pytest.importorskip("torch")

LINEAR = "torch.nn.Linear.forward"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A compile backend that counts how often it is asked."""

    def __init__(self) -> None:
        self.frames = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.frames += 1
        return graph.forward


class Heir(torch.nn.Linear):  # type: ignore[misc]
    pass


# torch.compile


def test_fullgraph_keeps_the_patch_and_never_recompiles(pm: PatchManager) -> None:
    pm.register_patch(LINEAR, wrap=plus(1))
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    stock = linear(x)
    pm.apply()
    backend = Counting()
    compiled = torch.compile(lambda x: linear(x), backend=backend, fullgraph=True)
    for _ in range(5):
        assert torch.equal(compiled(x), stock + 1)
        assert torch.equal(linear(x), stock + 1)
    assert backend.frames == 1
    assert (only(pm).calls, only(pm).traces, only(pm).never_called) == (5, 1, False)


@pytest.mark.parametrize("compiled_first", [False, True])
def test_compiled_code_that_was_only_traced_counts_as_called(
    pm: PatchManager, compiled_first: bool
) -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    if compiled_first:
        compiled(x)
    pm.register_patch(LINEAR, wrap=plus(1))
    pm.apply()
    assert only(pm).never_called
    stock = torch.nn.functional.linear(x, linear.weight, linear.bias)
    assert torch.equal(compiled(x), stock + 1)
    assert (only(pm).calls, only(pm).never_called) == (0, False)
    pm.revert()
    assert torch.equal(compiled(x), stock)


def test_stack_of_replacement_and_wrappers_compiles(pm: PatchManager) -> None:
    x = torch.ones(1, 2)
    linear, heir = torch.nn.Linear(2, 2), Heir(2, 2)
    pm.register_patch(LINEAR, lambda self, input: input * 3)
    pm.register_patch(LINEAR, wrap=plus(1))
    pm.register_patch(LINEAR, wrap=plus(10))
    pm.register_patch(f"{__name__}.Heir.forward", wrap=plus(100))
    pm.apply()
    compiled = torch.compile(lambda x: (linear(x), heir(x)), backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(compiled(x), (x * 3 + 11, x * 3 + 111), strict=True):
        assert torch.equal(mine, theirs)


def test_patched_functional_compiles(pm: PatchManager) -> None:
    functional, x = torch.nn.functional, torch.ones(1, 2)
    user = torch.nn.Linear(2, 2)
    stock, before = user(x), (functional.linear, torch._C._nn.linear)
    pm.register_patch("torch.nn.functional.linear", wrap=plus(1))
    pm.register_patch("torch.nn.functional.gelu", wrap=plus(2))
    pm.apply()
    assert torch._C._nn.linear is before[1]
    compiled = torch.compile(
        lambda x: functional.gelu(user(x)), backend="aot_eager", fullgraph=True
    )
    expected = torch._C._nn.gelu(stock + 1) + 2
    assert torch.equal(functional.gelu(user(x)), expected)
    assert torch.equal(compiled(x), expected)
    pm.revert()
    assert (functional.linear, torch._C._nn.linear) == before


def test_shadowed_patch_is_out_of_compiled_code(
    pm: PatchManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    pm.register_patch(LINEAR, wrap=plus(1))
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    stock = linear(x)
    pm.apply()
    monkeypatch.setattr(torch.nn.Linear, "forward", plus(10)(torch.nn.Linear.forward))
    compiled = torch.compile(lambda x: linear(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), stock + 1 + 10)
    pm.revert()
    assert states(pm) == ["shadowed"]
    assert torch.equal(compiled(x), stock + 10)


def test_patch_installed_before_torch_is_imported_compiles() -> None:
    program = """
import sys, types
from ovpatch.patching import PatchManager
m = types.ModuleType("early")
exec("def f(x): return x * 2", m.__dict__)
sys.modules["early"] = m
pm = PatchManager()
pm.register_patch("early.f", wrap=lambda original: lambda x: original(x) + 1)
pm.register_patch("torch.nn.Linear.forward", wrap=lambda original: lambda self, input: original(self, input) + 1)
pm.apply()
assert "torch" not in sys.modules
import torch
frames = []
def backend(graph, inputs):
    frames.append(graph)
    return graph.forward
compiled = torch.compile(lambda x: m.f(x), backend=backend, fullgraph=True)
for _ in range(3):
    assert compiled(torch.ones(1)).item() == 3
    assert m.f(torch.ones(1)).item() == 3
assert len(frames) == 1, len(frames)
assert [(status.state.value, status.calls, status.traces) for status in pm.statuses()] == [
    ("applied", 3, 1), ("applied", 0, 0)], pm.statuses()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience.scale(120))


# Optimizers


@pytest.fixture
def own_sgd() -> Iterator[type]:
    """A class of its own, since torch changes optimizer classes for good; so it did SGD if another test built one."""
    stock: Any = torch.optim.SGD.step
    plain = stock.__wrapped__ if getattr(stock, "hooked", False) else stock

    class SGD(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            return plain(self, closure)

    SGD.__qualname__ = "OwnSGD"
    globals()["OwnSGD"] = SGD
    yield SGD
    del globals()["OwnSGD"]


def parameters() -> list[Any]:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return [parameter]


def count_calls(calls: list[str]) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, closure: Any = None) -> Any:
            calls.append(type(self).__name__)
            return original(self, closure)

        return step

    return wrap


def test_first_optimizer_after_apply_wraps_the_patch_and_revert_is_right(
    pm: PatchManager, own_sgd: Any
) -> None:
    calls: list[str] = []
    pm.register_patch(f"{__name__}.OwnSGD.step", wrap=count_calls(calls))
    pm.apply()
    optimizer = own_sgd(parameters(), lr=0.5)
    hooks: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooks.append("post"))
    rewrapped = vars(own_sgd)["step"]
    assert states(pm) == ["applied"]
    optimizer.step()
    assert (calls, hooks) == (["SGD"], ["post"])
    pm.revert()
    assert states(pm) == ["shadowed"]
    assert vars(own_sgd)["step"] is rewrapped
    optimizer.step()
    assert (calls, hooks) == (["SGD"], ["post", "post"])
    for cycle in range(3):
        pm.apply()
        assert states(pm) == ["applied"]
        optimizer.step()
        assert len(calls) == cycle + 2
        assert vars(own_sgd)["step"] is rewrapped
        pm.revert()


def test_optimizer_before_apply_is_restored_exactly(pm: PatchManager, own_sgd: Any) -> None:
    optimizer = own_sgd(parameters(), lr=0.5)
    before = snapshot(own_sgd)
    calls: list[str] = []
    hooks: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooks.append("post"))
    pm.register_patch(f"{__name__}.OwnSGD.step", wrap=count_calls(calls))
    pm.apply()
    optimizer.step()
    own_sgd(parameters(), lr=0.5).step()
    assert (len(calls), len(hooks)) == (2, 1)
    pm.revert()
    assert states(pm) == ["reverted"]
    assert same(before, snapshot(own_sgd))


@pytest.mark.parametrize("scheduler_first", [False, True])
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_scheduler_built_before_or_after(
    pm: PatchManager, own_sgd: Any, scheduler_first: bool, optimizer_first: bool
) -> None:
    calls: list[str] = []
    pm.register_patch(f"{__name__}.OwnSGD.step", wrap=count_calls(calls))
    if not optimizer_first and not scheduler_first:
        pm.apply()
    optimizer = own_sgd(parameters(), lr=0.5)
    if not scheduler_first:
        pm.apply()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    pm.apply()
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    # A scheduler that is older than the patch holds the stock step for its own optimizer; others are patched.
    assert len(calls) == (0 if scheduler_first else 2)
    assert optimizer._opt_called
    own_sgd(parameters(), lr=0.5).step()
    assert len(calls) == (1 if scheduler_first else 3)
    pm.revert()
    before = len(calls)
    optimizer.step()
    scheduler.step()
    own_sgd(parameters(), lr=0.5).step()
    assert len(calls) == before


STEP_HOOKS = """
import sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from ovpatch.patching import PatchManager
order = sys.argv[1]
calls, hooks = [], []
def wrap(original):
    def step(self, closure=None):
        calls.append(1)
        return original(self, closure)
    return step
def build(name):
    p = torch.nn.Parameter(torch.ones(1)); p.grad = torch.ones(1)
    return getattr(torch.optim, name)([p])
pm = PatchManager()
pm.register_patch("torch.optim.AdamW.step", wrap=wrap)
if order[0] == "b":
    build("Adam")
pm.apply()
names = ["AdamW", "Adam"] if order[1] == "w" else ["Adam", "AdamW"]
built = {name: build(name) for name in names}
register_optimizer_step_post_hook(lambda *_: hooks.append(1))
built["AdamW"].step()
assert (len(calls), len(hooks)) == (1, 1), (calls, hooks)
built["Adam"].step()
assert (len(calls), len(hooks)) == (1, 2), (calls, hooks)
pm.revert()
built["AdamW"].step()
assert (len(calls), len(hooks)) == (1, 3), (calls, hooks)
"""


@pytest.mark.parametrize("order", ["bw", "aw", "aa"])
def test_step_hooks_run_once_for_an_inherited_step_whichever_class_is_used_first(
    order: str, forks: Server, tmp_path: Path
) -> None:
    """In a process of its own, since torch changes optimizer classes for good."""
    program = tmp_path / "program.py"
    program.write_text(STEP_HOOKS)
    forks.torchrun(1, program, order).check()


# Pickling and copying


def test_models_with_patched_methods_pickle_and_copy(pm: PatchManager) -> None:
    x = torch.ones(1, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Heir(2, 2))
    stock = model(x)
    model.callback = model[0].forward
    pm.register_patch(LINEAR, wrap=plus(1))
    pm.register_patch(f"{__name__}.Heir.forward", wrap=plus(1))
    pm.apply()
    patched = model(x)
    assert not torch.equal(patched, stock)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    copied = copy.deepcopy(model)
    for twin in (loaded, copied, pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is torch.nn.Linear
        assert torch.equal(twin(x), patched)
        assert twin.callback.__self__ is twin[0]
    pm.revert()
    assert torch.equal(loaded(x), stock)
    assert b"ovpatch.patching" not in buffer.getvalue()


@pytest.mark.parametrize(
    "target",
    [
        LINEAR,
        "torch.nn.functional.relu",
        "torch.nn.functional.linear",
        "torch.nn.utils.clip_grad.clip_grad_norm_",
        f"{__name__}.Heir.forward",
        f"{__name__}.Heir.extra_repr",
    ],
)
def test_patched_functions_pickle_by_name(pm: PatchManager, target: str) -> None:
    *path, name = target.split(".")
    owner = (
        functools.reduce(getattr, path[1:], sys.modules["torch"]) if path[0] == "torch" else Heir
    )
    pm.register_patch(
        target, wrap=lambda original: lambda *args, **kwargs: original(*args, **kwargs)
    )
    stock = getattr(owner, name)
    pm.apply()
    installed = getattr(owner, name)
    assert installed is not stock
    assert pickle.loads(pickle.dumps(installed)) is installed
    assert copy.deepcopy(installed) is installed
    pm.revert()
    assert pickle.loads(pickle.dumps(stock)) is stock


def test_signature_of_a_patched_forward_is_the_stock_one(pm: PatchManager) -> None:
    original, stock = torch.nn.Linear.forward, inspect.signature(torch.nn.Linear.forward)
    pm.register_patch(
        LINEAR, wrap=lambda original: lambda *args, **kwargs: original(*args, **kwargs)
    )
    pm.apply()
    linear = torch.nn.Linear(1, 1)
    assert inspect.signature(torch.nn.Linear.forward) == stock
    assert list(inspect.signature(linear.forward).parameters) == ["input"]
    assert linear.forward.__func__ is torch.nn.Linear.forward
    assert torch.nn.Linear.forward.__wrapped__ is original
    assert torch.fx.symbolic_trace(torch.nn.Sequential(linear)).graph is not None


# TorchScript


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * math.pi


def target(x: torch.Tensor) -> torch.Tensor:
    """Named like something inside of the installed function."""
    return x + 1


class Scripted(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return target(scaled(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_compiles_the_original_of_a_patched_forward(pm: PatchManager) -> None:
    """It reads source, and so never sees a patch; what it makes computes what it makes without one."""
    x = torch.ones(2)
    stock = torch.jit.script(Scripted())
    pm.register_patch(f"{__name__}.Scripted.forward", wrap=plus(1.0))
    pm.apply()
    scripted = torch.jit.script(Scripted())
    assert torch.equal(Scripted()(x), stock(x) + 1)
    assert torch.equal(scripted(x), stock(x))
    pm.revert()
    assert torch.equal(torch.jit.script(Scripted())(x), stock(x))


class CallsC(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_compiles_callers_of_a_patched_function_that_is_written_in_c(
    pm: PatchManager,
) -> None:
    """It has no source to read: TorchScript finds such a function in a table."""
    x, table = torch.ones(2), torch.jit._builtins._builtin_table
    stock = CallsC()(x)
    pm.register_patch("torch.nn.functional.gelu", wrap=plus(1.0))
    pm.apply()
    installed = id(torch.nn.functional.gelu)
    assert torch.equal(CallsC()(x), stock + 1)
    assert torch.equal(torch.jit.script(CallsC())(x), stock)
    pm.revert()
    assert torch.equal(torch.jit.script(CallsC())(x), stock)
    assert installed in table
    gc.collect()
    assert installed not in table, "another function may get this identity"


BEFORE_TORCH = """
import warnings
from ovpatch.patching import PatchManager

def wrap(original):
    return lambda *args, **kwargs: original(*args, **kwargs)

pm = PatchManager()
pm.register_patch("torch.nn.functional.gelu", wrap=wrap)
pm.apply()
import torch
assert torch.nn.functional.gelu.__ovpatch__

def call(x):
    return torch.nn.functional.gelu(x)

warnings.simplefilter("ignore")
torch.jit.script(call)
print("compiled")
"""


def test_torchscript_compiles_callers_of_a_function_that_was_patched_while_torch_was_imported(
    tmp_path: Path,
) -> None:
    # TorchScript reads the source of its callers.
    script = tmp_path / "script.py"
    script.write_text(BEFORE_TORCH)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=patience.scale(120)
    )
    assert done.stdout == "compiled\n", done.stderr
