"""Some of torch's own tests, among them those that failed patched once; python -m tests.torch_suite runs all."""

from __future__ import annotations

import pytest

from tests.torch_suite import on_cpu
from tests.torch_suite.__main__ import outcome, worse
from tests.torch_suite.exceptions import REASONS
from tests.torch_suite.suite import names

ONES = [
    ("test_static_graph_api_cpu", "as it is"),
    ("test_ddp_create_graph", "as it is"),
    ("test_ddp_buffer_hook_allreduce_return_future", "cpu"),
    ("test_ddp_control_flow_same_across_ranks", "cpu"),
    ("test_ddp_multiple_nested_unused_params_error", "cpu"),
    ("test_ddp_unused_params_rebuild_buckets_exception", "cpu"),
    ("test_detect_ddp_is_actually_static", "cpu"),
    ("test_skip_all_reduce_unused_parameters", "cpu"),
    ("test_ddp_shared_grad_acc_unused_params", "cpu"),
]


@pytest.mark.parametrize(("name", "device"), ONES)
def test_passes_patched(ranks, name, device):
    for arm in ("ddp", "ddp,dist_optimizer"):
        result = outcome(ranks, name, device, arm, timeout=40)
        assert result["outcome"] == "passed", result["why"]


def test_the_names_are_of_tests_that_are_run():
    known = set(names())
    assert len(known) > 80
    assert {name for name, _device in ONES} <= known
    assert {name.split()[0] for name in REASONS} <= known


def test_the_device_becomes_the_cpu():
    source = (
        "import torch\n"
        "@skip_if_lt_x_gpu(2)\n"
        "@kept\n"
        "def test(self):\n"
        "    torch.cuda.set_device(0)\n"
        "    x = torch.ones(2, device=0).cuda(1).to(self.rank).to('cuda:1').to(torch.float64)\n"
        "    return DDP(x, device_ids=[0], output_device=0), torch.device('cuda:0'), "
        "torch.device('meta')\n"
    )
    space: dict[str, object] = {
        "kept": lambda function: function,
        "DDP": lambda x, **places: (x, places),
    }
    exec(compile(on_cpu.rewritten(source, "source"), "source", "exec"), space)
    self = type("Self", (), {"rank": 1})()
    (x, places), first, second = space["test"](self)  # type: ignore[operator]
    assert (x.device.type, str(x.dtype)) == ("cpu", "torch.float64")
    assert places == {"device_ids": None, "output_device": None}
    assert (first.type, second.type) == ("cpu", "meta")


def test_what_passes_stock_alone_is_found():
    passed, failed = {"outcome": "passed"}, {"outcome": "failed"}
    results = {
        "a": {"stock": passed, "ddp": failed},
        "b": {"stock": failed},
        "c": {"stock": passed, "ddp": passed},
    }
    assert worse(results) == [("a", "ddp")]
