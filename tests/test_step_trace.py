"""Ceilings: calls, functions and files of a steady step, and the size of its rooms.

A change that lowers a number lowers its ceiling in the same commit. A change that exceeds a ceiling
removes something else first, or gives the reason in its commit.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import json
import os
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import patience, step_trace
from tests.support.environment import clean
from tests.support.preloaded import preloaded

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def sources() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file; each worker imports this module, and one of them needs the trees."""
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("ovpatch", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


SLACK = 0.05

# File, qualified name, first line.
Call = tuple[str, str, int]


def find_difference(name: str, measured: int, ceiling: int) -> str:
    """Return the reason to change a ceiling, or the code; "" if there is none."""
    if measured > ceiling:
        remedy = "Remove something else, or raise the ceiling and give the reason in the commit."
        return f"{name}: {measured} are more than the ceiling, {ceiling}. {remedy}"
    if measured < ceiling * (1 - SLACK):
        remedy = "Lower the ceiling in this commit."
        return f"{name}: {measured} are fewer than the ceiling, {ceiling}. {remedy}"
    return ""


def assert_ceilings(
    measured: Mapping[str, int], ceilings: Mapping[str, int], details: str = ""
) -> None:
    assert measured.keys() == ceilings.keys()
    wrong = [
        text
        for name, count in measured.items()
        if (text := find_difference(name, count, ceilings[name]))
    ]
    assert not wrong, "\n".join([*wrong, details])


def test_a_ceiling_holds_in_both_directions():
    assert [find_difference("calls", count, 100) for count in (100, 95)] == ["", ""]
    assert find_difference("calls", 101, 100).startswith(
        "calls: 101 are more than the ceiling, 100."
    )
    assert find_difference("calls", 94, 100).startswith(
        "calls: 94 are fewer than the ceiling, 100."
    )
    with pytest.raises(AssertionError, match=r"(?s)^files: 5 are fewer.*what came in"):
        assert_ceilings({"files": 5}, {"files": 6}, "what came in")


# --- a step ---

#: The counterparts of these are C++ in stock PyTorch (collectives), or outside of training (the patch manager).
BELOW = (os.path.join("ovpatch", "overlap", "comm", ""), os.path.join("ovpatch", "patching", ""))

# Frames of comprehensions do not count, since they depend on Python's version. The numbers "above" leave out BELOW.
STEPS = {
    ("ddp",): {
        "calls": 70,
        "functions": 59,
        "files": 12,
        "calls above": 53,
        "functions above": 46,
        "files above": 7,
    },
    ("ddp", "dist_optimizer"): {
        "calls": 211,
        "functions": 150,
        "files": 25,
        "calls above": 145,
        "functions above": 117,
        "files above": 19,
    },
}

# Files of a step that share their name with another one. The list may only become shorter.
SAME_NAMES: dict[tuple[str, ...], set[str]] = {
    ("ddp",): set(),
    ("ddp", "dist_optimizer"): set(),
}

# By how much counters have grown in the step, if they have.
COUNTERS = {
    "ddp": {"backwards": 1, "collectives": 1, "bytes_reduced": 576},
    "dist_optimizer": {
        "steps": 1,
        "params_updated": 4,
        "grads_sharded": 4,
        "gathers": 1,
        "gathers_overlapped": 1,
        "bytes_gathered": 576,
    },
}

arms = pytest.mark.parametrize("features", STEPS, ids=" and ".join)


@functools.cache
def trace(*features: str) -> dict[str, Any]:
    """Return the trace of a step in a process with its own profiler, and a process group without peers."""
    command = [*preloaded(), step_trace.__file__, *features]
    env = clean(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")])}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=patience.scale(120)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"calls": [tuple(call) for call in found["calls"]]}


def count(calls: Sequence[Call]) -> dict[str, int]:
    above = [call for call in calls if not call[0].startswith(BELOW)]
    return {
        f"{what}{suffix}": number
        for suffix, chosen in (("", calls), (" above", above))
        for what, number in (
            ("calls", len(chosen)),
            ("functions", len(set(chosen))),
            ("files", len({file for file, *_ in chosen})),
        )
    }


def list_by_file(calls: Sequence[Call]) -> str:
    """Return the functions of a step by file, with their lines, in the order of the first call."""
    counts, lines = Counter(calls), list[str]()
    for file in dict.fromkeys(file for file, *_ in calls):
        functions = [call for call in counts if call[0] == file]
        lines.append(f"{file}: {len(functions)} functions")
        for call in functions:
            times = f" x {counts[call]}" if counts[call] > 1 else ""
            lines.append(f"    {call[2]:4} {call[1]}{times}")
    return "\n".join(lines)


@arms
def test_the_traced_step_is_a_steady_step_of_these_features(features):
    traced = trace(*features)
    grown = {
        feature: {name: n for name, n in of.items() if n}
        for feature, of in traced["counters"].items()
    }
    assert grown == {feature: COUNTERS[feature] for feature in features}
    assert set(traced["grads"]) == {"LazyTensor" if "dist_optimizer" in features else "Tensor"}, (
        "sharded, or not"
    )
    assert traced["is_steady"], "the next step has other calls"


@arms
def test_a_step_makes_no_more_calls_in_no_more_functions_and_files(features):
    calls = trace(*features)["calls"]
    assert_ceilings(count(calls), STEPS[features], list_by_file(calls))


@arms
def test_a_step_enters_no_generators_of_contextlib(features):
    """Each would cost 1 to 2 microseconds; a class with slots costs a fraction."""
    traced = trace(*features)
    assert traced["norms"] == ("dist_optimizer" in features), "the gradients are sharded"
    assert traced["generators"] == []


@arms
def test_no_two_files_of_a_step_have_one_name(features):
    files = {file for file, *_ in trace(*features)["calls"]}
    names = Counter(os.path.basename(file) for file in files)
    twice = {name for name, number in names.items() if number > 1}
    found = sorted(file for file in files if os.path.basename(file) in twice ^ SAME_NAMES[features])
    assert twice == SAME_NAMES[features], f"rename one, or remove the name from SAME_NAMES: {found}"


# The files whose docstrings are the maps of a step.
MAPS = {
    ("ddp",): ("ovpatch/overlap/data_parallel/grad_reducer.py",),
    ("ddp", "dist_optimizer"): (
        "ovpatch/overlap/data_parallel/grad_reducer.py",
        "plugins/ovpatch_plugins/dist_optimizer/sharded_optimizer.py",
    ),
}


@arms
def test_the_maps_of_a_step_name_its_files(features):
    """A reader of the central files finds each file of a step without a search."""
    texts = [ast.get_docstring(sources()[ROOT / path]) or "" for path in MAPS[features]]
    named = {os.path.basename(path) for path in re.findall(r"``([\w/]+\.py)``", " ".join(texts))}
    passed = {
        os.path.basename(file)
        for file, *_ in trace(*features)["calls"]
        if not file.startswith(BELOW)
    }
    assert passed - named == {os.path.basename(path) for path in MAPS[features]}
    assert named <= {path.name for path in sources()}, "a map names a file that does not exist"


def test_a_list_of_functions_names_file_line_and_calls():
    calls = [("a.py", "f", 1), ("b.py", "C.g", 20), ("a.py", "f", 1), ("a.py", "h", 3)]
    assert list_by_file(calls).splitlines() == [
        "a.py: 2 functions",
        "       1 f x 2",
        "       3 h",
        "b.py: 1 functions",
        "      20 C.g",
    ]


# --- the reducer and its sharder ---

CLASSES = {
    "GradReducer": {"methods": 30, "attributes": 25, "boolean attributes": 3},
    # Each method but the first is a hook, through which the reducer calls another feature.
    "GradSharder": {"methods": 11, "attributes": 5, "boolean attributes": 2},
    "ShardedGrads": {"methods": 36, "attributes": 42, "boolean attributes": 7},
}


def find_class(name: str) -> list[ast.ClassDef]:
    """Return a class of the project and its base classes within it; empty if there are several of a name, or none."""
    found = [
        node
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    if len(found) != 1:
        return []
    bases = [ast.unparse(base).rpartition(".")[2] for base in found[0].bases]
    return [*found, *itertools.chain.from_iterable(map(find_class, bases))]


def bindings(
    node: ast.AST, owner: str = "self"
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Yield each attribute that is bound, with its value and annotation, if known."""
    for found in ast.walk(node):
        if isinstance(found, ast.AnnAssign):
            pairs = [(found.target, found.value, found.annotation)]
        elif isinstance(found, ast.Assign):
            pairs = []
            for target in found.targets:
                if isinstance(target, ast.Tuple) and isinstance(found.value, ast.Tuple):
                    pairs += [
                        (t, v, None)
                        for t, v in itertools.zip_longest(target.elts, found.value.elts)
                    ]
                else:
                    pairs += [(t, found.value, None) for t in getattr(target, "elts", [target])]
        else:
            continue
        for target, value, annotation in pairs:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == owner
            ):
                yield target.attr, value, annotation


def is_boolean(value: ast.expr | None, annotation: ast.expr | None) -> bool:
    """Return whether an attribute's value is a truth value, by its form."""
    if annotation is not None and ast.unparse(annotation) == "bool":
        return True
    if isinstance(value, ast.BoolOp):
        return all(is_boolean(part, None) for part in value.values)
    is_not = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return (
        is_not
        or isinstance(value, ast.Compare)
        or (isinstance(value, ast.Constant) and type(value.value) is bool)
    )


def measure_class(classes: Sequence[ast.ClassDef]) -> dict[str, int]:
    methods = {
        node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)
    }
    bound = [found for cls in classes for found in bindings(cls)]
    bound += [
        (node.target.id, node.value, node.annotation)
        for cls in classes
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    booleans = {name for name, value, annotation in bound if is_boolean(value, annotation)}
    return {
        "methods": len(methods),
        "attributes": len({name for name, *_ in bound}),
        "boolean attributes": len(booleans),
    }


def test_attributes_and_methods_of_a_class_are_counted():
    text = """
class A(B):
    made: int
    def __init__(self):
        self.a = self.b = False
        self.c, self.d = 1, not 2
        self.e: bool = f()
    def change(self):
        self.a = self.f = 1 < 2
        other.g = True
"""
    (tree,) = ast.parse(text).body
    assert measure_class([tree]) == {"methods": 2, "attributes": 7, "boolean attributes": 5}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_no_more_methods_and_state(name):
    classes = find_class(name)
    assert classes, f"one class of the project is called {name}"
    names = [
        f"{cls.name}: {[node.name for node in cls.body if isinstance(node, ast.FunctionDef)]}"
        for cls in classes
    ]
    assert_ceilings(measure_class(classes), CLASSES[name], "\n".join(names))


# --- the rooms ---

# Logical lines: comments, docstrings, and how a statement is broken into lines do not count.
ROOMS = {
    "ovpatch/overlap/comm": 1539,
    "ovpatch/overlap/data_parallel": 1504,
    "ovpatch/overlap/tensors": 594,
    "ovpatch/overlap/peer_rpc": 948,
    "plugins/ovpatch_plugins/ddp": 695,
    "plugins/ovpatch_plugins/dist_optimizer": 3769,
}


def count_logical_lines(text: str) -> int:
    """Return the number of logical lines of a source, without those that are a string alone."""
    found, is_string_alone = 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            found += not is_string_alone
            is_string_alone = True
        elif token.type not in (
            tokenize.STRING,
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            is_string_alone = False
    return found


def test_logical_lines_are_counted_without_prose():
    assert (
        count_logical_lines(
            '"""A.\n\nB."""\n\n# c\nx = (1,\n     2)  # d\ndef f():\n    """E."""\n    return x\n'
        )
        == 3
    )


def test_the_rooms_of_a_step_have_no_more_lines():
    counts = {path: count_logical_lines(path.read_text(encoding="utf-8")) for path in sources()}
    by_room = {
        room: {path.name: n for path, n in counts.items() if path.is_relative_to(ROOT / room)}
        for room in ROOMS
    }
    measured = {room: sum(files.values()) for room, files in by_room.items()}
    assert all(measured.values()), "a room has moved: adapt ROOMS"
    details = [f"{room}: {files}" for room, files in by_room.items()]
    assert_ceilings(measured, ROOMS, "\n".join(details))
