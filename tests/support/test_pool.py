"""The pool itself: the state that a case starts in, the values that it may return, and reports of all failures."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support import wire
from tests.support.failures import RankFailure
from tests.support.pool import Pool
from tests.support.scripts import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failing():
    """A separate pool for cases that fail, which soon ends the remaining ranks."""
    pool = Pool(grace=0.5)
    yield pool
    pool.close()


def failure(pool, world, function, *args, **kwargs):
    with pytest.raises(RankFailure) as caught:
        pool(world)(function, *args, **kwargs)
    return caught.value


# ---- what a case finds and returns


def _sum_of_ranks(start, *, factor=1):
    total = torch.tensor([start + factor * dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_by_rank(ranks, world):
    results = ranks(world)(_sum_of_ranks, 5, factor=2)
    assert results == [
        (rank, torch.tensor([5 * world + world * (world - 1)])) for rank in range(world)
    ]


def _count_and_remark():
    """Return the report of a feature as the case finds it, and leave something there."""
    from ovpatch_plugins.dist_optimizer import dist_optimizer_report as report

    found = report.COUNTERS.steps, report.list_remarks()
    report.COUNTERS.steps += 1
    report.remark("a remark of the case")
    report.note_unmanaged("SGD")
    return found


def test_counters_and_remarks_start_over_in_each_case(ranks):
    assert ranks(1)(_count_and_remark) == ranks(1)(_count_and_remark) == [(0, [])]


def _measure_long():
    """Return whether the case may measure for as long as a process, and spend that time."""
    from ovpatch.overlap.kernels.autotuner import BUDGET

    found = BUDGET.seconds_left()
    BUDGET._spent += BUDGET.seconds
    return found == BUDGET.seconds


def test_each_case_may_measure_as_long_as_a_process(ranks):
    assert ranks(1)(_measure_long) == ranks(1)(_measure_long) == [True]


def _pid():
    return os.getpid()


def test_workers_live_as_long_as_the_session(ranks):
    assert ranks(2)(_pid) == ranks(3)(_pid)[:2]


@dataclasses.dataclass
class Result:
    tensor: torch.Tensor
    text: str


def _echo(value):
    return {
        "value": value,
        "own": Result(torch.arange(6.0)[2:4], "hi"),
        "none": None,
        "bf16": torch.ones(()).bfloat16(),
    }


def test_tensors_travel_by_value(ranks):
    sent = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
        "strings": ("a", 1.5),
    }
    (result,) = ranks(1)(_echo, sent)
    assert type(result["value"]["parameter"]) is torch.Tensor
    assert torch.equal(result["value"]["parameter"], torch.ones(2))
    assert result["value"]["sparse"].layout is torch.sparse_coo
    assert result["value"]["strings"] == ("a", 1.5)
    assert result["own"].tensor.untyped_storage().nbytes() == 8, (
        "the whole buffer of a view travelled"
    )
    assert torch.equal(result["own"].tensor, torch.tensor([2.0, 3.0]))
    assert (result["none"], result["bf16"].dtype) == (None, torch.bfloat16)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(8.0).view(2, 4)[:, 1:3],
        torch.ones(1, dtype=torch.int16).expand(2, 3),
        torch.zeros(0, 3, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch._neg_view(torch.ones(2)),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
    ids=[
        "turned",
        "cut out",
        "expanded",
        "empty",
        "bool",
        "scalar",
        "conjugate",
        "negative",
        "float8",
    ],
)
def test_tensors_keep_their_type_and_layout(tensor):
    copied, found = tensor.clone(), wire.loads(wire.dumps(tensor))
    assert (found.dtype, found.shape, found.stride()) == (
        tensor.dtype,
        tensor.shape,
        copied.stride(),
    )
    assert str(found) == str(tensor), "the values"
    assert found.untyped_storage().nbytes() == copied.untyped_storage().nbytes()
    # Its memory is its own.
    found.zero_()
    assert tensor.numel() == 0 or str(found) != str(tensor)


def _environment():
    return dict(os.environ)


def test_environment_of_a_case(ranks, monkeypatch):
    monkeypatch.setenv("OVPATCH_DDP", "0")
    monkeypatch.setenv("SET_IN_PYTEST", "1")
    seen = ranks(2)(_environment, env={"CASE_VARIABLE": "x", "OMP_NUM_THREADS": None})
    places = [
        [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
        for environment in seen
    ]
    assert places == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert seen[0]["CASE_VARIABLE"] == "x"
    assert not {"OVPATCH_DDP", "SET_IN_PYTEST", "OMP_NUM_THREADS"} & set(seen[0])
    after = ranks(2)(_environment)[0]
    assert "CASE_VARIABLE" not in after
    assert after["OMP_NUM_THREADS"] == "1"


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl():
    pool = Pool(share_gpu=True)
    try:
        seen = pool(2)(_environment, env={"NCCL_IB_DISABLE": None}, backend=None)
    finally:
        pool.close()
    assert [environment["NCCL_HOSTID"] for environment in seen] == ["rank 0", "rank 1"]
    assert seen[0]["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert "NCCL_IB_DISABLE" not in seen[0]


def test_ranks_on_gpus_have_run_the_same_cases(failing):
    two = [worker.pid for worker in failing._ready(2, same_history=True)]
    assert [worker.pid for worker in failing._ready(1, same_history=False)] == two[:1]
    assert [worker.pid for worker in failing._ready(2, same_history=True)] == two
    assert not set(two) & {worker.pid for worker in failing._ready(3, same_history=True)}


def _draw_and_disturb():
    state = (
        torch.rand(1).item(),
        random.random(),
        numpy.random.rand(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "1"
    return state


_KEPT: list[dist.ProcessGroup] = []


def _keep_groups(count: int) -> int:
    _KEPT.extend(dist.new_group([0]) for _ in range(count))
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_that_keep_many_groups_are_replaced(failing):
    (first,) = failing(1)(_keep_groups, 3)
    (second,) = failing(1)(_keep_groups, 9)
    (third,) = failing(1)(_keep_groups, 0)
    assert first == second != third


def _use_meshes(count: int) -> int:
    for number in range(count):
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=(f"a{number}", "b"))
        rows = distribute_tensor(torch.ones(2, 2), mesh["b"], [Shard(0)])
        rows.redistribute(mesh["b"], [Replicate()])
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_meshes_that_torch_caches_are_dropped(failing):
    (first,) = failing(1)(_use_meshes, 6)
    (second,) = failing(1)(_keep_groups, 0)
    assert first == second


def test_every_case_starts_fresh(ranks):
    first, second = ranks(2)(_draw_and_disturb), ranks(2)(_draw_and_disturb)
    assert first == second
    assert first[0] == first[1]
    assert first[0][3:] == (torch.float32, torch.device("cpu"), True, 1, False)
    assert "LEFT_BEHIND" not in ranks(2)(_environment)[0]


class Watched(torch.nn.Sequential):
    pass


def watched_by_backward_hooks() -> int:
    """Leave models that take several passes of the collector; return how many an earlier case has left."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = sum(type(value) is Watched for value in gc.get_objects())
    model: torch.nn.Module = torch.nn.Linear(2, 2)
    for _ in range(8):
        model = Watched(model)
    with CommDebugMode():
        model(torch.ones(2, 2, requires_grad=True)).sum().backward()
    return found


