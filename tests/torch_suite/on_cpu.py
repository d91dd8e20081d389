"""torch's distributed tests with the device made CPU, which is done to their source text when it is imported.

Calls that name a device name the CPU instead, ``device_ids=`` and ``output_device=`` are None, and decorators that skip
a test are left out. Nothing of the rewritten text is kept.
"""

from __future__ import annotations

import ast
import contextlib
from types import SimpleNamespace
from typing import Any

import torch

_SKIPPING = ("skip_", "skipIf", "nccl_skip", "require_n_gpus", "requires_nccl", "skipUnless")
_PLACES = ("device_ids", "output_device")


def rewritten(source: str, filename: str) -> ast.Module:
    """Return the module of a source text with the device made CPU."""
    tree = _OnCpu().visit(ast.parse(source, filename))
    head = ast.parse(
        "from tests.torch_suite.on_cpu import cuda as _cuda, cpu as _cpu, gpus as _gpus"
    )
    at = next(i for i, node in enumerate(tree.body) if not _must_come_first(node))
    tree.body[at:at] = head.body
    return ast.fix_missing_locations(tree)


def _must_come_first(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) or (
        isinstance(node, ast.ImportFrom) and node.module == "__future__"
    )


def cpu(device: Any = None, *_more: Any) -> Any:
    """Return the CPU for what names a GPU; everything else, such as a dtype or the device "meta", as it is."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return device


def gpus(world: int, _backend: str) -> dict[int, list[int]]:
    """Return the devices of each rank."""
    return {rank: [rank] for rank in range(world)}


class _Stream:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait_stream = wait_event = record_event = record = lambda self, *_args: None


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _context(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


cuda: Any = SimpleNamespace(
    **{name: getattr(torch.cuda, name) for name in ("amp", "nccl", "OutOfMemoryError")},
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    manual_seed=torch.manual_seed,
    device=_context,
    stream=_context,
    Stream=_Stream,
    Event=_Stream,
    current_stream=_Stream,
    current_device=lambda: 0,
    device_count=lambda: 2,
    is_available=lambda: True,
    _sleep=_nothing,
)


class _OnCpu(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = [one for one in node.decorator_list if not _skips(one)]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name("_cuda", ast.Load()), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        called = node.func
        for keyword in node.keywords:
            if keyword.arg in _PLACES:
                keyword.value = ast.Constant(None)
            elif keyword.arg == "device":
                keyword.value = _call("_cpu", keyword.value)
        if isinstance(called, ast.Name) and called.id == "init_multigpu_helper":
            called.id = "_gpus"
        if isinstance(called, ast.Attribute):
            if called.attr == "cuda":
                called.attr, node.args, node.keywords = "cpu", [], []
            elif called.attr == "to" and node.args:
                node.args[0] = _call("_cpu", node.args[0])
            elif (
                called.attr == "device"
                and isinstance(called.value, ast.Name)
                and called.value.id == "torch"
            ):
                node.args = [_call("_cpu", *node.args)] if node.args else []
        return node


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _skips(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = (
        called.attr
        if isinstance(called, ast.Attribute)
        else called.id
        if isinstance(called, ast.Name)
        else ""
    )
    return name.startswith(_SKIPPING)
