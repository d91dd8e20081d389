"""The commands of the documentation: each runs in a test, here or elsewhere, or has a reason against it.

All options in the documentation must exist.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import pytest

from ovpatch.cli import main
from tests.support import scripts
from tests.support.preloaded import preloaded
from tests.support.rarely import RARELY
from tests.test_docs import PAGES, ROOT, blocks, docstrings
from tools.run_commands import TRAIN, as_here, console_blocks

SMALL = "--layers=1 --width=32 --context=16 --batch-size=2 --device=cpu --steps=2"
TIMELINE = "tests/insight/test_timeline_command.py"
EXAMPLES = "tests/examples/test_"

#: Where a command runs: here, the test that runs its program or subcommand, or the reason why none does. Comments are
#: left out, and train.py has two ranks, as in tools/run_commands.py.
PLACES: dict[str, tuple[str, ...]] = {
    "here": (
        "ovpatch doctor",
        "ovpatch list",
        "ovpatch pipeline --what-if p=4,m=12,memory=1x/1.5x",
        "ovpatch run --report report.json -- torchrun --nproc-per-node 2 train.py",
        "ovpatch verify -- torchrun --nproc-per-node 2 train.py",
        "ovpatch verify --features ddp -- torchrun --nproc-per-node 2 train.py",
        "ovpatch verify --steps 3 --json verify.json -- torchrun --nproc-per-node 2 train.py --steps 5",
        "ovpatch verify --features recompute -- torchrun --nproc-per-node 2 train.py",
        "ovpatch verify --features=+dist_optimizer -- torchrun --nproc-per-node 2 train.py",
        "OVPATCH_DDP=0 torchrun --nproc-per-node 2 train.py",
        "OVPATCH=+recompute torchrun --nproc-per-node 2 train.py",
        "OVPATCH=+recompute OVPATCH_RECOMPUTE_GRANULARITY=selective torchrun --nproc-per-node 2 "
        "train.py",
    ),
    "here, sequentially": (
        "OVPATCH=0 torchrun --nproc-per-node 2 train.py > stock.txt",
        "OVPATCH=0 torchrun --nproc-per-node 2 train.py > stock-again.txt",
        "OVPATCH=1 torchrun --nproc-per-node 2 train.py > patched.txt",
        "diff stock.txt stock-again.txt && diff stock.txt patched.txt && echo same",
    ),
    "here, small": (
        "torchrun --nproc-per-node 2 examples/train_tp.py",
        "OVPATCH=0 torchrun --nproc-per-node 2 examples/train_tp.py",
        "OVPATCH=-tp_linear torchrun --nproc-per-node 2 examples/train_tp.py",
    ),
    "tests/test_run.py::test_torchrun_workers_of_an_unmodified_script_over_a_restart": (
        "ovpatch run -- torchrun --nproc-per-node 2 train.py",
        "ovpatch run -- torchrun --nproc-per-node 2 examples/train_tp.py",
        "OVPATCH=+dist_optimizer ovpatch run -- torchrun --nproc-per-node 2 train.py",
    ),
    "tests/insight/test_bench.py::test_a_script_on_two_ranks_is_measured": (
        "ovpatch bench -- torchrun --nproc-per-node 2 train.py",
        "ovpatch bench --what-if hosts=16,gpus=8,link=200Gbit --figure steps.svg -- "
        "torchrun --nproc-per-node 2 train.py",
    ),
    f"{TIMELINE}::test_a_whole_program_is_compared": (
        "ovpatch timeline --compare -- torchrun --nproc-per-node 2 train.py",
        "ovpatch timeline -- torchrun --nproc-per-node 2 train.py",
        "OVPATCH_PIPELINE_SCHEDULE=zb-h1 ovpatch timeline --compare --features pipeline -- "
        "torchrun --nproc-per-node 4 train.py",
    ),
    f"{TIMELINE}::test_traces_of_a_run": ("ovpatch timeline trace0.json trace1.json",),
    f"{TIMELINE}::test_two_folders_are_compared_and_may_lie_in_the_output_folder": (
        "ovpatch timeline --compare stock/ patched/",
    ),
    f"{EXAMPLES}train_gpt.py::test_losses_and_gradient_norms_are_bitwise_equal": (
        "torchrun --nproc-per-node 2 examples/train_gpt.py",
        "torchrun --nproc-per-node 2 examples/train_gpt.py --accumulate 4 --dtype bfloat16",
        "torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint gpt.pt",
        "ovpatch verify --steps 5 -- torchrun --nproc-per-node 2 examples/train_gpt.py --steps 20",
    ),
    f"{EXAMPLES}train_gpt.py::test_the_script_runs_alone_compiled_and_in_bfloat16": (
        "python examples/train_gpt.py --steps 20 --compile",
    ),
    f"{EXAMPLES}train_tp.py::test_verify_passes": (
        "ovpatch verify --features tp_linear -- torchrun --nproc-per-node 2 examples/train_tp.py",
        "torchrun --nproc-per-node 4 examples/train_tp.py --tp 2",
    ),
    f"{EXAMPLES}train_2d.py::test_all_features_train_the_same": (
        "torchrun --nproc-per-node 4 examples/train_2d.py",
        "OVPATCH=+dist_optimizer torchrun --nproc-per-node 4 examples/train_2d.py",
        "ovpatch verify --features ddp,dist_optimizer,tp_linear -- torchrun --nproc-per-node 4 "
        "examples/train_2d.py",
    ),
    f"{EXAMPLES}train_megatron.py::test_it_trains_to_stocks_bits": (
        "OVPATCH=+megatron torchrun --nproc-per-node 4 examples/train_megatron.py",
        "OVPATCH=0 torchrun --nproc-per-node 4 examples/train_megatron.py",
        "OVPATCH=+megatron torchrun --nproc-per-node 4 examples/train_megatron.py --pp 1",
        "ovpatch verify --features megatron -- torchrun --nproc-per-node 4 "
        "examples/train_megatron.py",
    ),
    f"{EXAMPLES}train_moe.py::test_it_trains_the_same": (
        "torchrun --nproc-per-node 2 examples/train_moe.py",
        "OVPATCH=0 torchrun --nproc-per-node 2 examples/train_moe.py",
        "OVPATCH=-pipe_experts torchrun --nproc-per-node 2 examples/train_moe.py",
        "torchrun --nproc-per-node 4 examples/train_moe.py --ep 2",
        "ovpatch verify --features pipe_experts -- torchrun --nproc-per-node 2 "
        "examples/train_moe.py",
    ),
    f"{EXAMPLES}pipeline_hf.py::test_losses_are_those_of_the_whole_model": (
        "torchrun --nproc-per-node 2 examples/pipeline_hf.py",
        "torchrun --nproc-per-node 2 examples/pipeline_hf.py --loop accelerate",
        "torchrun --nproc-per-node 4 examples/pipeline_hf.py --pipeline 2",
        "python examples/pipeline_hf.py --loop whole",
    ),
    f"{EXAMPLES}three_d.py::test_three_dimensions_train_to_stocks_bits": (
        "OVPATCH=+pipeline torchrun --nproc-per-node 8 examples/three_d.py",
        "ovpatch verify --features pipeline -- torchrun --nproc-per-node 8 examples/three_d.py",
    ),
    "tests/test_cli.py::test_the_plugin_template_installs_works_and_is_listed": (
        "pip install ./examples/plugin_template",
        "OVPATCH=clip_watch ovpatch run -- torchrun --nproc-per-node 2 train.py",
        "OVPATCH=-clip_watch ovpatch list",
        "ovpatch verify --features clip_watch -- torchrun --nproc-per-node 2 examples/train_gpt.py "
        "--steps 20",
    ),
    "tests/test_packaging.py::test_the_installed_wheel_imports_and_is_found_by_torch": (
        'pip install ".[plot]"',
    ),
    "tests/scripts/test_compatibility.py::test_only_tests_that_pass_have_rows": (
        "pytest tests/scripts --compatibility docs/compatibility.json",
    ),
    "tests/scripts/test_compatibility.py::test_the_page_is_up_to_date": (
        "python -m tests.scripts.compatibility",
    ),
    "tests/torch_suite/test_torch_suite.py::test_passes_patched": (
        "python -m tests.torch_suite --json results.json",
        "python -m tests.torch_suite --only static_graph join --variants ddp",
    ),
    "tests/test_benchmarks.py::test_one_rank_of_eight_is_measured_alone": (
        "python -m benchmarks.zero_alone --world 8 --size 3.8b",
    ),
    "needs several GPUs": (
        "docker run --gpus all -e OVPATCH_AUTO=1 image torchrun --nproc-per-node 2 train.py",
        "torchrun --nproc-per-node 2 -m benchmarks.megatron_step --linear",
        "torchrun --nproc-per-node 8 -m benchmarks.megatron_step --tp 2 --pp 4",
        "python -m benchmarks.suite",
        "python -m benchmarks.programs --quick --out benchmarks/results/programs.jsonl",
        'make test PYTEST_ARGS="-m gpu"',
        'make test PYTEST_ARGS="-m gpu --share-gpu --hard-limit 1500"',
    ),
    "installs packages from an index": (
        "pip install '.[megatron]'",
        "make setup",
        "make docs",
        "git clone URL ovpatch && cd ovpatch",
    ),
    "needs several hosts": (
        "ovpatch verify -- torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id 1 --rdzv-backend c10d "
        '--rdzv-endpoint "$HEAD:29500" train.py',
        'ovpatch run --report "report-$SLURM_JOB_ID.json" -- torchrun --nnodes "$SLURM_NNODES" '
        '--nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint '
        '"$HEAD:29500" train.py',
    ),
    "tests/test_cli.py::test_reports_of_nodes_are_merged": (
        "ovpatch report report-4711-0.json report-4711-1.json",
    ),
    "takes seven minutes": ("python -m benchmarks.programs --cpu-time",),
    "takes two minutes": (
        "make demo",
        "make demo DEMO_ARGS=--quick",
        'make demo DEMO_ARGS="--nproc 3 --steps 50"',
        "make demo DEMO_ARGS=--features=+dist_optimizer",
    ),
    "runs these tests": ("make test", "make lint"),
}
PLACE = {command: place for place, commands in PLACES.items() for command in commands}


def console() -> list[tuple[str, str]]:
    """Return each command with its page, as PLACES has it: of console blocks, and of files for CI and schedulers."""
    return [
        (page.relative_to(ROOT).as_posix(), as_here(re.sub(r"\s+#\s.*", "", command)))
        for page in PAGES
        for commands in [*console_blocks(page), *list_commands_of_files(page)]
        for command in commands
    ]


def list_commands_of_files(page: Path) -> Iterator[list[str]]:
    """Yield the commands of ovpatch and python in each block of bash and YAML."""
    for block in (text for language in ("bash", "yaml") for text in blocks(page, language)):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        # A shell of Slurm gets its command in quotes.
        yield [line.strip(" '") for line in lines if re.match(r"\s*(?:ovpatch|python3?) ", line)]


def test_every_command_has_a_place_and_no_other():
    found = console()
    missing = [f"{page}: {command}" for page, command in found if command not in PLACE]
    assert not missing, "name in PLACES what runs it"
    assert set(PLACE) == {command for _, command in found}
    assert sum(map(len, PLACES.values())) == len(PLACE), "a command is listed twice"


def test_every_block_says_what_it_is():
    """A command in a block of another kind would be left out here."""
    for page in PAGES:
        languages = re.findall(r"^```(.*)\n", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert set(languages) <= {
            "console",
            "text",
            "python",
            "bash",
            "diff",
            "toml",
            "yaml",
            "dockerfile",
        }, page


def test_tests_that_run_commands_are_there_and_every_example_runs():
    ran = set()
    for place, commands in PLACES.items():
        programs = {
            name for command in commands for name in re.findall(r"examples/(\w+)\.py", command)
        }
        if "::" in place:
            file, name = place.split("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            (test,) = [
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name == name
            ]
            rarely = "RARELY" in map(ast.unparse, test.decorator_list)
            ran |= set() if rarely else {program for program in programs if program in file}
        elif place.startswith("here"):
            ran |= programs
    assert ran == {path.stem for path in ROOT.glob("examples/*.py")} - {"callbacks", "demo"}, (
        "these two have no command"
    )


# --- run here ---

#: The console script of setup.cfg.
COMMAND = "import sys\nfrom ovpatch.cli.main import main\nsys.exit(main())\n"


@pytest.fixture
def run_here(tmp_path, forks):
    """Run a command as a reader would, with the tests' launcher in torchrun's place, which takes half as long."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run_here(command):
        line, _, output = command.partition(" > ")
        words = shlex.split(line)
        begin = next(index for index, word in enumerate(words) if not re.match("[A-Z_]+=", word))
        variables, words = dict(word.split("=", 1) for word in words[:begin]), words[begin:]
        if words[0] == "torchrun":
            _, _, ranks, script, *arguments = words
            done = forks.torchrun(
                int(ranks), tmp_path / script, *arguments, env=variables, timeout=240
            )
        elif words[0] == "ovpatch":
            launch = re.compile(r"torchrun --nproc-per-node (\d+)")
            program = launch.sub(
                lambda match: shlex.join(preloaded(int(match[1]))), shlex.join(words)
            )
            where = {"OVPATCH_CACHE_DIR": str(tmp_path)}
            # Such a command starts as users start it, with its own interpreter.
            alone = len(words) == 2
            start = (
                [sys.executable, "-m", "ovpatch"]
                if alone
                else [*preloaded(), tmp_path / "command.py"]
            )
            line = [*start, *shlex.split(program)[1:]]
            done = scripts.run(line, cwd=tmp_path, env=where | variables, timeout=240)
        else:
            done = scripts.run(["bash", "-c", command], cwd=tmp_path)
        assert done.check().stdout, command
        if output:
            (tmp_path / output).write_text(done.stdout)
        return done

    return run_here


