"""Blocks are found and patched, scripts see the same objects, and revert restores all of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ovpatch
from ovpatch.overlap.module_blocks import find_blocks
from ovpatch_plugins.recompute import recompute
from ovpatch_plugins.recompute.recompute_options import OPTIONS
from ovpatch_plugins.recompute.recompute_report import COUNTERS
from tests.plugins.recompute.models import Block, Decoder, Derived, count_differences, data, record
from tests.support.rarely import ALL_CASES, RARELY


class Two(nn.Module):
    """A model with an encoder and a decoder, and with lists that are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Decoder(layers=2), Decoder(Derived, layers=2)
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


ENCODER, DECODER = (
    [f"encoder.layers.{i}" for i in range(2)],
    [f"decoder.layers.{i}" for i in range(2)],
)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), [*ENCODER, *DECODER]),
        (("encoder.layers.*",), ENCODER),
        (("*.layers.1",), ["encoder.layers.1", "decoder.layers.1"]),
        (("layers.*",), []),
        (("Derived",), DECODER),
        (("Block", "decoder.layers.0"), [*ENCODER, "decoder.layers.0"]),
        (("encoder", "encoder.layers.*"), ["encoder"]),
        (("*.layers",), ["encoder.layers", "decoder.layers"]),
    ],
)
def test_blocks_are_found_by_name_and_by_class(patterns: tuple[str, ...], names: list[str]) -> None:
    assert [block.name for block in find_blocks(Two(), patterns)] == names


def test_names_do_not_contain_wrappers() -> None:
    model = Decoder()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    wrapped = nn.Module()
    wrapped.module = model
    found = find_blocks(wrapped, ("layers.*",))
    assert [block.name for block in found] == ["layers.0", "layers.1", "layers.2"]
    assert all(type(block.module) is Block for block in found)


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("blocks", " layers.* , Block ", "layers.*,Block"),
        ("keep", "aten.mm, my::op", "aten.mm,my::op"),
        ("keep", "mm", None),
        ("ahead", "2", 2),
        ("ahead", "-1", None),
    ],
)
def test_options(option: str, text: str, expected: Any) -> None:
    parse = next(known.parse for known in OPTIONS if known.name == option)
    assert parse is not None
    if expected is None:
        with pytest.raises(ValueError, match="expected"):
            parse(text)
    else:
        assert parse(text) == expected


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _calls(model: nn.Module) -> int:
    before = COUNTERS.calls
    model(data(0)).sum().backward()
    return COUNTERS.calls - before


def _lives() -> dict[str, Any]:
    found: dict[str, Any] = {}
    stock, signature = vars(Block)["forward"], inspect.signature(Block.forward)
    early = Decoder()
    kept = _sgd(early)
    ovpatch.apply("recompute")
    found["built before apply()"] = _calls(early)
    model, stranger = Decoder(), Decoder()
    optimizer = _sgd(model)
    found["with an optimizer"] = _calls(model)
    found["without an optimizer"] = _calls(stranger)
    found["class"] = (
        type(model.layers[0]) is Block and inspect.signature(Block.forward) == signature
    )
    found["copied"] = _calls(copy.deepcopy(model))
    stream = io.BytesIO()
    torch.save(model.layers[0], stream)
    found["pickled without ovpatch"] = b"ovpatch_plugins" not in stream.getvalue()
    found["unpickled"] = len(pickle.loads(pickle.dumps(model)).state_dict()) == len(
        model.state_dict()
    )
    report = next(feature for feature in ovpatch.report().features if feature.name == "recompute")
    found["remarks"] = [
        text for text in report.remarks if "Decoder: 3 blocks of class Block" in text
    ]
    ovpatch.revert()
    found["reverted"] = _calls(model)
    found["forward is the stock one"] = vars(Block)["forward"] is stock
    found["left"] = [key for key in vars(model.layers[0]) if "ovpatch" in key]
    del kept, optimizer
    return found


def test_models_of_optimizers_are_patched_and_reverted(ranks: Any) -> None:
    (found,) = ranks(1)(_lives)
    assert found["built before apply()"] == found["with an optimizer"] == found["copied"] == 3
    assert found["without an optimizer"] == found["reverted"] == 0
    assert found["class"]
    assert found["pickled without ovpatch"]
    assert found["unpickled"]
    assert found["remarks"]
    assert found["forward is the stock one"]
    assert not found["left"]


def _options() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ovpatch.applied("recompute", options={"recompute": {"blocks": "layers.1, Derived"}}):
        model = Decoder()
        _sgd(model)
        found["one by name"] = _calls(model)
    with ovpatch.applied("recompute", options={"recompute": {"granularity": "none"}}):
        model = Decoder()
        _sgd(model)
        found["none"] = _calls(model)
    with ovpatch.applied("recompute", options={"recompute": {"blocks": "blocks.*"}}):
        model = Decoder()
        _sgd(model)
        found["no such block"] = _calls(model)
        report = next(
            feature for feature in ovpatch.report().features if feature.name == "recompute"
        )
        found["remarks"] = list(report.remarks)
    model = Decoder()
    model.layers[0].forward = functools.partial(Block.forward, model.layers[0])
    names = recompute(model)
    found["replaced forward"] = names, _calls(model)
    recompute(model, "none")
    return found


def test_options_choose_blocks(ranks: Any) -> None:
    (found,) = ranks(1)(_options)
    assert (found["one by name"], found["none"], found["no such block"]) == (1, 0, 0)
    assert "Decoder has no module that blocks=blocks.* names" in found["remarks"]
    assert found["replaced forward"] == (["layers.1", "layers.2"], 2)


