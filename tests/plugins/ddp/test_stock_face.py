"""Methods of the reducer and the logger that torch's wrapper and scripts call: results and errors of stock PyTorch."""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel import distributed

import ovpatch
from tests.plugins.ddp.arms import all_both, both, data, seen, stock_and_patched, table
from tests.plugins.ddp.checks import check_cases
from tests.support.equality import compare

# The attributes that torch/nn/parallel/distributed.py reads of the reducer and the logger. attributes_read_of() found
# them in the sources of the wheels 2.11.0, 2.12.1, 2.13.0 and 2.14.1, which do not differ. 2.15.0 reads three more.
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
READ_SINCE_2_15 = {
    "_finalize_backward_manual",
    "_set_manual_finalization_required",
    "_should_finalize_after_backward",
}
READ = {
    "reducer": """
        _autograd_hook _check_reducer_finalized _delay_all_reduce _get_local_used_map _get_zeros_like_grad_buckets
        _install_post_backward_futures _push_all_rebuilt_params _rebuild_buckets _remove_autograd_hooks _reset_state
        _run_comm_hook _set_ddp_runtime_logging_sample_rate _set_forward_pass_work_handle
        _set_mixed_precision_param_dtype _set_optimizer_in_backward _set_sparse_metadata _set_static_graph
        _update_process_group prepare_for_backward prepare_for_forward set_logger
    """,
    "logger": """
        _get_ddp_logging_data _set_comm_hook_name _set_static_graph _set_uneven_input_join
        set_construction_data_and_log set_error_and_log set_runtime_stats_and_log
    """,
}
# The attributes that torch.distributed.algorithms.ddp_comm_hooks and torch.distributed.pipelining read. torch._dynamo
# and torch.distributed.optim read none.
READ_ELSEWHERE = {"_run_allreduce_hook", "prepare_for_backward"}
ELSEWHERE = ("distributed/algorithms", "distributed/pipelining", "distributed/optim", "_dynamo")