def test_no_case_finds_the_models_of_an_earlier_one(ranks):
    for _ in range(3):
        assert ranks(2)(watched_by_backward_hooks) == [0, 0]


def _skip():
    pytest.skip("not here")


def test_a_case_may_skip(ranks):
    with pytest.raises(pytest.skip.Exception, match="not here"):
        ranks(2)(_skip)
    assert ranks(2)(_sum_of_ranks, 0)


def test_only_module_level_functions_are_sent(ranks):
    def local():
        pass

    for function in (local, lambda: None):
        with pytest.raises(TypeError, match="move it to module level"):
            ranks(1)(function)


# ---- failures


def _fail_on_one(rank):
    print("printed before")
    if dist.get_rank() == rank:
        raise KeyError("lost")


def test_an_exception_names_the_rank_and_shows_traceback_and_output(failing):
    error = failure(failing, 3, _fail_on_one, 1)
    text = str(error)
    assert text.splitlines()[0] == "rank 1 of 3: KeyError: 'lost'"
    assert error.ranks == (1,)
    assert "in _fail_on_one" in text
    assert "rank 0: finished" in text
    assert text.count("printed before") == 3
    assert "[Gloo]" not in text


def _print(text):
    print(text)


def test_output_of_earlier_cases_is_not_shown(failing):
    failing(1)(_print, "an earlier case")
    text = str(failure(failing, 1, _fail_on_one, 0))
    assert "printed before" in text
    assert "an earlier case" not in text


