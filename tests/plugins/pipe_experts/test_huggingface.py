"""Expert-parallel models of transformers train in stock PyTorch and patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ovpatch
from ovpatch.insight.equality import Verdict
from ovpatch_plugins.pipe_experts.huggingface_experts import is_stock_implementation
from ovpatch_plugins.pipe_experts.pipe_experts_report import COUNTERS
from tests.support.equality import compare
from tests.support.errors import error_of

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="needs transformers with expert parallelism"
)

Record = dict[str, Any]
WORDS = 64
TINY = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "qwen3_moe": {
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_experts": 8,
        "head_dim": 8,
    },
    "qwen2_moe": {
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "num_experts": 8,
    },
}
BIASED = {"gpt_oss": {"intermediate_size": 24, "num_local_experts": 8, "head_dim": 8}}
OVER = {
    "data": {"fsdp_size": 2, "ep_size": 2},
    "tensor": {"tp_size": 2, "tp_plan": "auto", "ep_size": 2},
    "copies": {"fsdp_size": 4, "ep_size": 2},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folder of a saved tiny model of each kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    for name, more in (MODELS | BIASED).items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **TINY, **more))
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in MODELS | BIASED}


def loaded(
    path: str, over: str = "data", implementation: str = "auto", experts: str = "eager"
) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**OVER[over], ep_implementation=implementation)
    arguments = {
        "distributed_config": config,
        "dtype": dtype_for(experts),
        "experts_implementation": experts,
    }
    model = AutoModelForCausalLM.from_pretrained(path, **arguments)
    return model


def train(
    path: str,
    over: str = "data",
    implementation: str = "auto",
    experts: str = "eager",
    steps: int = 3,
) -> list[Record]:
    model = loaded(path, over, implementation, experts)
    kind = torch.optim.SGD if dtype_for(experts) == torch.float32 else torch.optim.AdamW
    optimizer = kind(model.parameters(), 0.01, foreach=False)
    return [step(model, optimizer, number, over) for number in range(steps)]


def dtype_for(experts: str) -> torch.dtype:
    """Return the most precise dtype that an implementation of experts supports."""
    return torch.float64 if experts in ("eager", "batched_mm") else torch.float32


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, over: str) -> Record:
    rank = 0 if over == "tensor" else dist.get_rank()
    tokens = torch.randint(
        WORDS, (2, 9), generator=torch.Generator().manual_seed(10 * number + rank)
    )
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    grads = {name: local(param.grad) for name, param in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    params = {name: local(param) for name, param in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    model.train()
    return {"loss": loss.detach(), "grads": grads, "params": params, "logits": local(logits)}


def local(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def patched(options: dict[str, Any], *args: Any, **kwargs: Any) -> Record:
    before = COUNTERS.as_dict()
    with ovpatch.applied("pipe_experts", options={"pipe_experts": options}):
        found = train(*args, **kwargs)
    return {
        "records": found,
        **{name: value - before[name] for name, value in COUNTERS.as_dict().items()},
    }


def floor(arguments: dict[str, Any]) -> float:
    return 1e-9 if dtype_for(arguments.get("experts", "eager")) == torch.float64 else 1e-6


def check(
    ranks: Any,
    options: dict[str, Any],
    *args: Any,
    stock: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[Record]:
    run = ranks(4 if "copies" in args else 2)
    results = run(patched, options, *args, **kwargs)
    for right, result in zip(
        stock_run(run, *args, **(kwargs if stock is None else stock)), results, strict=True
    ):
        compare(right, result["records"], floor=floor(kwargs)).assert_equal()
        assert result["taken_over"] == result["calls"] > 0
    return results


def stock_run(run: Any, *args: Any, **kwargs: Any) -> list[list[Record]]:
    """Train in stock PyTorch, once for all tests that compare with it."""
    key = (args if args[1:] else (*args, "data"), tuple(sorted(kwargs.items())))
    if key not in _stock_runs:
        _stock_runs[key] = run(train, *args, **kwargs)
    return _stock_runs[key]


_stock_runs: dict[Any, list[list[Record]]] = {}

WAYS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [{}, {"cut": "tokens", "parts": 3}],
    "qwen3_moe": [{"cut": "experts"}],
    "qwen2_moe": [{"cut": "experts", "parts": 3}],
}


@pytest.mark.parametrize("over", ["data", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_in_stock_pytorch(ranks, saved, name, over):
    for options in WAYS[name]:
        for result in check(ranks, options, saved[name], over):
            assert result["stacked_calls"] == result["calls"]
            assert (result["parts"] > result["calls"]) == bool(options)


def test_experts_with_two_copies(ranks, saved):
    check(ranks, {}, saved["mixtral"], "copies")


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_each_implementation_of_experts(ranks, saved, experts):
    for result in check(ranks, {}, saved["mixtral"], experts=experts):
        assert result["stacked_calls"] > 0


def scripted_experts(self: nn.Module, *args: Any) -> Tensor:
    """An implementation of experts that a script has registered."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return 2 * grouped_mm_experts_forward(self, *args)