#: The feature is on without being named, too.
LIKE_ANOTHER = "ovpatch verify --features ddp -- torchrun --nproc-per-node 2 train.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=RARELY) if command == LIKE_ANOTHER else command
        for command in PLACES["here"]
    ],
)
def test_a_command_runs(run_here, command):
    run_here(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", PLACES["here, small"])
def test_an_example_runs(run_here, command):
    run_here(f"{command} {SMALL}")


@pytest.mark.slow
def test_commands_run_sequentially(run_here):
    for command in PLACES["here, sequentially"]:
        run_here(command)


# --- outputs ---


def read_output(page: str, beginning: str) -> list[str]:
    """Return the lines of the output on a page that begins in this way, without the command before it."""
    (found,) = (text for text in fenced(ROOT / "docs" / page) if beginning in text)
    return [line for line in found.splitlines() if not line.startswith("$ ")]


def hide_numbers(lines: list[str]) -> list[str]:
    """Return lines without numbers, and without commands, which differ on each machine."""
    return [re.sub(r"\d[\d.,]*", "N", line.partition(" -- ")[0]) for line in lines]


@pytest.mark.slow
def test_the_report_on_its_page_is_that_of_today(run_here, tmp_path):
    (program,) = (
        text
        for text in blocks(ROOT / "docs" / "quick-start.md", "python")
        if "optimizer.step()" in text
    )
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run_here("COLUMNS=120 ovpatch run --full -- torchrun --nproc-per-node 2 train.py")
    printed = done.stderr.splitlines()
    *summary, following = read_output("quick-start.md", "ovpatch:  ")
    assert "\n".join(summary) in done.stderr
    assert following.partition(" -- ")[0] in {line.partition(" -- ")[0] for line in printed}
    rows = read_output("quick-start.md", "| ddp ")
    # The environment of these tests may have transformers.
    missing = [row for row in rows if row not in printed and not row.startswith("| pipe_experts")]
    assert not missing, done.stderr


@pytest.mark.slow
def test_the_output_of_verify_on_its_page_is_that_of_today(run_here):
    done = run_here(
        "ovpatch verify --steps 2 -- torchrun --nproc-per-node 2 examples/train_gpt.py --steps 3 "
        "--layers=1 --context=16 --batch-size=2 --device=cpu"
    )
    shown = read_output("verify.md", "SAME: all")
    assert hide_numbers(done.stdout.splitlines()) == hide_numbers(shown)


@pytest.mark.slow
def test_the_table_of_orders_on_its_page_is_that_of_today(run_here):
    done = run_here("ovpatch pipeline --what-if p=4,m=12,memory=1x/1.5x")
    shown = "\n".join(read_output("plan-a-pipeline.md", "| gpipe "))
    assert done.stdout.startswith(shown)


# --- options ---

#: Runs each program up to where it has read its options.
READ = """
import argparse, json, runpy, sys

class Done(Exception):
    pass

def parse_args(self, args=None, namespace=None, parse=argparse.ArgumentParser.parse_args):
    parse(self, args, namespace)
    raise Done

argparse.ArgumentParser.parse_args = parse_args
path = list(sys.path)
for run, name, *arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    sys.path[:] = [sys.argv[0].rpartition("/")[0], {root!r}, *path] if run == "run_path" else [{root!r}, *path]
    try:
        getattr(runpy, run)(name, run_name="__main__")
    except Done:
        continue
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in ("megatron", "transformers", "accelerate"), error  # of an extra
        continue
    except SystemExit:
        sys.exit(f"{{name}} does not take {{arguments}}")
    sys.exit(f"{{name}} reads no options")
"""


def programs(command: str) -> Iterator[list[str]]:
    """Yield the programs of this project that a command starts: how runpy runs them, their name and their options."""
    if made := re.search(r"\bmake demo DEMO_ARGS=(.*)", command):
        yield [
            "run_path",
            str(ROOT / "examples" / "demo.py"),
            *shlex.split(shlex.split(made[1])[0]),
        ]
    words = shlex.split(command.partition(" > ")[0])
    for index, word in enumerate(words):
        if re.fullmatch(r"(?:examples|tools)/\w+\.py", word):
            yield ["run_path", str(ROOT / word), *words[index + 1 :]]
        elif word == "-m" and re.match(r"(?:benchmarks|tests)\.", words[index + 1]):
            yield ["run_module", *words[index + 1 :]]


def read_options(folder, forks, *found):
    (folder / "read.py").write_text(READ.format(root=str(ROOT)))
    # OVPATCH=0: examples call apply().
    return forks.torchrun(1, folder / "read.py", json.dumps(found), env={"OVPATCH": "0"})


def test_programs_take_the_options_that_they_are_given(tmp_path, forks):
    found = [program for _, command in console() for program in programs(command)]
    assert len(found) > 20
    read_options(tmp_path, forks, *found).check()


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 2 examples/train_gpt.py --stpes 3",
        "ovpatch verify -- torchrun --nproc-per-node 2 examples/train_gpt.py --dtype fp8",
        "make demo DEMO_ARGS=--quik",
        "python -m benchmarks.suite --lits",
    ],
)
def test_a_wrong_option_is_noticed(tmp_path, forks, command):
    done = read_options(tmp_path, forks, *programs(command))
    assert (done.rc, "does not take" in done.stderr) == (1, True), done.describe()