def attributes_read_of(owner: str, source: str) -> set[str]:
    """Return the attributes that a source reads of an attribute ``owner``, or of a variable of that name."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            base = node.value
            # A variable "logger" is the module's own log, of the module logging.
            is_variable = isinstance(base, ast.Name) and owner != "logger"
            if getattr(base, "id" if is_variable else "attr", "") == owner:
                names.add(node.attr)
    return names


def test_the_reducer_and_the_logger_have_all_attributes_that_the_wrapper_of_torch_reads():
    from ovpatch_plugins.ddp.reducer_stub import LoggerStub, ReducerStub

    ours = {"reducer": ReducerStub, "logger": LoggerStub}
    for owner, names in READ.items():
        installed = attributes_read_of(owner, inspect.getsource(distributed))
        later = READ_SINCE_2_15 if owner == "reducer" else set()
        if torch.__version__.startswith(VERSIONS):
            expected = set(names.split()) | (later if hasattr(DDP, "finalize_backward") else set())
            assert installed == expected, "the table above is right for the installed version"
        assert {
            name
            for name in installed | set(names.split()) | later
            if not hasattr(ours[owner], name)
        } == set()
    for cls, mine in ((dist.Reducer, ReducerStub), (dist.Logger, LoggerStub)):
        assert {
            name
            for name in vars(cls)
            if not name.startswith(("__", "_pybind")) and not hasattr(mine, name)
        } == set()


def test_the_reducer_has_all_attributes_that_other_modules_of_torch_read():
    from ovpatch_plugins.ddp.reducer_stub import ReducerStub

    root = Path(torch.__file__).parent
    files = [file for folder in ELSEWHERE for file in sorted((root / folder).rglob("*.py"))]
    texts = [text for file in files if "reducer." in (text := file.read_text(encoding="utf-8"))]
    found = {name for text in texts for name in attributes_read_of("reducer", text)}
    if torch.__version__.startswith(VERSIONS):
        assert found == READ_ELSEWHERE
    assert {name for name in found | READ_ELSEWHERE if not hasattr(ReducerStub, name)} == set()


def test_an_attribute_of_a_later_torch_is_an_error_with_a_remedy():
    from ovpatch_plugins.ddp.reducer_stub import CppStub

    with pytest.raises(AttributeError, match=r"^ovpatch: .* new_method .*OVPATCH_DDP=0\.$"):
        CppStub().new_method()


def test_a_method_of_the_stock_reducer_alone_is_an_error_with_a_remedy(ranks):
    for text in ranks(2)(calling_the_c_reducer):
        assert text.startswith("ovpatch: _run_comm_hook() ")
        assert "register_comm_hook" in text


def calling_the_c_reducer() -> str:
    with ovpatch.applied("ddp"):
        wrapped = DDP(nn.Linear(2, 2))
        with pytest.raises(RuntimeError) as caught:
            wrapped.reducer._run_comm_hook(None)
        return str(caught.value)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((4,), float(dist.get_rank())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def buffer_hook_loop(where: Any, ddp: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a buffer hook that returns futures, for which the backward waits at its end."""
    torch.manual_seed(0)
    model = Buffered()
    wrapped = DDP(model, **ddp)
    waited: list[str] = []

    def hook(_state: Any, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
        return [work.get_future().then(lambda _done: waited.append("waited")) for work in works]

    wrapped._register_buffer_comm_hook(None, hook, comm_hook_location=where)
    records = []
    for step in range(3):
        wrapped(data(step, 2, 4)).sum().backward()
        records.append(seen(model, mean=model.mean.clone(), waited=list(waited)))
        wrapped.zero_grad()
    return records


@pytest.mark.parametrize("world", [2, 3])
def test_a_backward_waits_at_its_end_for_futures_of_a_buffer_hook(ranks, world):
    ddp = [{}, {"static_graph": True}, {"find_unused_parameters": True}]
    cases = table(where=list(distributed._BufferCommHookLocation), ddp=ddp)
    for result in check_cases(ranks(world), buffer_hook_loop, cases, backwards=3):
        for case in result.values():
            assert [len(record["waited"]) for record in case["patched"]] == [1, 2, 3]


def finalizing_loop(required: list[bool], ddp: dict[str, Any]) -> list[dict[str, Any]]:
    """Finalize some backwards as a script, as torch 2.15 allows, and the last one on a copy of the model."""
    torch.manual_seed(0)
    wrapped = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **ddp)
    records = []
    for step, manual in enumerate(required):
        wrapped.require_manual_backward_finalization = manual
        model = copy.deepcopy(wrapped) if step == len(required) - 1 else wrapped
        model(data(step, 2, 4)).sum().backward()
        if manual:
            model.finalize_backward()
        records.append(seen(model.module))
        wrapped.zero_grad()
    return records


@pytest.mark.skipif(
    not hasattr(DDP, "finalize_backward"), reason="torch before 2.15 finalizes each backward itself"
)
@pytest.mark.parametrize("world", [2, 3])
def test_backwards_that_the_script_finalizes(ranks, world):
    required = [[True, True], [False, True, False, True], [False, False, True]]
    cases = table(required=required, ddp=[{}, {"find_unused_parameters": True}])
    for result in ranks(world)(all_both, finalizing_loop, cases):
        for name, case in result.items():
            compared = compare(case["stock"], case["patched"])
            # The stock reducer of the patched arm is made later, so on three ranks it has other buckets.
            compared.assert_bitwise() if world == 2 else compared.assert_equal()
            assert case["counters"]["stock_models"] >= 1, name
            assert case["counters"]["backwards"] == name.count("False") - name.count(
                "True, False"
            ), name


class Fork(nn.Module):
    """A model that uses its second layer or leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both_layers: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both_layers else x


def failing(used: list[bool], level: str, ddp: dict[str, Any]) -> dict[str, Any]:
    """Train until a step fails; return the error and the data of the logger."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    wrapped = DDP(Fork(), **ddp)
    error = ""
    try:
        for step, both_layers in enumerate(used):
            wrapped(data(step, 2, 4), both_layers).sum().backward()
    except RuntimeError as raised:
        error = str(raised)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    logged = wrapped._get_ddp_logging_data()
    return {
        "error": error,
        **{name: logged.get(name) for name in ("has_error", "error")},
        "logged": logged,
    }