def with_own_experts(function: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("scripted_experts", scripted_experts)
    return function(*args, **kwargs, experts="scripted_experts")


def test_experts_that_a_script_computes(ranks, saved):
    for cut in ("experts", "tokens"):
        right = ranks(2)(with_own_experts, train, saved["mixtral"])
        results = ranks(2)(with_own_experts, patched, {"cut": cut}, saved["mixtral"])
        for stock, ours in zip(right, results, strict=True):
            compare(stock, ours["records"], floor=1e-6).assert_equal()
            assert ours["taken_over"] > 0
            assert ours["stacked_calls"] == 0


def overriding_class(path: str) -> list[Record]:
    """Train with a script's subclass of an implementation of transformers; it scales the combined tokens."""
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

    class Weighing(AllToAllEP):
        def _combine_tokens(self, *args: Any) -> Tensor:
            return 3 * super()._combine_tokens(*args)

    EPImplementationInterface.register("weighing", Weighing)
    return train(path, implementation="weighing", steps=1)


def replaced_forward(path: str) -> list[Record]:
    """Train with experts whose forward a script has replaced, as libraries of kernels do."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    before = MixtralExperts.forward
    MixtralExperts.forward = lambda self, *args: 3 * before(self, *args)
    try:
        return train(path, steps=1)
    finally:
        MixtralExperts.forward = before


def replaced_in_the_registry(path: str) -> list[Record]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = ALL_EXPERTS_FUNCTIONS["batched_mm"]
    ALL_EXPERTS_FUNCTIONS["batched_mm"] = lambda *args: 3 * before(*args)
    try:
        return train(path, experts="batched_mm", steps=1)
    finally:
        del ALL_EXPERTS_FUNCTIONS["batched_mm"]


def turned_on(function: Any, *args: Any) -> Any:
    with ovpatch.applied("pipe_experts"):
        return function(*args)


@pytest.mark.parametrize("change", [overriding_class, replaced_forward, replaced_in_the_registry])
def test_replacements_of_a_script_are_called(ranks, saved, change):
    plain = stock_run(ranks(2), saved["mixtral"], steps=1)[0]
    right, found = ranks(2)(change, saved["mixtral"]), ranks(2)(turned_on, change, saved["mixtral"])
    assert compare(plain, right[0], floor=1e-9).verdict is Verdict.DIFFERENT, "the change acts"
    for stock, ours in zip(right, found, strict=True):
        compare(stock, ours, floor=1e-9).assert_equal()


@pytest.mark.parametrize(
    "missing", ["", "_dispatch_tokens", "_combine_tokens", "tp_mesh", "experts_forward"]
)
def test_a_release_with_other_attributes_is_left_to_transformers(monkeypatch, missing):
    from transformers.distributed.expert_parallel import AllToAllEP

    made = object.__new__(AllToAllEP)
    for name in {"ep_mesh", "tp_mesh", "num_local_experts", "experts_forward"} - {missing}:
        setattr(made, name, None)
    if missing.startswith("_"):
        monkeypatch.delattr(AllToAllEP, missing)
    assert is_stock_implementation(made) == (not missing)


def experts_alone(path: str) -> list[Record]:
    """Train the experts alone, on tokens that go to no expert of one rank."""
    model = loaded(path)
    for name, param in model.named_parameters():
        if "router.bias" in name:
            with torch.no_grad():
                biases = torch.zeros(8).index_fill(0, torch.tensor([1, 2, 3]), -1e4).to(param.dtype)
                here = param.to_local() if isinstance(param, DTensor) else param
                here.copy_(biases.chunk(2)[dist.get_rank()] if len(here) < 8 else biases)
        param.requires_grad_("experts" in name)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
    return [step(model, optimizer, number, "data") for number in range(2)]


def test_experts_with_biases_trained_alone(ranks, saved):
    right, found = (
        ranks(2)(experts_alone, saved["gpt_oss"]),
        ranks(2)(turned_on, experts_alone, saved["gpt_oss"]),
    )
    for stock, ours in zip(right, found, strict=True):
        compare(stock, ours, floor=1e-9).assert_equal()


def test_the_implementation_can_be_named(ranks, saved):
    check(
        ranks,
        {},
        saved["mixtral"],
        implementation="ovpatch",
        stock={"implementation": "all_to_all"},
    )


def mixed(path: str, experts: str, dtype: torch.dtype, autocast: bool) -> Record:
    """Run one backward in a low precision, or under autocast."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**OVER["data"])
    arguments = {"distributed_config": config, "dtype": dtype, "experts_implementation": experts}
    model = AutoModelForCausalLM.from_pretrained(path, **arguments)
    tokens = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        "grads": {name: local(param.grad) for name, param in model.named_parameters()},
    }


