"""Whole programs in the styles people write, unmodified: patched they compute and save the same as stock."""

from __future__ import annotations

import json

import pytest

from tests.scripts.arms import PROGRAMS, Arm, assert_applied, assert_same, feature, together
from tests.support import scripts
from tests.support.environment import free_port
from tests.support.equality import compare
from tests.support.rarely import RARELY

pytestmark = pytest.mark.slow


def ports(count):
    return [str(free_port()) for _ in range(count)]


# --- the plain loop: AdamW, scheduler, clipping, batch norm, checkpoint on rank 0 ---


@pytest.fixture(scope="module")
def plain(runner):
    return runner.both("plain")


def test_a_plain_loop(plain, compatibility):
    stock, patched = plain
    assert len(stock.ranks[0]["losses"]) == 8
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=8)
    compatibility("plain loop", patched, compared="losses, norms, parameters, checkpoints")


@RARELY
def test_checkpoints_resume_the_other_way_round_and_on_two_nodes(runner, plain):
    stock, patched = plain
    out = runner.folder / "resumed-patched"
    job = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]

    def run_node(number):
        line, node = [str(out), f"--resume={stock.out}/epoch1.pt"], [*job, f"--node-rank={number}"]
        return scripts.torchrun(
            1, PROGRAMS / "plain.py", *line, node=node, ovpatch=True, timeout=240
        ).check()

    resumed, *nodes = together(
        lambda: runner.torchrun(
            "plain.py", f"--resume={patched.out}/epoch1.pt", patched=False, to="resumed-stock"
        ),
        lambda: run_node(0),
        lambda: run_node(1),
    )
    assert_continues(resumed, stock)
    assert_same(resumed, Arm(out, nodes[0], None))
    # Each node has an `ovpatch run` of its own, which reports the ranks of that node.
    for node in nodes:
        # The first backward reduces one bucket, and each later one reduces two.
        assert "ddp: 1 model, 3 of 7 buckets reduced during backward" in node.stderr, node.stderr


@RARELY
def test_a_worker_that_dies_is_started_again(runner, plain, compatibility):
    again = runner.torchrun(
        "plain.py",
        "--crash",
        patched=True,
        to="again",
        launcher=["--max-restarts=1", "--monitor-interval=0.1"],
        # With the launcher's shared store a rank may find its peers' addresses of the first attempt, also under stock.
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert_continues(again, plain[0])
    assert_applied(again.report, models=1, backwards=4)
    assert {(one["rank"], one["restart"]) for one in again.report["processes"]} >= {
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    }
    compatibility(
        "plain loop, a rank killed and torchrun starting all again",
        again,
        compared="losses, checkpoint",
    )


def assert_continues(arm, whole):
    """It began with the second epoch, and from there on is the run that was never interrupted."""
    assert [rank["first_epoch"] for rank in arm.ranks] == [1, 1]
    for name in ("losses", "norms"):
        assert [rank[name] for rank in arm.ranks] == [rank[name][4:] for rank in whole.ranks]
    assert [rank["parameters"] for rank in arm.ranks] == [
        rank["parameters"] for rank in whole.ranks
    ]
    compare(whole.checkpoints["epoch2"], arm.checkpoints["epoch2"]).assert_bitwise()


# --- other styles ---


@RARELY
def test_nanogpt_style(runner, compatibility):
    stock, patched = runner.both("nano")
    assert [len(rank["eval"]) for rank in stock.ranks] == [2, 0], "rank 0 evaluates alone"
    assert list(stock.checkpoints) == ["ckpt0", "ckpt2"]
    assert_same(stock, patched)
    assert_applied(patched.report, models=1, backwards=4)
    compatibility("nanoGPT", patched, compared="losses, norms, parameters, checkpoints")


@RARELY
def test_process_groups_made_again_and_backwards_that_fail_on_all_ranks(runner, compatibility):
    stock, patched = together(
        lambda: runner.torchrun("sweep.py", *ports(3), patched=False, to="sweep-stock"),
        lambda: runner.torchrun("sweep.py", *ports(3), patched=True, to="sweep-patched"),
    )
    skipped = [[], ["1: out of memory"], ["3: out of memory"]]
    assert [[trial["skipped"] for trial in rank] for rank in stock.ranks] == [skipped, skipped]
    assert_same(stock, patched)
    # The second failure is the group's last backward, after which nothing is left to be completed for.
    assert_applied(patched.report, models=3, backwards=10, recovered=1)
    compatibility("three trials, failed batches skipped", patched, compared="losses, parameters")


# --- mp.spawn ---


@RARELY
def test_spawned_ranks_with_three_process_groups(runner, compatibility):
    def start(patched, to):
        return runner.python(
            [str(PROGRAMS / "spawn.py"), str(runner.folder / to), *ports(3)], patched=patched, to=to
        )

    stock, patched = together(
        lambda: start(False, "spawn-stock"), lambda: start(True, "spawn-patched")
    )
    assert_same(stock, patched)
    assert_applied(patched.report, models=3, backwards=9)
    compatibility("mp.spawn, three process groups", patched, compared="losses, parameters")


def test_apply_under_main_does_not_reach_spawned_ranks_and_the_report_shows_it(runner):
    above = "    out, ports, world_size"  # the first line under `if __name__ == "__main__"`
    first, found, rest = (PROGRAMS / "spawn.py").read_text().partition(above)
    assert found
    assert rest.count("sys.argv[2:5], 2\n") == 1
    rest = rest.replace("sys.argv[2:5], 2\n", "sys.argv[2:5], 1\n")  # one rank will do
    program = runner.folder / "main.py"
    program.write_text(f"{first}    import ovpatch\n    ovpatch.apply()\n{found}{rest}")
    alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # nothing but that line patches
    main = runner.python(
        [str(program), str(runner.folder / "main"), *ports(3)], patched=True, to="main", env=alone
    )
    assert len(json.loads((main.out / "rank0.json").read_text())) == 3, "it trained, as stock"
    (parent,) = feature(main.report)["processes"]
    assert not any(parent["counters"].values())
    assert any("not called" in remark for remark in feature(main.report)["remarks"]), main.report