def _fail_differently():
    if dist.get_rank() == 0:
        time.sleep(0.2)
        raise ValueError("mine is zero")
    raise OSError("mine is one")


def test_all_failures_are_shown_the_earliest_first(failing):
    text = str(failure(failing, 2, _fail_differently))
    assert (
        text.splitlines()[0]
        == "rank 1 of 2: OSError: mine is one; rank 0 of 2: ValueError: mine is zero"
    )
    assert text.count("in _fail_differently") == 2


def _fail_while_the_other_waits():
    if dist.get_rank() == 0:
        raise ValueError("first")
    dist.barrier()


def test_the_rank_that_waits_for_the_failed_one_is_shown(failing):
    started = time.monotonic()
    error = failure(failing, 2, _fail_while_the_other_waits)
    assert time.monotonic() - started < 55, "the pool waited for the timeout"
    assert error.ranks == (0,)
    assert "rank 1: was still running" in str(error)
    assert "in _fail_while_the_other_waits" in str(error).split("rank 1: was still running")[1]


def _bare_assertion():
    left, right = 3, 4
    assert left == right


def test_a_bare_assertion_shows_the_variables(failing):
    text = str(failure(failing, 1, _bare_assertion))
    assert "where left = 3" in text
    assert "where right = 4" in text


def _hang_in_python():
    print("about to hang")
    _sleep_here() if dist.get_rank() == 0 else _wait_in_a_collective()


def _sleep_here():
    time.sleep(1000)


def _wait_in_a_collective():
    dist.all_reduce(torch.ones(1))


def test_a_hang_shows_the_stacks_of_all_ranks(failing):
    failing(2)(_pid)
    error = failure(failing, 2, _hang_in_python, timeout=1)
    head, zero, one = (
        str(error).split("-------- rank ")[0:1] + str(error).split("; its stacks:")[1:]
    )
    assert head.splitlines()[0] == "rank 0, 1 of 2 did not finish within 1 s"
    assert "in _sleep_here" in zero
    assert "in _wait_in_a_collective" in one
    assert "worker.py" not in zero + one
    assert str(error).count("about to hang") == 2
    assert error.ranks == (0, 1)


def _die(how):
    if dist.get_rank() == 1:
        how_to_die[how]()
    time.sleep(1000)


how_to_die = {
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "ended by itself with exit code 3"),
        ("kill", "died by SIGKILL"),
        ("crash", "died by SIGSEGV"),
    ],
)
def test_a_dying_worker_is_reported(failing, how, said):
    error = failure(failing, 2, _die, how)
    assert str(error).splitlines()[0] == f"rank 1 of 2: {said}"
    assert "rank 0: was still running" in str(error)
    if how == "crash":
        assert "Segmentation fault" in str(error)
        assert "in _die" in str(error).split("rank 0:")[0]


def _leave_by_exit():
    sys.exit("enough")


