"""The order of runs, the results made of them, and the reports of failures; the runs themselves are made up."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ovpatch.cli import main
from ovpatch.exit_codes import ExitCode
from ovpatch.insight import steps, variants
from ovpatch.insight.bench import rounds
from tests.support.environment import forget
from tests.support.golden import check_golden

MS = {"fsdp2": 8.5, "stock": 10.0, "patched": 8.0, "without-a": 9.0, "without-b": 8.0}


class Machine:
    """A replacement of ``insight.variants.run_variant``: a run has two ranks and takes the milliseconds of its kind."""

    def __init__(self):
        self.ran: list[variants.Variant] = []
        self.counters = {"ddp": 3}
        # The identity of the job that each process reports when it signs in.
        self.identity = {}
        # Changes to the file that a rank leaves.
        self.rank = {}
        # Changes to the outcome of a variant, by its name.
        self.ends = {}
        self.steps = 10
        self.again = 0

    def run(self, variant, command, worker, out, *, timeout, progress):
        assert (command, worker) == (["true"], rounds.WORKER)
        self.ran.append(variant)
        folder, log = out / variant.name, out / f"{variant.name}.log"
        folder.mkdir()
        log.write_text("first line\nlast line\n")
        for rank in range(2):
            if variant.name == rounds.FACTS:
                (folder / f"facts-{rank}.json").write_text(json.dumps(self.facts(rank)))
            else:
                (folder / f"bench-{rank}.json").write_text(json.dumps(self.left(variant, rank)))
            (folder / f"beat-{rank}").write_text("8")
            identity = {"pid": rank, "rank": str(rank), **self.identity}
            (folder / f"process-{rank}.json").write_text(json.dumps(identity))
        if variant.patched:
            (folder / "worker-1-1.json").write_text(json.dumps(self.report()))
        progress(8)
        return replace(
            variants.Outcome(variant, folder, log, 0, 1.0), **self.ends.get(variant.name, {})
        )

    def facts(self, rank):
        """Return the file of a rank for predictions: two ranks on one host, a bucket of 1 MB."""
        ring = {"size": 2, "bytes": 1_000_000, "large_ms": 1.5, "small_ms": 0.5, "shard_ms": 1.5}
        return {
            **{"rank": rank, "world": 2, "restart": 0, "steps": 20, "host": "a", "backend": "nccl"},
            **{
                "forward_ms": 2.0,
                "backward_ms": 4.0,
                "exposed_ms": 1.0,
                "optimizer_ms": 0.0,
                "buckets": [1_000_000],
            },
            "rings": {"within": ring},
            **self.rank,
        }

    def left(self, variant, rank):
        counting = {
            "by_dtype": {"bfloat16": 4e9, "float32": 1e6},
            "again": self.again,
            "reason": "",
        }
        ms = MS[variant.name.removesuffix("-uncounted").rpartition("-")[0]]
        return {
            "rank": rank,
            "world": 2,
            "restart": 0,
            "torch": "2.13.0",
            "has_fsdp2": variant.variables.get("ACCELERATE_USE_FSDP") == "true",
            "device": "NVIDIA H200",
            "clock_mhz": 1980,
            "steps": self.steps + variant.details["warmup"],
            "clock": "device events",
            "ms": [ms + rank] * self.steps,
            "host_ms": [1.0] * self.steps,
            "memory": {"allocated": 2**30 * (rank + 1), "reserved": 2**32},
            "batch": {
                "samples": 4.0,
                "tokens": 64.0,
                "calls": 2.0,
                "module": "DistributedDataParallel",
            },
            "flops": counting if variant.details["count_flops"] else None,
            **self.rank,
        }

    def report(self):
        def feature(name, count):
            rest = {
                "remarks": ["a remark"],
                "options": {},
                "distribution": "d",
                "requires": [],
                "reorders_products": False,
                "work": [],
            }
            return {
                "name": name,
                "state": "applied",
                "reason": "",
                "counters": {"done": count},
                **rest,
            }

        return {
            **{"version": "1", "torch": "2", "python": "3", "pid": 1, "rank": 0, "patches": []},
            "features": [feature(name, count) for name, count in self.counters.items()],
        }


@pytest.fixture
def machine(monkeypatch):
    forget(monkeypatch)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    machine = Machine()
    monkeypatch.setattr(variants, "run_variant", machine.run)
    return machine


@pytest.fixture
def bench(machine, tmp_path, capsys):
    def bench(*arguments):
        file = tmp_path / "found.json"
        code = main.main(["bench", "--steps", "10", "--json", str(file), *arguments, "--", "true"])
        return code, capsys.readouterr(), json.loads(file.read_text()) if file.exists() else None

    return bench


def names(machine):
    return [variant.name for variant in machine.ran]


def test_the_order_within_pairs_alternates(machine, bench):
    code, texts, found = bench("--rounds", "3")
    assert code == 0
    assert names(machine) == [
        "stock-1",
        "patched-1",
        "patched-2",
        "stock-2",
        "stock-3",
        "patched-3",
    ]
    assert [variant.details["count_flops"] for variant in machine.ran] == [True] + [False] * 5
    assert found["judgement"]["pairs"] == [pytest.approx(11 / 9)] * 3  # the slower rank counts
    assert (
        "ovpatch bench: 1.222x faster (pairs 1.222 to 1.222; more than 0.0% counts, " in texts.out
    )
    assert "Only ddp did something, so its part is the whole ratio." in texts.out
    assert "round 2/3, patched: 9 ms a step" in texts.err


def test_rates_are_those_of_all_ranks_and_of_one_device(bench):
    _, texts, found = bench("--rounds", "2")
    stock, patched = found["rows"]
    assert stock["tokens_per_second"] == pytest.approx(2 * 64 / 11e-3)
    assert stock["samples_per_second"] == pytest.approx(2 * 4 / 11e-3)
    assert patched["tflops"] == pytest.approx(
        4.001e9 / 9e-3 / 1e12
    )  # counted stock, the same program
    assert patched["mfu"] == pytest.approx(4.001e9 / 9e-3 / 989.4e12)
    assert stock["memory"] == {"allocated": 2**31, "reserved": 2**32}
    assert "1980 MHz" in texts.out
    _, _, given = bench(
        "--rounds", "1", "--tokens-per-step", "11", "--samples-per-step", "22", "--peak-tflops", "1"
    )
    assert given["rows"][0]["tokens_per_second"] == pytest.approx(1000)
    assert given["rows"][0]["samples_per_second"] == pytest.approx(2000)
    assert given["rows"][0]["mfu"] == pytest.approx(4.001e9 / 11e-3 / 1e12)


def test_what_cannot_be_told_is_not_shown_but_said(machine, bench):
    machine.rank = {
        "batch": {"samples": None, "tokens": None, "calls": 0, "module": ""},
        "flops": {"by_dtype": {}, "reason": "the script compiles"},
    }
    _, texts, found = bench("--rounds", "1")
    assert (
        found["rows"][0]["tokens_per_second"]
        is found["rows"][0]["tflops"]
        is found["rows"][0]["mfu"]
        is None
    )
    assert "TFLOP/s are unknown: the script compiles" in texts.out
    assert "give --samples-per-step or --tokens-per-step" in texts.out
    assert not {"| tokens/s", "| TFLOP/s", "| MFU"} & set(texts.out.splitlines()[2].split(" |"))


@pytest.mark.parametrize("is_gpu", [True, False])
def test_clocks_and_mfu_are_those_of_gpus(machine, bench, is_gpu):
    if not is_gpu:
        machine.rank = {"device": "cpu", "clock_mhz": None, "clock": "host clock"}
    out = bench("--rounds", "1")[1].out
    assert ("device clocks are left as they are" in out) == ("MFU" in out) == is_gpu
    assert "TFLOP/s" in out


def test_a_peer_runs_in_each_round_by_the_switch_of_the_users_library(machine, bench, monkeypatch):
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    code, texts, found = bench("--rounds", "2", "--against", "fsdp2")
    assert code == 0
    assert names(machine) == ["stock-1", "patched-1", "fsdp2-1", "fsdp2-2", "patched-2", "stock-2"]
    peer = {variant.name: variant for variant in machine.ran}["fsdp2-1"]
    assert not peer.patched
    assert peer.variables == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, (
        "the user's policy wins"
    )
    assert found["against"]["fsdp2"]["ratio"] == pytest.approx(9.5 / 9)
    assert "Against fsdp2: patched is 1.056x faster" in texts.out
    assert [row["kind"] for row in found["rows"]] == ["stock", "patched", "fsdp2"]
    # The load of this machine is not part of the report that is compared.
    check_golden("bench-fsdp2", re.sub("- the host was busy.*\n", "", texts.out))


def test_a_script_without_the_switch_of_a_peer_is_told(machine, bench):
    machine.rank = {"has_fsdp2": False}
    code, texts, _ = bench("--against", "fsdp2")
    assert (code, names(machine)[-1]) == (3, "fsdp2-1")
    assert "--against fsdp2: no model was sharded" in texts.err
    assert "HF Trainer and accelerate, on GPUs" in texts.err


def test_features_are_left_out_where_there_are_several(machine, bench):
    machine.counters = {"a": 1, "b": 2, "idle": 0}
    _, texts, found = bench("--rounds", "2")
    assert names(machine) == [
        *("stock-1", "patched-1", "without-a-1", "without-b-1"),
        *("without-b-2", "without-a-2", "patched-2", "stock-2"),
    ]
    assert {variant.name: dict(variant.variables) for variant in machine.ran}["without-b-2"] == {
        "OVPATCH_B": "0"
    }
    assert found["parts"]["a"]["ratio"] == pytest.approx(10 / 9)
    assert "a: 1.111x faster" in texts.out
    assert "b: no difference beyond noise" in texts.out


def test_leaving_out_can_be_turned_off(machine, bench):
    machine.counters = {"a": 1, "b": 2}
    _, texts, _ = bench("--rounds", "1", "--no-leave-one-out")
    assert names(machine) == ["stock-1", "patched-1"]
    assert "--leave-one-out shows" in texts.out


def test_features_go_to_the_patched_runs(machine, bench):
    bench("--rounds", "1", "--features=-ddp")
    assert [variant.features for variant in machine.ran] == ["0", "-ddp"]


def test_where_no_counter_moves_nothing_more_is_run(machine, bench):
    machine.counters = {"ddp": 0}
    code, texts, found = bench("--rounds", "3")
    assert (code, names(machine)) == (0, ["stock-1", "patched-1"])
    assert found["verdict"] == "no feature did any work: both runs are the same program"
    assert f"ovpatch bench: {found['verdict']}" in texts.out
    assert "ddp: applied (a remark)" in texts.out


def test_a_prediction_has_a_stock_run_before_all_others(machine, bench, tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "steps.svg"
    code, texts, found = bench(
        *("--rounds", "1", "--what-if", "hosts=4,gpus=2,link=8Gbit", "--figure", str(figure))
    )
    assert code == 0, texts.err
    assert names(machine) == ["facts", "stock-1", "patched-1"]
    assert machine.ran[0].features == variants.STOCK
    rows = [(row["hosts"], row["gpus"]) for row in found["what_if"]["rows"]]
    assert rows == [(1, 1), (1, 2), (2, 2), (4, 2)]
    # The slower rank takes 11 ms, of which 1 ms is exposed: the only bucket, 1 ms and two messages of 0.25 ms.
    errors = found["what_if"]["errors"]
    assert errors["stock"] == {"predicted_ms": pytest.approx(11.5), "measured_ms": 11.0}
    assert errors["ddp"] == {"predicted_ms": pytest.approx(11.5), "measured_ms": 9.0}
    assert "Predicted step by number of GPUs" in texts.out
    assert "measured 9 ms, +27.8%" in texts.out
    assert figure.exists()


@pytest.mark.parametrize(
    ("question", "complaint", "ran"),
    [
        ("hosts=two", "hosts=two is no integer", []),
        # The rate of the link is known to be missing after the first run.
        ("hosts=2", "Add for example link=200Gbit", ["facts"]),
    ],
)
def test_a_prediction_that_is_not_possible_is_an_error_before_the_rounds(
    machine, bench, question, complaint, ran
):
    code, texts, found = bench("--what-if", question)
    assert (code, found) == (ExitCode.USAGE, None)
    assert complaint in texts.err
    assert names(machine) == ran


def test_a_figure_needs_a_prediction(machine, bench):
    code, texts, _ = bench("--figure", "steps.svg")
    assert code == ExitCode.USAGE
    assert "Give --what-if" in texts.err


def test_a_prediction_needs_all_ranks(machine, bench):
    machine.rank = {"world": 3}
    code, texts, _ = bench("--what-if", "hosts=2,link=1Gbit")
    assert code == ExitCode.UNDECIDED
    assert "facts: 2 ranks took 20 steps, and the prediction needs all ranks" in texts.err


def test_a_patched_run_that_fails(machine, bench):
    machine.ends = {"patched-2": {"code": 7}}
    code, texts, found = bench()
    assert (code, found, texts.out) == (1, None, "")
    assert "last line" in texts.err
    assert "patched-2: the command failed with exit code 7. The stock run did not." in texts.err


def test_a_stock_run_that_fails_is_the_scripts_own_failure(machine, bench):
    machine.ends = {"stock-1": {"code": 7}}
    code, texts, _ = bench("--warmup", "20")
    assert (code, names(machine)) == (3, ["stock-1"])
    assert "exit code 7. This is the stock run, so ovpatch is not the cause." in texts.err


def test_a_run_that_fails_while_it_is_counted_is_run_again_without(machine, bench):
    machine.ends = {"stock-1": {"code": 1}}
    code, texts, found = bench("--warmup", "10", "--rounds", "1")  # its last step was the eighth
    assert (code, names(machine)) == (0, ["stock-1", "stock-1-uncounted", "patched-1"])
    assert found["rows"][0]["tflops"] is None
    assert "TFLOP/s are unknown: the script failed while its operations were counted" in texts.out


def test_a_hang_shows_the_stacks(machine, bench):
    machine.ends = {
        "patched-1": {"code": 1, "timed_out": True, "stacks": {42: "in wait_for_nobody"}}
    }
    code, texts, _ = bench("--timeout", "5")
    assert code == 1
    assert "process 42\nin wait_for_nobody" in texts.err
    assert "no process took a step for 5 s" in texts.err


@pytest.mark.parametrize("run", ["stock-1", "patched-1"])
def test_a_process_that_waits_in_the_tool_blames_neither_the_script_nor_ovpatch(
    machine, bench, run
):
    frame = f'Thread 0x1 (most recent call first):\n  File "{steps.__file__}", line 7 in exit_with_peers\n'
    machine.ends = {run: {"code": 1, "timed_out": True, "stacks": {42: frame}}}
    code, texts, _ = bench("--timeout", "5", "--warmup", "20")
    assert code == 3
    assert (
        f"{run}: process 42 waits in ovpatch's exit_with_peers(), so no step within 5 s is no hang"
        in texts.err
    )
    assert "The stock run did not" not in texts.err
    assert "This is the stock run" not in texts.err


def test_of_several_nodes_each_says_which_ranks_it_saw(machine, bench):
    machine.rank = {"world": 4}
    machine.identity = {"world_size": "4", "local_world_size": "2"}
    _, texts, _ = bench("--rounds", "1", "--nodes", "1")
    assert texts.out.count("- this node saw ranks 0 to 1 of 4") == 1
    assert "nothing is known of rank" not in texts.out


@pytest.mark.parametrize(("load", "said"), [(3.0, True), (1.0, False)])
def test_a_busy_host_is_noticed(bench, monkeypatch, load, said):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    _, texts, _ = bench("--rounds", "1")
    assert ("the host was busy before the first run: load 3.0 on 4 cores" in texts.out) == said


def test_an_interruption_concludes_nothing(machine, bench):
    machine.ends = {"stock-1": {"code": 143, "interrupted": True}}
    code, texts, _ = bench()
    assert (code, texts.out) == (130, "")


def test_one_round_says_what_it_cannot_know(bench, monkeypatch):
    _, texts, found = bench("--rounds", "1")
    assert found["judgement"]["verdict"] == "faster"
    assert (
        "(one pair of runs, 99% interval of the steps 1.222 to 1.222; how far two equal runs differ"
        in texts.out
    )
    monkeypatch.setitem(MS, "patched", 21.0)
    _, texts, _ = bench("--rounds", "1")
    # The interval is inverted as well.
    assert "2.000x slower (one pair of runs, 99% interval of the steps 2.000 to 2.000" in texts.out


@pytest.mark.parametrize(
    ("taken", "complaint"), [(14, "took 14 steps"), (0, "no process took a step")]
)
def test_too_few_steps_are_an_error_with_the_remedy(machine, bench, taken, complaint):
    machine.rank = {"steps": taken, "ms": [1.0] * 4, "host_ms": [1.0] * 4}
    code, texts, _ = bench("--warmup", "10")
    assert (code, names(machine)) == (3, ["stock-1"])
    assert complaint in texts.err
    assert ("Let it take 15 or more (better 20)" in texts.err) == (taken > 0)


def test_fewer_steps_than_asked_are_measured_and_said(machine, bench):
    machine.rank = {"steps": 16, "ms": [1.0] * 6}
    code, texts, found = bench("--rounds", "1")
    assert code == 0
    assert "stock-1: the script ended after 16 steps" in texts.out
    assert found["rows"][0]["ms"]["median"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--features", "0", "--", "x"], "nothing to compare"),
        (
            ["--json", "/no/such/file", "--", "x"],
            "--json /no/such/file: its directory does not exist",
        ),
        (["--out", "{full}", "--", "x"], "is not an empty directory"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    machine, tmp_path, capsys, arguments, complaint
):
    (tmp_path / "something").touch()
    arguments = [word.format(full=tmp_path) for word in arguments]
    assert main.main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert machine.ran == []


def test_on_a_terminal_progress_is_a_bar(bench, monkeypatch):
    from ovpatch.insight.bench import rounds

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(
        rounds, "Console", lambda stderr: Console(file=terminal, force_terminal=True, width=100)
    )
    monkeypatch.setattr("sys.stderr", terminal)
    code, _, _ = bench("--rounds", "2")
    assert code == 0
    assert "round 2/2, stock: step 8/20" in terminal.getvalue()
    assert "round 1/2, patched: 9 ms a step, worst 9" in terminal.getvalue()


@pytest.mark.parametrize(
    "option", [["--steps", "4"], ["--warmup", "2"], ["--rounds", "0"], ["--peak-tflops", "-1"]]
)
def test_numbers_have_limits(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", *option, "--", "x"])
    assert ended.value.code == 2


def test_logs_are_kept_where_asked(machine, bench, tmp_path):
    bench("--rounds", "1", "--out", str(tmp_path / "kept" / "here"))
    kept = {path.name for path in (tmp_path / "kept" / "here").iterdir()}
    assert kept == {"stock-1", "stock-1.log", "patched-1", "patched-1.log"}


def test_mfu_is_without_what_is_computed_again(machine, bench):
    _, texts, found = bench("--rounds", "1")
    machine.again = 1.0e9
    _, again, less = bench("--rounds", "1")
    (before, _), (after, _) = found["rows"], less["rows"]
    assert after["tflops"] == before["tflops"]
    assert after["mfu"] == pytest.approx(before["mfu"] * 3.001 / 4.001)
    assert "computes again" in again.out
    assert "computes again" not in texts.out


@pytest.fixture
def leave(tmp_path):
    def leave(pid, **change):
        full = Machine().left(
            variants.Variant("stock-1", details={"warmup": 3, "count_flops": False}), 0
        )
        (tmp_path / f"bench-{pid}.json").write_text(json.dumps({**full, **change}))

    return leave


def test_a_restart_with_fewer_ranks_leaves_the_others_out(leave, tmp_path):
    for rank in range(3):
        leave(rank, rank=rank, world=3, ms=[90.0], steps=99)
    leave(9, rank=0, world=1, restart=1, ms=[1.0])
    found = rounds.read_measured(tmp_path)
    assert (found.times, found.world, found.samples, found.missing) == ([1.0], 1, 4.0, [])


def test_a_rank_that_left_nothing_is_named_and_samples_are_not_told(machine, bench):
    machine.rank = {"world": 4}
    code, texts, found = bench("--rounds", "1")
    assert code == 0
    assert "stock-1: nothing is known of rank 2, 3" in texts.out
    assert (found["samples"], found["tokens"]) == (None, None)


def test_files_of_ranks_are_put_together(leave, tmp_path):
    leave(1, rank=0, restart=0, steps=99)
    leave(2, rank=0, restart=1, steps=5, ms=[5.0, 1.0], clock="host clock", host_ms=[50.0, 10.0])
    leave(3, rank=1, restart=1, steps=6, ms=[1.0, 7.0, 3.0], host_ms=[10.0, 70.0, 30.0])
    found = rounds.read_measured(tmp_path)
    assert (found.taken, found.clock, found.times) == (
        5,
        "host clock",
        [50.0, 70.0],
    )  # events and clock do not mix
    assert (found.samples, found.tokens) == (8.0, 128.0)
    assert rounds.read_measured(Path(tmp_path / "none")) == rounds.Measured()