def _swap() -> list[Any]:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = _sgd(model)
    param = model.layers[0].up.weight
    # torch refuses a tensor that something references weakly.
    torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 0.9))
    model(data(0)).sum().backward()
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _swap_in_both() -> tuple[int, int]:
    stock, before = _swap(), COUNTERS.calls
    with ovpatch.applied("recompute"):
        patched = _swap()
    return count_differences(stock, patched), COUNTERS.calls - before


def test_parameters_may_be_swapped(ranks: Any) -> None:
    assert ranks(1)(_swap_in_both) == [(0, 3)]


# --- compilers and other ways of calling a model ---


def _train(model: nn.Module, forward: Any) -> list[Any]:
    optimizer = _sgd(model)
    found = []
    for step in range(2):
        loss = forward(model, data(step)).square().mean()
        loss.backward()
        found += record(model, loss)
        optimizer.step()
        optimizer.zero_grad()
    return found


_Uncounted = functools.partial(Block, "uncounted")


def _compiled_model() -> list[Any]:
    torch.manual_seed(0)
    model = Decoder(_Uncounted, layers=2)
    return _train(model, torch.compile(lambda model, x: model(x), backend="aot_eager"))


def _compiled_blocks() -> list[Any]:
    torch.manual_seed(0)
    model = Decoder(_Uncounted, layers=2)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return _train(model, lambda model, x: model(x))


def _wrapped_blocks() -> list[Any]:
    torch.manual_seed(0)
    model = Decoder(_Uncounted, layers=2)
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")
    return _train(model, lambda model, x: model(x))


def _compile(granularity: str) -> dict[str, tuple[int, int]]:
    found = {}
    # The calls of a block do not depend on the operators that it recomputes.
    runs_all = granularity == "full" or ALL_CASES
    for train in (
        (_compiled_model, _compiled_blocks, _wrapped_blocks) if runs_all else (_compiled_blocks,)
    ):
        torch.compiler.reset()
        stock = train()
        torch.compiler.reset()
        before = COUNTERS.compiled_calls
        with ovpatch.applied("recompute", options={"recompute": {"granularity": granularity}}):
            patched = train()
        found[train.__name__] = count_differences(stock, patched), COUNTERS.compiled_calls - before
    return found


@pytest.mark.parametrize("granularity", [pytest.param("full", marks=RARELY), "selective"])
def test_compiled_blocks(ranks: Any, granularity: str) -> None:
    (found,) = ranks(1)(_compile, granularity, timeout=120)
    for name, (changed, compiled) in found.items():
        assert not changed, name
        assert compiled >= 1, name


def _compiled_parts() -> list[Any]:
    """Train with a part of each block compiled, and with a break in its graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Decoder(layers=2)
    for layer in model.layers:
        feed = layer._feed

        def broken(h: torch.Tensor, feed: Any = feed) -> torch.Tensor:
            h = h * 2
            torch._dynamo.graph_break()
            result: torch.Tensor = feed(h + 1)
            return result

        layer._feed = torch.compile(broken, backend="aot_eager")
    return _train(model, lambda model, x: model(x))


def _compile_parts() -> tuple[int, int]:
    stock, before = _compiled_parts(), COUNTERS.calls
    with ovpatch.applied("recompute", options={"recompute": {"granularity": "selective"}}):
        patched = _compiled_parts()
    return count_differences(stock, patched), COUNTERS.calls - before


def test_compiled_parts_of_blocks(ranks: Any) -> None:
    assert ranks(1)(_compile_parts, timeout=120) == [(0, 4)]


def _under_transforms() -> tuple[bool, int]:
    model = Decoder(layers=2)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: Any) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(model, params, (data(0),)).square().mean()
        return result

    stock = torch.func.grad(loss)(params)
    recompute(model)
    before = COUNTERS.calls
    patched = torch.func.grad(loss)(params)
    equal = all(torch.equal(stock[name], patched[name]) for name in stock)
    recompute(model, "none")
    return equal, COUNTERS.calls - before


def test_torch_runs_functional_transforms(ranks: Any) -> None:
    assert ranks(1)(_under_transforms) == [(True, 0)]


def _in_ddp() -> int:
    model = DistributedDataParallel(Decoder(layers=2))
    with ovpatch.applied("recompute", options={"recompute": {"blocks": "layers.*"}}):
        _sgd(model)
        return _calls(model)


def test_names_inside_of_ddp(ranks: Any) -> None:
    assert ranks(2)(_in_ddp) == [2, 2]


# --- layers of transformers ---


def _train_layers(
    kwargs: dict[str, bool] | None, patched: bool
) -> tuple[list[Any], dict[str, int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    before = COUNTERS.as_dict()
    options = {"recompute": {"blocks": "model.layers.[01]"}}
    with ovpatch.applied("recompute", options=options) if patched else contextlib.nullcontext():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, attention_dropout=0.1, **sizes)).train()
        if kwargs is not None:
            model.gradient_checkpointing_enable(kwargs)
        optimizer = _sgd(model)
        ids = torch.arange(12).view(2, 6)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    counts = {name: value - before[name] for name, value in COUNTERS.as_dict().items()}
    return record(model), counts


def _compare_layers() -> dict[str, tuple[int, dict[str, int]]]:
    found = {}
    for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        stock, _ = _train_layers(kwargs, patched=False)
        patched, counts = _train_layers(kwargs, patched=True)
        found[str(kwargs)] = count_differences(stock, patched), counts
    return found


def test_layers_of_transformers_are_not_checkpointed_twice(ranks: Any) -> None:
    """Models have a cache, as by default. If a script has transformers checkpoint, the script's way stays."""
    pytest.importorskip("transformers")
    (found,) = ranks(1)(_compare_layers, timeout=120)
    for name, (changed, counts) in found.items():
        assert not changed, name
        assert counts["calls"] == (2 if name == "None" else 0), name
        assert bool(counts["stock_calls"]) == (name != "None"), name