@pytest.mark.parametrize(
    ("function", "args"),
    [(_fail_on_one, (0,)), (_hang_in_python, ()), (_die, ("kill",))],
    ids=["raise", "hang", "die"],
)
def test_the_pool_works_again_after_a_failure(failing, function, args):
    before = failing(2)(_pid)
    failure(failing, 2, function, *args, timeout=1)
    after = failing(2)(_pid)
    assert not set(before) & set(after)
    assert failing(2)(_sum_of_ranks, 0) == [(rank, torch.tensor([1])) for rank in range(2)]
    assert not any(_runs(pid) for pid in before)


def _start_a_child(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(folder, "child").write_text(str(child.pid))
    raise ValueError("with a child")


def test_children_of_a_failed_case_are_killed(failing, tmp_path):
    failure(failing, 1, _start_a_child, str(tmp_path))
    assert until(lambda: not _runs(int((tmp_path / "child").read_text())))


def _return_a_generator():
    return (x for x in "ab")


def _fail_to_import():
    import no_such_module  # noqa: F401


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_return_a_generator, "TypeError: cannot pickle 'generator'"),
        (_fail_to_import, "ModuleNotFoundError: No module named 'no_such_module'"),
        (_leave_by_exit, "SystemExit: enough"),
    ],
)
def test_what_ends_a_case_is_a_failure_of_its_rank(failing, function, said):
    assert str(failure(failing, 1, function)).startswith(f"rank 0 of 1: {said}")


# ---- nothing stays patched


def _patched(self, *args):
    return None


def _leave_patched(what):
    if what == "method":
        DistributedDataParallel.forward = _patched
    elif what == "inherited":
        DistributedDataParallel.__call__ = _patched
    elif what == "removed":
        del DistributedDataParallel.no_sync
    elif what == "function":
        dist.all_reduce = _patched
    else:
        register_optimizer_step_pre_hook(_patched)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "method",
            "DistributedDataParallel.forward was "
            "torch.nn.parallel.distributed.DistributedDataParallel.forward",
        ),
        (
            "inherited",
            "DistributedDataParallel.__call__ was added: tests.support.test_pool._patched",
        ),
        ("removed", "DistributedDataParallel.no_sync was removed"),
        (
            "function",
            "torch.distributed.all_reduce was torch.distributed.distributed_c10d.all_reduce and is "
            "now",
        ),
        ("hook", "_global_optimizer_pre_hooks"),
    ],
)
def test_a_case_that_leaves_a_patch_fails(failing, what, says):
    text = str(failure(failing, 2, _leave_patched, what))
    assert re.match(r"rank \d of 2: AssertionError: the case leaves torch patched: ", text)
    assert says in text


# ---- the end of pytest

HANG = """
import os, sys, time
from pathlib import Path
from tests.support.pool import Pool

def hang(folder):
    Path(folder, f"{os.environ['RANK']}.tmp").write_text(str(os.getpid()))
    Path(folder, f"{os.environ['RANK']}.tmp").rename(Path(folder, f"{os.environ['RANK']}.pid"))
    time.sleep(1000)

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import hang_forever
    Pool()(2)(hang_forever.hang, sys.argv[1], timeout=1000)
"""


def test_workers_die_with_pytest(tmp_path):
    script = tmp_path / "hang_forever.py"
    script.write_text(HANG)
    program = subprocess.Popen(
        [sys.executable, script, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    try:
        assert until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
        workers = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
        assert all(map(_runs, workers))
    finally:
        program.kill()
        program.wait()
    assert until(lambda: not any(map(_runs, workers)))


def _runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


class _Owner:
    pass


_IN_OVPATCH = """
import threading, weakref
lock = getattr(threading, kind)()
def take():
    with lock:
        pass
owner = make()
weakref.finalize(owner, take)
del owner
"""


def _lock_in_a_finalizer(kind):
    exec(_IN_OVPATCH, {"__name__": "ovpatch.pretended", "kind": kind, "make": _Owner})


@pytest.mark.parametrize("kind", ["Condition", "Lock", "RLock"])
def test_a_finalizer_that_takes_a_lock_fails(failing, kind):
    text = str(failure(failing, 1, _lock_in_a_finalizer, kind))
    assert "AssertionError: a finalizer takes a lock, which may hang:" in text
    assert "in take" in text
