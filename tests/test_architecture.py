"""The house: imports run one way, files stay small, and each module can be imported alone."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import fresh_reports, patience
from tests.support.environment import clean
from tests.support.rarely import ALL_CASES

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("ovpatch.cli", "ovpatch.__main__")
LONGEST = 800  # lines
FOLDERS = ("ovpatch", "plugins", "examples", "tests", "benchmarks")


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "plugins":
        del parts[0]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for folder in ("ovpatch", "plugins")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imports(name: str, tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield every module that a module imports, and whether that happens while it is imported itself."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node, eager in walk(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, eager
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [
                        *package.split(".")[: len(package.split(".")) - node.level + 1],
                        *filter(None, [base]),
                    ]
                )
            yield base, eager
            for alias in node.names:
                if f"{base}.{alias.name}" in FILES:
                    yield f"{base}.{alias.name}", eager


def walk(node: ast.AST, eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        yield child, eager
        yield from walk(child, eager and not inside and not typing)


# The graph is made at its first use, because every worker of pytest-xdist imports this file and one runs its tests.
@functools.cache
def graph() -> dict[str, set[tuple[str, bool]]]:
    """Return the imports of each module, each with whether it runs when the module is imported."""
    return {
        name: set(imports(name, ast.parse(path.read_text(encoding="utf-8"))))
        for name, path in FILES.items()
    }


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offenders(modules: list[str], forbidden) -> list[str]:
    return sorted(
        f"{name} imports {target}"
        for name in modules
        for target, eager in graph()[name]
        if forbidden(name, target, eager)
    )


def of(*packages: str) -> list[str]:
    return [name for name in FILES if within(name, *packages)]


# --- arrows ---


def test_the_arrows_are_looked_at_in_a_graph_that_is_not_empty():
    assert "ovpatch.patching.manager" in FILES
    assert "ovpatch_plugins.ddp.ddp_feature" in FILES
    assert ("ovpatch.patching", True) in graph()["ovpatch.session.session"]
    assert ("torch", False) in graph()["ovpatch.api"]
    assert ("ovpatch.patching", True) not in graph()["ovpatch"], "TYPE_CHECKING is no import"


def none_of(*packages: str, but: tuple[str, ...] = ()) -> Callable[[str, str, bool], bool]:
    """Forbid imports of some packages."""
    return lambda name, target, eager: within(target, *packages) and not within(target, *but)


def is_of_another_plugin(name: str, target: str, eager: bool) -> bool:
    own = ".".join(name.split(".")[:2])
    return (
        within(target, "ovpatch_plugins")
        and target != "ovpatch_plugins"
        and not within(target, own)
    )


def features_or_torch_at_once(name: str, target: str, eager: bool) -> bool:
    return none_of("ovpatch", "ovpatch_plugins", but=("ovpatch.patching",))(
        name, target, eager
    ) or (within(target, "torch") and eager)


def parts_of_the_patch_manager(name: str, target: str, eager: bool) -> bool:
    return (
        name != "ovpatch"
        and within(target, "ovpatch.patching")
        and target != "ovpatch.patching.patch"
    )


SHARED = ("ovpatch.hookspecs", "ovpatch.overlap", "ovpatch.planner")
COPIES = tuple(
    f"ovpatch.overlap.kernels.copy_{name}"
    for name in ("window", "collectives", "messages", "choice")
)
SHARDING = ("ovpatch_plugins.dist_optimizer", "ovpatch.overlap.peer_rpc", *COPIES)
SPEAK_TO_THE_MANAGER = (
    "ovpatch.session.session",
    "ovpatch.session.session_report",
    "ovpatch.insight",
    "ovpatch.patching",
)

# The parts of pipelining that import no torch, from the lowest.
TERMS = tuple(
    f"ovpatch.overlap.pipelining{part}"
    for part in (".ir", ".order_table", ".orders", ".order_rules")
)

PIPELINE = "ovpatch_plugins.pipeline"
# Counters, and what all rooms read of the graph of autograd.
COUNTED = (f"{PIPELINE}.pipeline_counters", f"{PIPELINE}.graph")

#: Who, but for whom, and what they may not import.
ARROWS = {
    "plugins know only the specification and what features share": (
        ["ovpatch_plugins"], (), none_of("ovpatch", but=SHARED)),
    "no plugin imports another, its package included": (["ovpatch_plugins"], (), is_of_another_plugin),
    "overlap knows torch, where measurements are kept, and nothing of patches": (
        ["ovpatch.overlap"], (),
        none_of("ovpatch", "ovpatch_plugins", "wrapt", "pluggy", but=("ovpatch.overlap", "ovpatch.settings.settings"))),
    "gradient reducers know sharding by its interface only": (
        ["ovpatch.overlap.data_parallel", "ovpatch_plugins.ddp"], (), none_of(*SHARDING)),
    "the planner knows the terms of a pipeline, and no torch": (
        ["ovpatch.planner"], (), none_of("ovpatch", "ovpatch_plugins", "torch", but=("ovpatch.planner", *TERMS))),
    "the terms of a pipeline know no torch": (list(TERMS), (), none_of("ovpatch", "torch", but=TERMS)),
    "messages and programs know no order": (
        ["ovpatch.overlap.pipelining"], (*TERMS, "ovpatch.overlap.pipelining.program_cursor"), none_of(*TERMS[1:])),
    "only the commands and plugins call the planner": (
        ["ovpatch"], ("ovpatch.planner", *COMMANDS), none_of("ovpatch.planner")),
    "nothing but feature pipeline imports its plugin": (
        ["ovpatch_plugins"], ("ovpatch_plugins.pipeline",), none_of("ovpatch_plugins.pipeline")),
    "the engine of a pipeline knows its stages and messages alone": (
        [f"{PIPELINE}.runtime"], (), none_of(PIPELINE, "ovpatch.planner", but=(f"{PIPELINE}.runtime", *COUNTED))),
    "the race of orders knows the engine, the report and the planner": (
        [f"{PIPELINE}.auto"], (), none_of(PIPELINE, but=(
            f"{PIPELINE}.auto", f"{PIPELINE}.runtime", f"{PIPELINE}.pipeline_report", *COUNTED))),
    "variants of a pipeline know the engine alone": (
        [f"{PIPELINE}.variants"], (), none_of(PIPELINE, "ovpatch.planner", but=(
            f"{PIPELINE}.variants", f"{PIPELINE}.runtime", *COUNTED))),
    "a plain model is cut without the engine": (
        [f"{PIPELINE}.cutting"], (), none_of(PIPELINE, "ovpatch.planner", but=(
            f"{PIPELINE}.cutting", f"{PIPELINE}.runtime.torch_compat", f"{PIPELINE}.variants.bidirectional",
            *COUNTED))),
    "patching knows nothing of features and imports no torch": (["ovpatch.patching"], (), features_or_torch_at_once),
    "nothing of ovpatch imports a plugin": (["ovpatch"], (), none_of("ovpatch_plugins")),
    "insight is above the API": (["ovpatch"], ("ovpatch.insight", *COMMANDS), none_of("ovpatch.insight", *COMMANDS)),
    "insight is below the commands": (["ovpatch.insight"], (), none_of(*COMMANDS)),
    "only the engine and the report speak to the patch manager": (
        ["ovpatch"], SPEAK_TO_THE_MANAGER, parts_of_the_patch_manager),
}  # fmt: skip


@pytest.mark.parametrize("arrow", ARROWS)
def test_imports_run_one_way(arrow):
    who, without, forbidden = ARROWS[arrow]
    modules = [name for name in of(*who) if not within(name, *without)]
    assert modules
    assert not offenders(modules, forbidden)


# The packages and modules of overlap, each with those that it may import.
COMM = {"comm"}
BELOW = COMM | {"autograd", "module_blocks", "tensors", "kernels"}
OVERLAP = {
    "comm": COMM,
    "autograd": {"autograd"},
    "module_blocks": {"module_blocks"},
    "tensors": COMM | {"tensors"},
    "kernels": COMM | {"kernels"},
    "data_parallel": BELOW | {"data_parallel"},
    "peer_rpc": BELOW | {"peer_rpc"},
    "tensor_parallel": BELOW | {"tensor_parallel"},
    "pipelining": BELOW | {"pipelining"},
}


def test_overlap_has_the_packages_and_modules_whose_imports_are_checked():
    found = {
        path.stem for path in (ROOT / "ovpatch" / "overlap").glob("*") if path.name != "__pycache__"
    }
    assert found == {"__init__", *OVERLAP}


@pytest.mark.parametrize("package", OVERLAP)
def test_packages_of_overlap_import_those_below_them_also_lazily(package):
    allowed = tuple(f"ovpatch.overlap.{name}" for name in OVERLAP[package])

    def forbidden(name, target, eager):
        return (
            within(target, "ovpatch.overlap")
            and target != "ovpatch.overlap"
            and not within(target, *allowed)
        )

    assert of(f"ovpatch.overlap.{package}")
    assert not offenders(of(f"ovpatch.overlap.{package}"), forbidden)


def assert_no_circle(edges: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_nobody_goes_round_in_circles():
    """Imports at import time make no cycle; a package counts as importing what its __init__ does."""
    assert_no_circle(
        {
            name: {t for t, eager in graph()[name] if eager and t in FILES and t != name}
            for name in FILES
        }
    )


def test_inside_a_plugin_late_and_type_only_imports_make_no_circle_either():
    # The modules of entry points, which import their plugins late, are left out.
    files = {name for name in of("ovpatch_plugins") if name.count(".") > 1}
    assert_no_circle(
        {name: {t for t, _ in graph()[name] if t in files and t != name} for name in files}
    )


# --- tensors ---

FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided"}
# Methods of tensors that make new ones. Copies of a script's tensor are left out: they follow its class.
MAKING_METHODS = {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
CACHES = {"cache", "lru_cache", "cached_property"}
KEEP_TENSORS = ("ovpatch.overlap", "ovpatch_plugins")

# A backward of the runtime's own runs with gradients on.
LEAVES_INFERENCE_ONLY = {
    "ovpatch.overlap.autograd",
    "ovpatch.overlap.data_parallel.grad_hooks",
}

# Tensors that are stored although a mode of the script may be on when they are made, each with its reason.
STORED_IN_MODES = {
    "ovpatch.overlap.data_parallel.usage_map: self._map": "integers that only collectives and the host read",
    "ovpatch_plugins.pipe_experts.all_to_all: self._memory": "rows of one call, which are part of its graph",
    "ovpatch_plugins.pipe_experts.layer: self.up": "a parameter of the script's module, as in nn.Linear",
    "ovpatch_plugins.pipe_experts.layer: self.down": "a parameter of the script's module, as in nn.Linear",
    "ovpatch_plugins.pipe_experts.routing: row_of_slot": "integers of one call, kept while that runs",
    "ovpatch_plugins.pipeline.runtime.stage_buffers: tensors[place]": "a message of one backward, in a local list",
}


def careless_makers(name: str, tree: ast.AST) -> Iterator[str]:
    """Yield calls that create tensors of a script's default dtype, or outside of some modes only."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
            continue
        function, keywords = (
            ast.unparse(node.func).removeprefix("torch."),
            {word.arg for word in node.keywords},
        )
        if function in FACTORIES and not {"dtype", "device"} <= keywords:
            yield f"{name}:{node.lineno} names no dtype or device"
        if function == "inference_mode" and name not in LEAVES_INFERENCE_ONLY:
            yield f"{name}:{node.lineno} leaves inference mode alone: use outside_modes()"