def test_pytest_takes_the_options_that_it_is_given(pytestconfig):
    given = [
        found for _, command in console() for found in re.findall(r'PYTEST_ARGS="(.*)"', command)
    ]
    assert given
    for option in [word for words in given for word in words.split() if word.startswith("-")]:
        pytestconfig.getoption(option)


def ovpatch_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each call of ovpatch in the documentation and in docstrings, as words, with the place."""
    texts = [
        (page.name, line) for page in PAGES for block in fenced(page) for line in block.splitlines()
    ]
    texts += [
        (place, line)
        for place, text in docstrings()
        for line in text.splitlines()
        if line.startswith("    ")
    ]
    for place, line in texts:
        match = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:python3? -m )?ovpatch ([a-z].*)$", line)
        if match and not re.match(r"(list|doctor|run|verify|bench|timeline)\S*:", match[1]):
            yield place, shlex.split(match[1].replace("\\", ""), comments=True)


def fenced(page: Path) -> list[str]:
    """Return the blocks that are not Python."""
    pieces = re.split(r"^```(\w*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        text
        for language, text in zip(pieces[1::4], pieces[2::4], strict=False)
        if language != "python"
    ]


def test_every_command_line_in_the_documentation_is_understood():
    found = [(place, words) for place, words in ovpatch_commands() if words[0] in main.COMMANDS]
    assert {words[0] for _, words in found} == {*main.COMMANDS}
    for place, words in found:
        try:
            main._make_parser(words[0]).parse_args(words)
        except SystemExit:
            pytest.fail(f"{place}: ovpatch {' '.join(words)}")


def test_what_other_commands_name_is_there():
    """Targets of make, modules and extras, in code and in prose."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = metadata("ovpatch").get_all("Provides-Extra")
    seen = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"(?:`|^\$ )make ([a-z][a-z-]*)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
            seen.add("make")
        for module in re.findall(r"python -m ((?:benchmarks|tests|tools)[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (
                f"{page.name}: {module}"
            )
            seen.add("module")
        for extra in re.findall(r"ovpatch\[(\w+)\]", text):
            assert extra in extras, f"{page.name}: ovpatch[{extra}]"
            seen.add("extra")
    assert seen == {"make", "module", "extra"}