def mixed_and_patched(*args: Any) -> Record:
    before = COUNTERS.stacked_calls
    with ovpatch.applied("pipe_experts"):
        found = mixed(*args)
    assert COUNTERS.stacked_calls > before
    return found


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_gemms_have_the_dtypes_of_stock_pytorch(ranks, saved, experts, dtype, autocast):
    arguments = (saved["mixtral"], experts, dtype, autocast)
    for stock, ours in zip(
        ranks(2)(mixed, *arguments), ranks(2)(mixed_and_patched, *arguments), strict=True
    ):
        # The grouped kernel sums in another order.
        if experts == "grouped_mm" and dtype == torch.float32:
            compare(stock, ours, floor=1e-8).assert_equal()
        else:
            compare(stock, ours).assert_bitwise()


def experts_once(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute experts alone on values and routes that are equal in all dtypes; return float64 gradients."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    arguments = {
        "distributed_config": DistributedConfig(**OVER["tensor"]),
        "experts_implementation": "eager",
    }
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **arguments)
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(512, 16, generator=generator).bfloat16().to(dtype) for _ in range(2))
    top = torch.rand(512, 4, generator=generator).topk(2)
    weights = top.values.bfloat16().to(dtype).requires_grad_()
    out = experts(x.requires_grad_(), top.indices, weights)
    out.backward(grad)
    grads = {
        "x": x.grad,
        "weights": weights.grad,
        **{name: param.grad for name, param in experts.named_parameters()},
    }
    return {name: local(value).double() for name, value in {"out": out, **grads}.items()}


def experts_once_patched(path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    before = COUNTERS.stacked_calls
    with ovpatch.applied("pipe_experts", options={"pipe_experts": options}):
        found = experts_once(path, torch.bfloat16)
    assert COUNTERS.stacked_calls > before
    return found


def test_the_error_of_bf16_is_no_larger_than_that_of_transformers(ranks, saved):
    path = saved["mixtral"]
    truth, stock = (
        ranks(2)(experts_once, path, dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    for options in ({"cut": "none"}, {"cut": "experts"}, {"cut": "tokens", "parts": 8}):
        for right, peer, ours in zip(
            truth, stock, ranks(2)(experts_once_patched, path, options), strict=True
        ):
            for name, value in right.items():
                error, allowed = (
                    (found[name] - value).norm() / value.norm() for found in (ours, peer)
                )
                assert 0 < error <= 1.03 * allowed, (options, name, float(error / allowed))


def reverted(path: str) -> Record:
    """Train, turn the feature off, and continue with the same model."""
    calls = []
    with ovpatch.applied("pipe_experts"):
        model = loaded(path)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
        records = [step(model, optimizer, 0, "data")]
        calls.append(COUNTERS.calls)
    records += [step(model, optimizer, number, "data") for number in (1, 2)]
    calls.append(COUNTERS.calls)
    return {"records": records, "calls": calls, "keys": sorted(model.state_dict())}


def test_the_feature_can_be_turned_off_in_the_middle(ranks, saved):
    for right, result in zip(
        stock_run(ranks(2), saved["mixtral"]), ranks(2)(reverted, saved["mixtral"]), strict=True
    ):
        compare(right, result["records"], floor=1e-9).assert_equal()
        assert result["calls"][0] == result["calls"][1]


def disagreeing(path: str) -> None:
    """Train on ranks that would cut layers in different ways."""
    cut = ["experts", "tokens"][dist.get_rank()]
    with ovpatch.applied("pipe_experts", options={"pipe_experts": {"cut": cut}}):
        train(path, steps=1)


def test_ranks_with_different_cuts_raise(ranks, saved):
    for error in ranks(2)(error_of, disagreeing, saved["mixtral"]):
        assert "cut" in error
        assert error.rstrip().endswith("leaves layers to torch.")


def checkpoints(path: str, folder: str, first: bool, second: bool) -> Record:
    """Save with one arm, load with the other, and continue.

    Layers are cut by experts, because in MindSpeed this cut renumbers them.
    """
    model = None
    for number, on in enumerate((first, second)):
        if on:
            ovpatch.apply("pipe_experts", options={"pipe_experts": {"cut": "experts"}})
        model = loaded(path if number == 0 else folder)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        record = step(model, optimizer, number, "data")
        if number == 0:
            model.save_pretrained(folder)
            dist.barrier()
        if on:
            ovpatch.revert()
    return record


def test_checkpoints_go_both_ways(ranks, saved, tmp_path: Path):
    right = ranks(2)(checkpoints, saved["qwen3_moe"], str(tmp_path / "stock"), False, False)
    for first, second in ((True, False), (False, True)):
        found = ranks(2)(checkpoints, saved["qwen3_moe"], str(tmp_path / f"{first}"), first, second)
        for stock, ours in zip(right, found, strict=True):
            compare(stock, ours, floor=1e-9).assert_equal()