def makes_tensor(node: ast.AST) -> bool:
    """Return whether some call below a node makes a tensor while modes of the script may be on."""
    if isinstance(node, ast.With) and any(
        "outside_modes()" in ast.unparse(item) for item in node.items
    ):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        function = ast.unparse(node.func)
        if function.removeprefix("torch.") in FACTORIES and function.startswith("torch."):
            return True
        if node.func.attr in MAKING_METHODS:
            return True
    return any(map(makes_tensor, ast.iter_child_nodes(node)))


def stored_makers(node: ast.AST) -> Iterator[str]:
    """Yield what outlives a call and is bound to a new tensor: attributes, items of containers, cached functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.With) and any(
            "outside_modes()" in ast.unparse(item) for item in child.items
        ):
            continue
        if (
            isinstance(child, (ast.Assign, ast.AnnAssign))
            and child.value is not None
            and makes_tensor(child.value)
        ):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if isinstance(target, (ast.Attribute, ast.Subscript)):
                    yield ast.unparse(target)
        if isinstance(child, ast.FunctionDef) and makes_tensor(child):
            names = {
                part
                for decorator in child.decorator_list
                for part in re.findall(r"\w+", ast.unparse(decorator))
            }
            if names & CACHES:
                yield child.name
        yield from stored_makers(child)


def test_tensors_of_the_runtime_depend_on_no_mode():
    found = [
        text
        for name in of(*KEEP_TENSORS)
        for text in careless_makers(name, ast.parse(FILES[name].read_text()))
    ]
    assert not found
    assert (
        len(
            list(
                careless_makers(
                    "x", ast.parse("torch.zeros(1, dtype=d)\ntorch.inference_mode(False)")
                )
            )
        )
        == 2
    )


def test_tensors_that_outlive_a_call_are_made_outside_of_modes():
    text = (
        "self.a = torch.zeros(1)\nb = torch.zeros(1)\nwith outside_modes():\n    self.c = "
        "torch.zeros(1)\n"
        "d[1] = x.new_empty(1).pin_memory()\nself.e = x.clone()\n"
        "@functools.lru_cache(maxsize=1)\ndef f(): return torch.ones(1)\n"
        "@cached_property\ndef g(self):\n    with outside_modes(): return torch.ones(1)\n"
    )
    assert list(stored_makers(ast.parse(text))) == ["self.a", "d[1]", "f"]
    found = {
        f"{name}: {place}"
        for name in of(*KEEP_TENSORS)
        for place in stored_makers(ast.parse(FILES[name].read_text()))
    }
    assert found == set(STORED_IN_MODES)


# --- size ---


def test_files_stay_small():
    long = {
        str(path.relative_to(ROOT)): count
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST
    }
    assert not long


# Rooms that features share, and files of one noun, count here: raise it with a reason in the commit.
MOST_FILES = {"": 251, "ovpatch.insight": 27, "ovpatch.patching": 8}


def test_files_are_few():
    counts = {package: len(of(package) if package else FILES) for package in MOST_FILES}
    assert all(count <= MOST_FILES[package] for package, count in counts.items()), counts


# --- names ---


def test_basenames_are_unique():
    """A search for a file's name finds one file, in ``ovpatch`` and the plugins together."""
    found: dict[str, list[str]] = {}
    for name, path in FILES.items():
        if path.stem not in ("__init__", "__main__"):
            found.setdefault(path.stem, []).append(name)
    assert {stem: names for stem, names in found.items() if len(names) > 1} == {}


