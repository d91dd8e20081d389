"""The patch manager patches names of ``megatron.core`` before and after its import, and reverts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.plugins.megatron.models import parallel, rows, transformer_config
from tests.scripts.arms import needs

pytestmark = needs("megatron")

ROOT = Path(__file__).resolve().parents[3]


HOME = "megatron.core.tensor_parallel"
FUNCTION = "reduce_scatter_to_sequence_parallel_region"
METHODS = [
    f"{kind}ParallelLinear.{method}"
    for kind in ("Column", "Row")
    for method in ("__init__", "forward")
]


def adaptor(imported: bool) -> None:
    """Patch as an adaptor in MindSpeed's style: wrap methods of the linears and replace a function."""
    if imported:
        import megatron.core  # noqa: F401

    from ovpatch import PatchManager

    calls: list[str] = []

    def wrap(name: str) -> Any:
        def wrapping(original: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return original(*args, **kwargs)

            return wrapped

        return wrapping

    def scatter(
        input_: Any,
        group: Any = None,
        input_split_sizes: Any = None,
        use_global_buffer: Any = False,
    ) -> Any:
        calls.append("scatter")
        return 3 * input_.chunk(group.size())[group.rank()]

    pm = PatchManager()
    for method in METHODS:
        pm.register_patch(f"{HOME}.layers.{method}", wrap=wrap(method))
    pm.register_patch(f"{HOME}.mappings.{FUNCTION}", scatter)
    pm.apply()
    assert {status.state.value for status in pm.statuses()} == (
        {"applied"} if imported else {"pending"}
    )

    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import layers, mappings

    modules, kinds = (
        (tensor_parallel, layers, mappings),
        (layers.ColumnParallelLinear, layers.RowParallelLinear),
    )
    assert {status.state.value for status in pm.statuses()} == {"applied"}
    assert len({id(getattr(module, FUNCTION)) for module in modules}) == 1, (
        "modules that imported the function by name must have the replacement, too"
    )
    with parallel(tp=dist.get_world_size()):
        config = transformer_config(
            tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=False
        )
        config.sequence_parallel = True
        given = {
            "config": config,
            "init_method": nn.init.ones_,
            "bias": False,
            "skip_bias_add": False,
        }
        column = layers.ColumnParallelLinear(16, 8, gather_output=False, **given)
        row = layers.RowParallelLinear(8, 16, input_is_parallel=True, **given)
        assert column.weight.eq(1).all(), "the weight must not keep earlier memory, such as zeros"
        assert row.weight.eq(1).all()
        x = rows(0, dist.get_rank()).view(2, 2, 16)
        out, _ = row(column(x)[0])
        assert calls == [METHODS[0], METHODS[2], METHODS[1], METHODS[3], "scatter"]
        pm.revert()
        again, _ = row(column(x)[0])
        assert len(calls) == 5
        assert not out.equal(again), "the replacement scales"
    left = [
        name
        for owner in (*modules, *kinds)
        for name, value in vars(owner).items()
        if hasattr(value, "__ovpatch__")
    ]
    assert left == []


def test_patches_of_an_adaptor_reach_all_callers_after_the_import_and_are_reverted(ranks):
    ranks(2)(adaptor, True)


ALONE = """
import sys
sys.path.insert(0, sys.argv[2])
import torch.distributed as dist
from tests.plugins.megatron.test_patches import adaptor
assert not [name for name in sys.modules if name.startswith("megatron")]
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
adaptor(False)
dist.destroy_process_group()
"""


def test_patches_of_an_adaptor_wait_for_the_import_and_are_reverted(tmp_path, forks):
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    forks.torchrun(1, program, str(tmp_path / "meet"), str(ROOT)).check()
