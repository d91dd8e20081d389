"""Scripts see a patched linear as a stock one."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ovpatch
from tests.plugins.ddp.arms import all_both, table
from tests.plugins.tp_linear import arms
from tests.plugins.tp_linear.arms import (
    Record,
    both,
    check_same,
    copy_full,
    counters,
    draw,
    layout,
    mesh,
    seen,
)
from tests.plugins.tp_linear.models import MLP, WIDTH, Llama, parallel_llama
from tests.plugins.tp_linear.training import equal
from tests.support.equality import compare

CUT = Shard(0)
PLAN = {"up": ColwiseParallel(input_layouts=CUT), "down": RowwiseParallel(output_layouts=CUT)}


def made(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return parallelize_module(MLP().double(), mesh(), PLAN)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Record:
    x = draw(3, WIDTH, seed=10 * number + dist.get_rank(), dtype=torch.float64)
    model(x).square().sum().backward()
    optimizer.step()
    record = seen(model)
    optimizer.zero_grad()
    return record


def arm(patched: bool) -> Any:
    return ovpatch.applied("tp_linear") if patched else contextlib.nullcontext()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, foreach=False)


# ---------------------------------------------------------------- the object


def objects() -> Record:
    model = made()
    up = model.up
    again = copy.deepcopy(model)
    x = draw(3, WIDTH, seed=dist.get_rank(), dtype=torch.float64)
    seen_by_hooks: list[str] = []
    up.register_forward_pre_hook(lambda m, args: seen_by_hooks.append(layout(args[0])))
    up.register_forward_hook(lambda m, args, out: seen_by_hooks.append(layout(out)))
    return {
        "linear": isinstance(up, nn.Linear),
        "repr": repr(model),
        "keys": sorted(model.state_dict()),
        "layouts": {name: layout(value) for name, value in model.state_dict().items()},
        "attributes": [up.in_features, up.out_features],
        "y": model(x),
        "copy": again(x),
        "hooks": seen_by_hooks,
    }


def test_scripts_see_the_same_object(ranks):
    for result in ranks(2)(both, objects):
        stock, ours = result["stock"], result["patched"]
        hooks = stock.pop("hooks"), ours.pop("hooks")
        equal([stock], [ours])
        assert hooks[1] == ["torch.float64 (3, 24)", "torch.float64 (6, 24)"], (
            "the shard, and the local output"
        )


def pickled() -> dict[str, Any]:
    with ovpatch.applied("tp_linear"):
        model = made()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        x = draw(3, WIDTH, seed=dist.get_rank(), dtype=torch.float64)
        return {"same": torch.equal(model(x), again(x)), "calls": counters()["calls"]}


def test_a_module_can_be_pickled(ranks):
    """Stock PyTorch cannot pickle a parallel module, because its hooks are local functions."""
    for result in ranks(2)(pickled):
        assert result["same"]


def exchanged(folder: str, saved: str, loaded: str) -> Record:
    """Save with one arm, load with the other, and continue training."""
    torch.distributed.barrier()
    with arm(saved == "patched"):
        model = made()
        optimizer = adamw(model)
        step(model, optimizer, 0)
        dcp.save(
            {"m": get_model_state_dict(model), "o": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=folder,
        )
    with arm(loaded == "patched"):
        model = made(seed=1)
        state = {"m": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["m"])
        return step(model, adamw(model), 1)


def test_checkpoints_go_both_ways(ranks, tmp_path: Path):
    arms = ["stock", "patched"]
    found = [
        ranks(2)(exchanged, str(tmp_path / (a + b)), a, b) for a, b in itertools.product(arms, arms)
    ]
    for rank in range(2):
        for records in found[1:]:
            equal([found[0][rank]], [records[rank]])


# ---------------------------------------------------------------- on and off


def interrupted(patched: bool) -> Record:
    """Train a step patched, a step reverted, and a step patched again."""
    model = None
    records = []
    for number, on in enumerate((patched, False, patched)):
        with arm(on):
            if model is None:
                model, blocks = made(), parallel_llama(Llama(layers=1).double(), mesh())
                optimizer = adamw(model)
            classes = {type(model.up) is nn.Linear, type(blocks.layers[0].mlp.w1) is nn.Linear}
            assert classes == {not on}
            records.append(step(model, optimizer, number))
            blocks(torch.arange(24).view(2, 12)).sum().backward()
            records.append(seen(blocks))
    hooks = [*model.up._forward_pre_hooks, *model.up._forward_hooks]
    return {"records": records, "hooks": len(hooks) if not patched else 2}


def test_revert_in_the_middle_of_training(ranks):
    for stock, ours in zip(ranks(2)(interrupted, False), ranks(2)(interrupted, True), strict=True):
        equal([stock], [ours])


def made_before(patched: bool, user_hook: bool) -> Record:
    model, linears = made(), (0, 0)
    attention = parallel_llama(Llama(layers=1).double(), mesh())
    if user_hook:
        model.up.register_forward_hook(lambda m, args, out: out * 2)
    before = counters()
    with arm(patched):
        if patched:
            hooks = [
                hook
                for module in attention.modules()
                for hook in module._forward_pre_hooks.values()
            ]
            linears = (
                sum(
                    "_ovpatch_parallel" in vars(module)
                    for module in (*model.modules(), *attention.modules())
                ),
                sum(type(hook).__name__ == "SharedAllGather" for hook in hooks),
            )
        record = step(model, adamw(model), 0)
        attention(torch.arange(24).view(2, 12)).sum().backward()
        assert (counters()["shared_calls"] > before["shared_calls"]) == patched
    after = step(model, adamw(model), 1)
    return {"records": [record, seen(attention), after], "linears": linears}


@pytest.mark.parametrize("user_hook", [False, True])
def test_models_that_were_made_before_apply_are_found(ranks, user_hook):
    stock, ours = (ranks(2)(made_before, patched, user_hook) for patched in (False, True))
    for expected, result in zip(stock, ours, strict=True):
        assert result["linears"] == (10, 2)
        equal(expected["records"], result["records"])


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OwnStyle(ColwiseParallel):
    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        return ColwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, mod, (inputs[0] * 3,), device_mesh
        )


def foreign() -> Record:
    torch.manual_seed(0)
    model = nn.Sequential(Odd(WIDTH, 24), nn.Linear(12, 24))
    attention = nn.MultiheadAttention(WIDTH, 2)
    parallelize_module(
        model, mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel(input_layouts=Shard(-1))}
    )
    styled = parallelize_module(nn.Linear(WIDTH, 24), mesh(), OwnStyle())
    parallelize_module(attention, mesh(), {"out_proj": RowwiseParallel(input_layouts=Replicate())})
    x = draw(4, WIDTH)
    features = " ".join(
        " ".join(map(str, feature.remarks))
        for feature in ovpatch.report().features
        if feature.name == "tp_linear"
    )
    return {
        "y": copy_full(styled(x)),
        "odd": copy_full(model[0](x)),
        "classes": [type(model[0]).__name__],
        "remarks": features,
    }


def test_torch_computes_subclasses_and_own_styles(ranks):
    for result in ranks(2)(both, foreign):
        remarks = result["stock"].pop("remarks"), result["patched"].pop("remarks")
        equal([result["stock"]], [result["patched"]])
        assert "stock PyTorch computes Odd: its class may override forward" in remarks[1]
        assert "OwnStyle does not do what ColwiseParallel does" in remarks[1]
        assert result["counters"]["linears"] == 1, "the stock linear after the odd one"


# ---------------------------------------------------------------- uses


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)

    def forward(self, x: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.a(x).float() + self.b(x).float()


def nested_autocast(local: bool) -> Record:
    torch.manual_seed(0)
    gather = PrepareModuleInput(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=local
    )
    model = parallelize_module(
        Autocast(), mesh(), {"": gather, "a": ColwiseParallel(), "b": ColwiseParallel()}
    )
    x = draw(3, WIDTH, seed=dist.get_rank()).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach() * 1.0, "x": copy_full(x.grad), **seen(model)}


@pytest.mark.parametrize(
    ("local", "schedule", "unused"), [(False, "bulk", 0), (False, "chunk", 2), (True, "bulk", 0)]
)
def test_autocast_inside_of_a_gathered_module(ranks, local, schedule, unused):
    for result in ranks(2)(both, nested_autocast, local, options={"schedule": schedule}):
        equal([result["stock"]], [result["patched"]], floor=2e-2)
        assert result["counters"]["unused"] == unused, "computed early"


def accumulated(kind: str) -> Record:
    """Train three microbatches; weights may have hooks, or main gradients."""
    model = made()
    fired: list[str] = []
    if kind == "hooks":
        model.up.weight.register_post_accumulate_grad_hook(lambda p: fired.append("up"))
        model.down.weight.register_hook(lambda g: fired.append("down"))
    if kind == "main_grad" and type(model.up) is not nn.Linear:
        for linear in (model.up, model.down):
            linear.weight.main_grad = torch.zeros_like(
                linear.weight._local_tensor, dtype=torch.float32
            )
    for micro in range(3):
        model(
            draw(3, WIDTH, seed=10 * micro + dist.get_rank(), dtype=torch.float64)
        ).square().sum().backward()
    record = seen(model)
    if kind == "main_grad" and type(model.up) is not nn.Linear:
        for name, linear in {"up": model.up, "down": model.down}.items():
            assert linear.weight.grad is None
            grad = DTensor.from_local(
                linear.weight.main_grad.double(), mesh(), linear.weight.placements
            )
            record["grad"][f"{name}.weight"] = arms.part(grad)
            record["layout"][f"{name}.weight"] = None
    return {**record, "fired": fired}


@pytest.mark.parametrize("kind", ["plain", "hooks", "main_grad"])
def test_gradient_accumulation_fusion(ranks, kind):
    for result in ranks(2)(both, accumulated, kind, options={"gradient_accumulation_fusion": True}):
        floor = 1e-11
        if kind == "main_grad":
            floor = 1e-5
            result["stock"]["layout"], result["patched"]["layout"] = {}, {}
        equal([result["stock"]], [result["patched"]], floor=floor)
        assert len(result["patched"]["fired"]) == (6 if kind == "hooks" else 0)


def failing_backward() -> list[Record]:
    """Let the third of five backwards raise halfway; return the records of the remaining steps."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no more memory")

    model = made()
    optimizer = adamw(model)
    records = []
    for number in range(5):
        x = draw(3, WIDTH, seed=number, dtype=torch.float64)
        h = torch.nn.functional.gelu(model.up(x))
        try:
            model.down(Stop.apply(h) if number == 2 else h).square().sum().backward()
        except ValueError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        records.append(seen(model))
        optimizer.zero_grad()
    return records


