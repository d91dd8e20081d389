"""The cost of ``import torch`` and ``apply()`` for a script that uses no feature: processor time, and modules."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.support import patience
from tests.support.environment import clean
from tests.support.preloaded import preloaded

TIMED = """
import time
began = time.process_time()
import torch
imported = time.process_time()
import ovpatch
ovpatch.apply()
print((time.process_time() - imported) / (imported - began))
"""

LOADED = """
import sys
def show():
    print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("ovpatch", "ovpatch_plugins")))
import torch
show()
import ovpatch
assert ovpatch.report()["ddp"].state == "disabled"
for features in (("ddp",), ()):
    assert ovpatch.apply(*features)["ddp"].state == "applied"
    show()
"""

STEPPED = """
import os, sys, torch
folder, child = sys.argv[1], os.fork()  # two ranks, with one import of torch
rank = 0 if child else 1
import ovpatch
import torch.distributed as dist
ovpatch.apply("ddp")
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
with open(f"{folder}/{rank}", "w") as file:
    print(ovpatch.report()["ddp"].counters["backwards"], file=file)
    print(*(name for name in sys.modules if name.partition(".")[0] in ("ovpatch", "ovpatch_plugins")), file=file)
dist.barrier()
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

#: Modules that a model under ``ddp`` alone never needs.
UNNEEDED = (
    "ovpatch_plugins.dist_optimizer.",
    "ovpatch.overlap.peer_rpc",
    "ovpatch.overlap.kernels",
    "ovpatch.overlap.tensors.pending_param",
    "ovpatch.overlap.tensors.lazy_tensor",
)

IDLE = """
import sys, torch, torch.distributed as dist, torch.distributed.tensor.parallel, ovpatch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ovpatch.apply()
print(*(name for name in sys.modules if name.startswith("ovpatch_plugins.tp_linear.")))
dist.destroy_process_group()
"""

#: The share of the processor time of ``import torch``. Measured: 4%, and 9% without cached bytecode.
MAX_SHARE = 0.15


def output_of(program: str, *arguments: str) -> str:
    return output([sys.executable, "-c", program, *arguments])


def output(command: list[str]) -> str:
    done = subprocess.run(
        command, env=clean(os.environ), capture_output=True, text=True, timeout=patience.scale(120)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_of_ddp_imports_nothing_of_other_features(tmp_path):
    (tmp_path / "stepped.py").write_text(STEPPED)
    output([*preloaded(), str(tmp_path / "stepped.py"), str(tmp_path)])
    for rank in range(2):
        backwards, loaded = (tmp_path / str(rank)).read_text().splitlines()
        assert backwards == "2", "our reducer ran"
        assert "ovpatch.overlap.data_parallel.grad_sync" in loaded.split()
        unneeded = [name for name in loaded.split() if name.startswith(UNNEEDED)]
        # The entry point names these two.
        needed = {
            f"ovpatch_plugins.dist_optimizer.dist_optimizer_{part}"
            for part in ("feature", "options")
        }
        assert set(unneeded) <= needed


def test_applying_takes_a_small_part_of_what_importing_torch_takes():
    assert any(float(output_of(TIMED)) < MAX_SHARE for _ in range(3))


def test_nothing_is_imported_that_does_the_work_before_there_is_any():
    """Nothing while ovpatch is off; reducers, collectives, experts and linears wait for a model that needs them."""
    idle, *applied = (line.split() for line in output_of(LOADED).splitlines())
    assert idle == ["ovpatch", "ovpatch._version", "ovpatch.autoload"]
    light = re.compile(
        r"\w+_(feature|options|report)|options|report|takeover|ddp_attach|step_patches"
    )
    # Where a feature registers that it shards the gradients of models that are wrapped later.
    registry = {"ovpatch.overlap.data_parallel", "ovpatch.overlap.data_parallel.grad_sharder"}
    # Where options find the schedules and orders that they may name, and operators the counters of the report.
    names = ("", ".schedule_table", ".operator_counts")
    table = {f"ovpatch.overlap.tensor_parallel{name}" for name in names}
    for loaded, interface in zip(applied, (table, table | registry), strict=True):
        assert "ovpatch_plugins.ddp.ddp_feature" in loaded, "the feature is on"
        # The wrapper of destroy_process_group imports no torch, and looks whether there is work to end.
        interface = {
            *interface,
            "ovpatch.overlap.pipelining",
            "ovpatch.overlap.pipelining.group_end",
            "ovpatch.overlap.pipelining.order_table",
        }
        work = [
            name for name in loaded if name.startswith("ovpatch.overlap.") and name not in interface
        ]
        work += [
            name for name in loaded if name.count(".") > 1 and name.startswith("ovpatch_plugins.")
        ]
        work = [name for name in work if not light.fullmatch(name.rpartition(".")[2])]
        assert not work


def test_styles_that_are_imported_and_cut_nothing_bring_no_work_module(tmp_path):
    """Transformers imports them in every script."""
    (tmp_path / "idle.py").write_text(IDLE)
    found = output([*preloaded(), str(tmp_path / "idle.py")]).split()
    loaded = {name.removeprefix("ovpatch_plugins.tp_linear.") for name in found}
    assert "tp_linear_feature" in loaded, "the feature is on"
    assert loaded <= {"tp_linear_feature", "tp_linear_options", "tp_linear_report"}