# Functions that another module finds by their name, in each of several modules.
BY_NAME = {"main", "configure", "start_worker", "__getattr__"}


def layer(name: str) -> str:
    """Return the package below ``ovpatch``, or the plugin, that a module belongs to."""
    return ".".join(name.split(".")[:2])


def test_public_functions_and_classes_have_a_name_of_their_own_in_a_layer():
    found: dict[tuple[str, str], list[str]] = {}
    for name, path in FILES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith(
                "_"
            )
            if public and node.name not in BY_NAME:
                found.setdefault((layer(name), node.name), []).append(name)
    assert len(found) > 500
    assert {key: names for key, names in found.items() if len(names) > 1} == {}


# --- tables ---

# Module-level containers that are filled while the process runs. Values for a process group, a parameter or another
# object of the script are in lifetimes.py. These are all remaining containers, each with its reason.
TABLES = {
    "ovpatch.hookspecs:_failures": "by feature, dropped when the feature is turned off",
    "ovpatch.overlap.kernels.autotuner:_report_lines": "lines of the report",
    "ovpatch.overlap.comm.lifetimes:_after_fork_functions": "what forked children renew, of any object",
    "ovpatch.overlap.comm.lifetimes:_object_values": "attached_values() itself",
    "ovpatch.overlap.comm.lifetimes:_param_records": "param_record() itself",
    "ovpatch.overlap.comm.lifetimes:_exit_function_pids": "functions at exit, each once",
    "ovpatch.overlap.comm.lifetimes:_group_states": "group_state() itself",
    "ovpatch.overlap.kernels.copy_choice:_stuck": "memory that is never freed",
    "ovpatch.overlap.kernels.copy_sum_kernel:_compiled": "compiled kernels",
    "ovpatch.overlap.data_parallel.fp32_accumulation:sums": "buckets check whether it is empty, not each gradient",
    "ovpatch.overlap.kernels.symmetric_memory:_last": "the last use on each device",
    "ovpatch.overlap.tensor_parallel.tp_group:_tp_groups_by_name": "weak references, dropped by revert()",
    "ovpatch.overlap.tensors.lazy_tensor:_blanks": "a zero for each dtype and device",
    "ovpatch.overlap.tensors.pending_param:PENDING": "every read hook checks whether it is empty",
    "ovpatch.patching.wrapper_chain:_skipped": "code objects that Dynamo skips once it is imported",
    "ovpatch.patching.wrapper_chain:_unlisted": "installed functions, held weakly, until torch is imported",
    "ovpatch.patching.target:_listeners": "by name of a module that is not imported yet",
    "ovpatch.session.worker_exit:_exit_actions": "actions of this process, in order",
    "ovpatch_plugins.ddp.ddp_report:REMARKS": "lines of the report",
    "ovpatch_plugins.dist_optimizer.param_all_gather:dropped_gathers": "all-gathers that nothing else waits for",
    "ovpatch_plugins.dist_optimizer.dist_optimizer_report:_unmanaged": "names for the report",
    "ovpatch_plugins.dist_optimizer.dist_optimizer_report:_remarks": "lines of the report",
    "ovpatch_plugins.megatron.megatron_report:_FALLBACKS": "lines of the report",
    "ovpatch_plugins.pipe_experts.all_to_all:_unsupported_reasons": "lines of the report",
    "ovpatch_plugins.pipeline.pipeline_report:_schedules": "the last schedules, for the report, which outlives them",
    "ovpatch_plugins.pipeline.pipeline_report:_stock_reasons": "lines of the report",
    "ovpatch_plugins.pipeline.cutting.stage_tree:_classes": "subclasses, each created on first use",
    "ovpatch.overlap.pipelining.edges:_stuck": "memory that is never freed",
    "ovpatch_plugins.recompute.recompute_report:_fallbacks": "lines of the report",
    "ovpatch_plugins.recompute.recompute_report:_models": "lines of the report",
    "ovpatch_plugins.recompute.recompute_report:_notes": "lines of the report",
    "ovpatch_plugins.recompute.recomputation:_pending": "flags of running backwards, which take them",
    "ovpatch_plugins.recompute.recompute_attach:_hook_handles": "the hook that notes modules, until revert()",
    "ovpatch_plugins.recompute.recompute_attach:_wrapped": "classes, each with the function that restores its forward",
    "ovpatch.overlap.tensor_parallel.layout:SPECS": "a cache of bounded size",
    "ovpatch_plugins.tp_linear.tp_linear_feature:_settings": "the options",
    "ovpatch_plugins.tp_linear.precomputed:PRECOMPUTED": "every linear reads it; an item ends with its gathered tensor",
    "ovpatch_plugins.tp_linear.tp_linear_attach:STOCK_REASONS": "names for the report",
}