ERRORS = [
    ([False, False], {}, "find_unused_parameters=True to"),
    ([True, True, False, False], {}, "find_unused_parameters=True to"),
    ([True, True, False, False], {"static_graph": True}, "leave static_graph=True out"),
    ([False, False, True], {"static_graph": True}, "leave static_graph=True out"),
]


def lines(text: str) -> list[list[str]]:
    """Return the words of each line, with sorted names, because the stock reducer keeps them in a hash table."""
    words = [line.replace(",", "").split() for line in text.splitlines()]
    return [sorted(line) if line[:1] == ["Parameters"] else line for line in words]


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
@pytest.mark.parametrize(("used", "ddp", "remedy"), ERRORS)
def test_errors_have_the_text_of_stock_pytorch_and_the_remedy_and_reach_the_logger(
    ranks, used, ddp, remedy, level
):
    for stock, patched in ranks(2)(stock_and_patched, failing, used, level, ddp):
        first = lines(stock["error"])
        assert first
        assert lines(patched["error"])[: len(first)] == first
        assert (
            "\novpatch: parameter" in patched["error"]
            or "\novpatch: these parameters" in patched["error"]
        )
        assert "second." in patched["error"]
        assert "first.weight" not in patched["error"]
        assert remedy in patched["error"]
        assert patched["logged"]["error"] == patched["error"]
        assert patched["has_error"] == stock["has_error"]


def first_loss_of_parameters() -> str:
    """Return the error of the forward after a first loss that has no output of the model."""
    wrapped = DDP(Fork(), static_graph=True)
    wrapped(data(0, 2, 4), True)
    loss_of_parameters(wrapped).backward()
    try:
        wrapped(data(1, 2, 4), True)
    except RuntimeError as raised:
        return str(raised)
    return ""


def loss_of_parameters(model: nn.Module) -> torch.Tensor:
    return torch.stack([param.square().sum() for param in model.parameters()]).sum()


def test_a_static_graph_whose_first_loss_has_no_output_is_an_error_that_says_so(ranks):
    for stock, patched in ranks(2)(stock_and_patched, first_loss_of_parameters):
        assert not stock, "stock PyTorch leaves the gradients local, see ddp-reference.md"
        assert "\novpatch: the first backward has passed no output of the model;" in patched
        assert patched.endswith("leave static_graph=True out.")


SAMPLED = {
    "iteration",
    "prev_iteration_grad_ready_order_indices",
    "unused_parameter_size",
}


def logged(ddp: dict[str, Any], dtype: torch.dtype, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    wrapped = DDP(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40).to(dtype)), **ddp)
    for step in range(steps):
        wrapped(data(step, 2, 40)).sum().backward()
    return dict(wrapped._get_ddp_logging_data())


@pytest.mark.parametrize(
    ("ddp", "dtype", "steps"),
    [
        ({"bucket_cap_mb": 0.001}, torch.float32, 4),
        ({"find_unused_parameters": True}, torch.float32, 4),
        ({"static_graph": True}, torch.float32, 4),
        ({}, torch.float64, 0),
        ({}, torch.bfloat16, 0),
        ({}, torch.float32, 13),
    ],
)
def test_the_logging_data_has_the_fields_of_stock_pytorch_without_those_of_sampled_steps(
    ranks, ddp, dtype, steps
):
    for stock, patched in ranks(2)(stock_and_patched, logged, ddp, dtype, steps):
        sampled = {name for name in stock if "_time" in name} | SAMPLED
        assert set(stock) - sampled <= set(patched)
        assert not sampled & set(patched)
        same = set(stock) - sampled
        assert {name: patched[name] for name in same} == {name: stock[name] for name in same}
        if not ddp.get("static_graph"):
            assert patched["can_set_static_graph"] == 1


def usage(uses: list[bool], ddp: dict[str, Any]) -> list[Any]:
    wrapped = DDP(Fork(), **ddp)
    records = []
    for step, both_layers in enumerate(uses):
        wrapped(data(step, 2, 4), both_layers and dist.get_rank() == 0).sum().backward()
        static = wrapped.reducer._ddp_graph_static()
        records.append({"map": wrapped.reducer._get_local_used_map().clone(), "static": static})
    return records


USES = [[True, False, True, True], [False, False, False], [True, True, True]]