def within_func() -> Record:
    """Call a model through torch.func, which uses the path of stock PyTorch."""
    model = made()
    x = draw(3, WIDTH, seed=dist.get_rank(), dtype=torch.float64)
    with torch.no_grad():
        y = model(x)
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {"y": y * 1.0, "functional": torch.func.functional_call(model, params, (x,)) * 1.0}


def test_a_backward_that_raises_functional_calls_and_no_grad(ranks):
    check_same(ranks(2), {failing_backward: {}, within_func: {}})


# ---------------------------------------------------------------- two dimensions


def two_dimensions(kind: str) -> list[Record]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    both_ways = mesh(2, 2, names=("dp", "tp"))
    model: nn.Module = parallel_llama(Llama(layers=1).double(), both_ways["tp"])
    if kind == "fsdp2":
        for layer in model.layers:
            fully_shard(layer, mesh=both_ways["dp"])
        fully_shard(model, mesh=both_ways["dp"])
        wrapped = model
    else:
        wrapped = DDP(model, device_mesh=both_ways["dp"])

    def run(number: int) -> tuple[Tensor, dict[str, Any]]:
        generator = torch.Generator().manual_seed(10 * number + both_ways["dp"].get_local_rank())
        given = torch.randint(48, (2, 12), generator=generator)
        return torch.nn.functional.cross_entropy(wrapped(given).flatten(0, 1), given.flatten()), {}

    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.01, foreach=False)
    records = []
    for number in range(2):
        loss, _ = run(number)
        loss.backward()
        optimizer.step()
        records.append({"loss": copy_full(loss), **seen(wrapped)})
        optimizer.zero_grad()
    return records


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_two_dimensional_meshes(ranks, kind):
    for result in ranks(4)(both, two_dimensions, kind):
        equal(result["stock"], result["patched"])
        counted = result["counters"]
        assert (counted["calls"], counted["shared_calls"], counted["stock_calls"]) == (16, 10, 0)