def test_workers_forget_all_lines_of_the_report():
    lines = {
        name for name, why in TABLES.items() if "for the report" in why or "of the report" in why
    }
    assert (
        lines - {"ovpatch.overlap.kernels.autotuner:_report_lines"}
        == fresh_reports.list_containers()
    )


CONTAINERS = {"dict", "set", "list", "deque", "defaultdict", "OrderedDict", "Counter"}


def tables(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds to empty containers, or to weak ones."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        value, target = node.value, node.targets[0] if isinstance(node, ast.Assign) else node.target
        maker = value.func if isinstance(value, ast.Call) else None
        called = (
            maker.attr
            if isinstance(maker, ast.Attribute)
            else maker.id
            if isinstance(maker, ast.Name)
            else ""
        )
        empty = (isinstance(value, ast.Dict) and not value.keys) or (
            isinstance(value, ast.List) and not value.elts
        )
        filled = isinstance(value, ast.Call) and value.args
        if empty or (called in CONTAINERS and not filled) or called.startswith("Weak"):
            yield ast.unparse(target)


def test_what_is_kept_for_groups_and_parameters_is_in_one_place():
    text = "a = {}\nb: dict[int, int] = {}\nc = weakref.WeakSet()\nd = {1: 2}\ne = list(d)\nf = deque(maxlen=1)\n"
    assert list(tables(ast.parse(text))) == ["a", "b", "c", "f"]
    found = {
        f"{name}:{table}"
        for name, path in FILES.items()
        for table in tables(ast.parse(path.read_text("utf-8")))
    }
    assert found == set(TABLES)


# --- notes ---

MOST_NOTES = 60
LONGEST_NOTE = 8  # lines
# A note is defined where its name begins a line and a sentence follows it, on that line or the next.
NOTE = re.compile(
    r"""^\s*(?:\#:?\ |[rf]?\"{3})?\[Note:\ ([^\]]+)\](?:\ (?=[A-Z`"*\d])|$)""", re.VERBOSE
)


def note_lengths(text: str) -> list[tuple[str, int]]:
    """Return the name and the number of lines of each note that a source defines."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        if match := NOTE.match(line):
            length = 1
            for after in lines[number + 1 :]:
                if not after.strip(' #"') or NOTE.match(after):
                    break
                length += 1
            found.append((match[1], length))
    return found


def test_a_note_is_told_from_its_quotation():
    docstring = '"""[Note: a] One.\n\n    [Note: b]\n    Two\n    lines.\n"""\n'
    text = docstring + "# see\n# [Note: c], and\n# [Note: d] Three.\n\nx = 1\n"
    assert note_lengths(text) == [("a", 1), ("b", 3), ("d", 1)]


def test_notes_are_few_short_and_defined_once():
    texts = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
    notes = [(name, *note) for name, text in texts.items() for note in note_lengths(text)]
    defined = [note for _, note, _ in notes]
    assert len(defined) <= MOST_NOTES, sorted(defined)
    assert sorted(defined) == sorted(set(defined))
    assert [note for note in notes if note[2] > LONGEST_NOTE] == []
    quoted = {
        (name, note)
        for name, text in texts.items()
        for note in re.findall(r"\[Note: ([^\]]+)\]", re.sub(r"\n\s*(?:# )?", " ", text))
    }
    assert {(name, note) for name, note in quoted if note not in defined} == set()


# --- each module alone ---

ALONE = """
import gc, json, os, sys
def forked(name):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        __import__(name)
        os._exit(1 if "torch" in sys.modules else 0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(2)
names = json.loads(sys.argv[1])
result = {name: forked(name) for name in names["bare"]}
# Heavy, and others': once instead of in each process.
import statistics, pluggy, wrapt, torch, torch._dynamo, torch.distributed.pipelining, torch.distributed.tensor
try:
    import triton
except ModuleNotFoundError:
    pass
gc.freeze()  # else each process copies what it collects
result.update({name: forked(name) for name in names["torch"]})
print(json.dumps(result), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(
    not hasattr(os, "fork"), reason="one process per module only where that is cheap"
)
def test_every_module_imports_alone_without_a_warning_and_most_without_torch(tmp_path):
    needs_torch = [
        name
        for name in FILES
        if within(name, "ovpatch.overlap", "ovpatch.insight", "ovpatch_plugins")
    ]
    names = {
        "torch": needs_torch if ALL_CASES else needs_torch[::4],
        "bare": [name for name in FILES if name not in needs_torch],
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, json.dumps(names)],
        env=clean(os.environ),
        capture_output=True,
        text=True,
        timeout=patience.scale(600),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name: code for name, code in result.items() if code == 2} == {}, done.stderr
    assert [name for name in names["bare"] if result[name] == 1] == [], "these import torch"


# A torch without what some builds leave out, and no Triton: the C extension without c10d, as with USE_DISTRIBUTED=0.
POOR = """
import sys, importlib.abc, importlib.machinery

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "torch._C":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            def exec_module(module):
                run(module)
                for name in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                    vars(module).pop(name, None)
            spec.loader.exec_module = exec_module
            return spec

sys.meta_path.insert(0, Blocker())
import torch
assert not torch.distributed.is_available()
import ovpatch
report = ovpatch.apply()
import ovpatch.cli.doctor_command, ovpatch.cli.run_command, ovpatch.cli.timeline_command
for name in ("ddp", "dist_optimizer", "megatron", "pipe_experts", "pipeline", "tp_linear"):
    print(name, report[name].state, report[name].reason, sep=": ")
"""


def test_without_torch_distributed_and_triton_it_says_why_a_feature_is_off(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", POOR],
        env=clean(os.environ) | {"OVPATCH": "all"},
        capture_output=True,
        text=True,
        timeout=patience.scale(600),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    features = [line.split(": ", 1) for line in done.stdout.splitlines()]
    assert len(features) == 6
    assert {text for _, text in features} == {
        "skipped: this build of torch has no torch.distributed"
    }


# --- tests on loaded machines ---

SHORTEST_S = 30
WAITS = re.compile(r"\.(?:wait|join|communicate|_barrier)\((?:timeout=)?(\d+(?:\.\d+)?)\)")
TIMEOUTS = re.compile(r"\b(?:subprocess\.\w+|urlopen)\(.*\btimeout=(\d+(?:\.\d+)?)\b")
DURATIONS = re.compile(
    r"assert .*(?:seconds|took|waited|longest|monotonic\(\)[^<>]*) <=? (\d+(?:\.\d+)?)"
)
OWN_TIMEOUTS = re.compile(
    r"\btimeout(?:_s=|=timedelta\(seconds=)(\d+(?:\.\d+)?)"
    r"|(?:TIMEOUT|START|IDLE)_S\"?(?:,| =|=\") ?(\d+(?:\.\d+)?)"
)
# Ends a line with a wait that is meant to end without what it waits for.
EXPIRES = "# expires"


def find_short_waits(text: str) -> list[str]:
    """Return the lines that fail if a machine does for half a minute something else."""
    return [
        line.strip()
        for line in text.splitlines()
        for pattern in (WAITS, TIMEOUTS, DURATIONS, OWN_TIMEOUTS)
        for found in pattern.finditer(line)
        if 0 < float(found[found.lastindex or 0]) < SHORTEST_S and not line.endswith(EXPIRES)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "assert inside.wait(20)",
        'replies = peers.call("topic", {}, timeout_s=20)',
        "consensus.LATE_START_S = 1.0",
        "group = dist.new_group(timeout=timedelta(seconds=3))",
        'with mock.patch.object(selection, "IDLE_S", 2.0):',
        "thread.join(timeout=10)",
        "done = subprocess.run(command, text=True, timeout=10)",
        "with urllib.request.urlopen(address, timeout=10) as page:",
        "assert took < 15",
        "assert 1 <= seconds < 20",
        "assert time.monotonic() - begin < 5",
    ],
)
def test_a_short_wait_is_found(line):
    assert find_short_waits(line) == [line]


def test_no_test_needs_a_quick_machine():
    """Waits for what must come, and bounds of durations, allow for a machine that other work keeps busy."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    found = {
        str(path.relative_to(ROOT)): find_short_waits(path.read_text(encoding="utf-8"))
        for path in tests
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_examples_of_hypothesis_have_no_deadline():
    found = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if "deadline=" in path.read_text(encoding="utf-8")
    ]
    assert {path.name for path in found} == {"conftest.py", Path(__file__).name}
    from hypothesis import settings

    assert settings.default.deadline is None