@pytest.mark.parametrize(
    ("world", "uses", "skip"),
    [*((world, uses, False) for world in (2, 3) for uses in USES), (2, USES[1], True)],
)
def test_the_map_of_used_parameters_and_the_static_flag_equal_those_of_stock_pytorch(
    ranks, world, uses, skip
):
    ddp: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}
    if skip:
        ddp["skip_all_reduce_unused_params"] = True
    for result in ranks(world)(both, usage, uses, ddp):
        stock, patched = result["stock"], result["patched"]
        compare(
            [record["map"] for record in stock], [record["map"] for record in patched]
        ).assert_bitwise()
        assert [record["static"] for record in patched] == [record["static"] for record in stock]


def second_order() -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ovpatch.ddp").addHandler(handler)
    with ovpatch.applied("ddp"):
        from ovpatch_plugins.ddp.ddp_report import warn_of_create_graph

        warn_of_create_graph.cache_clear()
        wrapped = DDP(nn.Linear(2, 1))
        wrapped(data(0, 2, 2)).square().sum().backward()
        assert not texts
        for step in range(2):
            wrapped(data(step, 2, 2)).square().sum().backward(create_graph=True)
            wrapped.zero_grad()
    logging.getLogger("ovpatch.ddp").removeHandler(handler)
    return texts


def test_create_graph_is_warned_of_once(ranks):
    for texts in ranks(2)(second_order):
        assert len(texts) == 1
        assert texts[0].startswith(
            "Using DistributedDataParallel with create_graph=True is not well-supported"
        )


def distributed_autograd(folder: str, early: bool) -> list[Any]:
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc

    def start() -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
        rank = dist.get_rank()
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=dist.get_world_size(),
            rpc_backend_options=options,
        )

    with ovpatch.applied("ddp"):
        torch.manual_seed(0)
        if early:
            start()
        wrapped = DDP(nn.Linear(3, 2))
        if not early:
            wrapped(data(9, 2, 3)).sum().backward()
            wrapped.zero_grad()
            start()
        results = []
        for step in range(2):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [wrapped(data(step, 2, 3)).sum()])
                gradients = dist_autograd.get_gradients(context)
                results.append([gradients[param].clone() for param in wrapped.parameters()])
                results.append([param.grad for param in wrapped.parameters()])
        rpc.shutdown()
    sums = [data(step, 2, 3).sum(0).expand(2, 3).clone() for step in range(2)]
    for total in sums:
        dist.all_reduce(total)
    return [results, [total / dist.get_world_size() for total in sums]]


@pytest.mark.parametrize("early", [True, False])
def test_distributed_autograd_gets_the_averages(ranks, tmp_path, early):
    for results, means in ranks(2)(distributed_autograd, str(tmp_path), early):
        for step, mean in enumerate(means):
            torch.testing.assert_close(results[2 * step][0], mean)
            assert results[2 * step + 1] == [None, None]


def setting_sparse_metadata() -> list[str]:
    with ovpatch.applied("ddp"):
        wrapped = DDP(nn.Embedding(8, 2, sparse=True))
        kinds = [type(wrapped.reducer).__name__]
        wrapped._set_sparse_metadata({"module.weight": torch.arange(8)})
        return [*kinds, type(wrapped.reducer).__name__]


def test_sparse_metadata_brings_the_stock_reducer_back(ranks):
    assert ranks(2)(setting_sparse_metadata) == [["ReducerStub", "Reducer"]] * 2


def warnings_of_a_model():
    """Return the categories, places and messages of the warnings when a model is wrapped, copied and trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        deprecated = {"broadcast_buffers": True, "check_reduction": True}
        known = inspect.signature(DDP).parameters
        ddp = DDP(
            nn.Linear(2, 2), **{name: value for name, value in deprecated.items() if name in known}
        )
        copy.deepcopy(ddp.module)
        ddp(torch.ones(1, 2)).sum().backward()
    return [
        (warning.category.__name__, warning.filename, warning.lineno, str(warning.message))
        for warning in caught
    ]


def test_warnings_of_torch_name_the_line_of_the_script(ranks):
    for stock, patched in ranks(2)(stock_and_patched, warnings_of_a_model):
        assert stock, "torch warns of these arguments"
        assert {file for _, file, *_ in stock} == {__file__}
        assert patched == stock