def order_of_gradients(*features: str) -> list[str]:
    """Return the names of parameters and of the first layer's output in the order of their gradients."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    meshes = mesh(2, dist.get_world_size() // 2, names=("dp", "tp"))
    model = parallel_llama(Llama(layers=2), meshes["tp"])
    options = {"dist_optimizer": {"min_param_numel": 1}} if "dist_optimizer" in features else {}
    # Gathers of few parameters each are in flight when the first linears run.
    with ovpatch.applied(*features, options=options) if features else contextlib.nullcontext():
        wrapped = DDP(model, device_mesh=meshes["dp"], bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
        found: list[str] = []
        for name, param in wrapped.module.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))

        def watch_output(_module: nn.Module, _args: Any, output: Tensor) -> None:
            output.register_hook(lambda _: found.append("output of the first layer"))

        wrapped.module.layers[0].register_forward_hook(watch_output)
        given = torch.arange(24).view(2, 12)

        def train() -> None:
            found.clear()
            wrapped(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            train()
        order = list(found)
    # Without the features the nodes have their age again.
    train()
    assert found[0] == "output of the first layer"
    return order


def orders_of_gradients(*features: str) -> tuple[list[str], list[str]]:
    with mock.patch("ovpatch_plugins.dist_optimizer.param_all_gather._MIN_BUCKET_BYTES", 2000):
        return order_of_gradients(), order_of_gradients(*features)


@pytest.mark.parametrize("features", [("tp_linear", "ddp"), ("tp_linear", "ddp", "dist_optimizer")])
def test_gradients_under_ddp_arrive_while_backward_computes(ranks, features):
    for stock, ours in ranks(4)(orders_of_gradients, *features):
        assert sorted(stock) == sorted(ours)
        split = ours.index("output of the first layer")
        late = {name for name in ours[split:] if name.startswith("layers.1.")}
        # The gradients of norms, and of biases that are added to sums, are themselves sums over ranks.
        assert late == {
            "layers.1.attention.out.bias",
            "layers.1.mlp.w2.bias",
            *(f"layers.1.norm{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")),
        }
        # The old nodes of DTensors run last.
        assert stock[0] == "output of the first layer"


def reads_of_a_weight_under_ddp(shares: bool, when: str) -> list[Tensor]:
    """Return the gradients of a weight's DTensor that a hook, ``retain_grad()`` and ``autograd.grad`` see.

    Args:
        shares: Whether the linear shares a gather with others.
        when: Whether the hook and ``retain_grad()`` come before or after the forward.
    """
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    meshes = mesh(2, dist.get_world_size() // 2, names=("dp", "tp"))
    wrapped = DDP(parallel_llama(Llama(layers=1), meshes["tp"]), device_mesh=meshes["dp"])
    given = torch.arange(24).view(2, 12)
    # The first forward makes the DTensors.
    wrapped(given).mean().backward()
    layer = wrapped.module.layers[0]
    read = [(layer.attention.q if shares else layer.mlp.w2).weight, layer.norm1.weight]
    grads: list[Tensor] = []
    loss = wrapped(given).mean() if when == "after" else None
    for weight in read:
        weight.register_hook(grads.append)
        weight.retain_grad()
    (wrapped(given).mean() if loss is None else loss).backward()
    grads += [weight.grad for weight in read]
    with wrapped.no_sync():
        grads += torch.autograd.grad(wrapped(given).mean(), read)
    return [grad.full_tensor() for grad in grads]


def reads_in_both_arms(cases: Any) -> Any:
    both_features = functools.partial(ovpatch.applied, "tp_linear", "ddp")
    return all_both(reads_of_a_weight_under_ddp, cases, apply=both_features)


def test_reads_of_a_weight_under_ddp_get_what_stock_pytorch_gives(ranks):
    cases = table(shares=[True, False], when=["before", "after"])
    for results in ranks(4)(reads_in_both_arms, cases):
        for result in results.values():
            compare(result["stock"], result["patched"]).assert_equal()


class Branches(nn.Module):
    """Norms in parallel branches, which ranks run in different orders, as a loop over a set of names does."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in "abc"})
        self.head = nn.Linear(WIDTH, WIDTH)
        self.order = "abc"

    def forward(self, x: Tensor) -> Tensor:
        outs = {name: self.norms[name](x) for name in self.order}
        result: Tensor = self.head(outs["a"] + 2 * outs["b"].square() + 3 * outs["c"].tanh())
        return result


def train_branches() -> list[Record]:
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    meshes = mesh(2, dist.get_world_size() // 2, names=("dp", "tp"))
    plan = {f"norms.{name}": SequenceParallel(sequence_dim=0) for name in "abc"}
    plan |= {"head": ColwiseParallel(input_layouts=CUT)}
    model = parallelize_module(Branches().double(), meshes["tp"], plan)
    model.order = ("abc", "cab")[meshes["tp"].get_local_rank()]
    wrapped = DDP(model, device_mesh=meshes["dp"])
    params = dict(model.named_parameters())
    records = []
    for number in range(3):
        x = draw(4, WIDTH, seed=10 * number + dist.get_rank(), dtype=torch.float64)
        wrapped(x).square().mean().backward()
        records.append({name: param.grad.clone() for name, param in params.items()})
        for param in params.values():
            param.grad = None
    return records


def branches_in_both_arms() -> tuple[list[Record], list[Record]]:
    stock = train_branches()
    with ovpatch.applied("tp_linear", "ddp"):
        return stock, train_branches()


def test_ranks_of_tensor_parallelism_may_run_norms_in_different_orders(ranks):
    for stock, ours in ranks(4)(branches_in_both_arms):
        compare(stock, ours).assert_equal()
