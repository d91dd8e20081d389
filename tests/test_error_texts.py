"""Error messages: one full stop ends each sentence, also after quoted messages, and a remedy ends the text."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOREIGN = {"error", "failure", "reason", "text"}
"""Names of quoted messages, which may end in a full stop or not."""


def find_double_stops(source: str) -> list[int]:
    """Return the lines in which a full stop follows a quoted message that may have its own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, following in zip(node.values, node.values[1:], strict=False):
            is_stop = isinstance(following, ast.Constant) and str(following.value).startswith(
                (". ", ".\n")
            )
            is_stop = is_stop or (isinstance(following, ast.Constant) and following.value == ".")
            # The representation of an error ends in a bracket.
            if is_stop and isinstance(value, ast.FormattedValue) and value.conversion != ord("r"):
                inner = value.value
                if (
                    isinstance(inner, ast.Call)
                    and isinstance(inner.func, ast.Name)
                    and inner.func.id == "str"
                ):
                    inner = inner.args[0]
                if isinstance(inner, ast.Name) and inner.id in FOREIGN:
                    found.append(value.lineno)
    return found


def test_the_search_finds_what_it_is_for() -> None:
    assert find_double_stops('f"it failed: {error}. Do this."') == [1]
    assert find_double_stops('f"it failed: {str(error)}."') == [1]
    assert not find_double_stops("f\"it failed: {str(error).rstrip('.')}. Do this.\"")
    assert not find_double_stops('f"it failed: {error!r}. Do this."')
    assert not find_double_stops('f"it failed ({error}). Do this."')


def test_no_message_has_two_full_stops() -> None:
    files = [path for folder in ("ovpatch", "plugins") for path in (ROOT / folder).rglob("*.py")]
    lines = {
        str(path.relative_to(ROOT)): find_double_stops(path.read_text(encoding="utf-8"))
        for path in files
    }
    assert not {name: numbers for name, numbers in lines.items() if numbers}


# --- the remedy at the end ---

#: Verbs with which remedies begin. Add one only if the script's author can do it.
_VERBS = """
    add apply ask attach build call change check choose clone compute convert copy correct create cut declare delete do
    draw end flatten free give have import increase install keep leave load look lower make mark mend move name pad pass
    patch put quote raise read record register remove rename report restart return route run send set split start step
    take train try turn unset update upgrade use wait withdraw wrap write
"""
VERBS = frozenset(_VERBS.split())
# Where a remedy may begin inside of the last sentence.
CLAUSES = re.compile(r"; |: |, (?:or |and |so |then )?| or | and |\(")
_PROCESS = "a peer's reply, which a PeerError quotes with its remedy"
_PARSED = "resolve_options() quotes it and adds the remedy"
_LOOKED_UP = "Python's own text, as hasattr() and getattr() expect it"

#: Messages without a remedy: a class, or a module and the beginning of the text, each with its reason.
WITHOUT_REMEDY = {
    "ArgumentTypeError": "argparse adds the option and the usage",
    "ConnectionError": _PROCESS,
    "ConnectionResetError": _PROCESS,
    "PermissionError": _PROCESS,
    "TimeoutError": _PROCESS,
    "TornReadError": _PROCESS,
    "_LostError": "NodeError names the node and adds the remedy",
    "_StrangerError": "NodeError names the port and adds the remedy",
    "LoopError": "the pipeline of megatron quotes it and adds the remedy",
    "NotStartedError": "the text and the exit code of a shell",
    "ovpatch: module 'ovpatch'": _LOOKED_UP,
    "ovpatch.cli.command_line: --features={features}{text}": "quotes an error about OVPATCH with its remedy",
    "ovpatch.hookspecs: expected {": _PARSED,
    "ovpatch.insight.bench.rounds: {variant.name}: {problem}": "the end of the run's output follows",
    "ovpatch.insight.nodes: node 0 ended the meeting": "quotes the error of node 0 with its remedy",
    "ovpatch.overlap.kernels.autotuner: its ": "why a file of measurements is not used; it is written again",
    "ovpatch.patching.plan: {patch}: {found.error}": "quotes target.py, whose messages end with a remedy",
    "ovpatch.session.plugins: {hook} raised": "the error of a plugin's hook, which has its own remedy",
    "ovpatch.session.session: {name} cannot be turned off": "quotes the error of a plugin's hook with its remedy",
    "ovpatch.settings.feature_options: expected": _PARSED,
    "ovpatch_plugins.ddp.ddp_options: expected": _PARSED,
    "ovpatch_plugins.dist_optimizer.dist_optimizer_options: expected": _PARSED,
    "ovpatch_plugins.pipe_experts: module {": _LOOKED_UP,
    "ovpatch_plugins.pipeline: module {": _LOOKED_UP,
    "ovpatch.planner.memory_limit: expected": _PARSED,
    "ovpatch_plugins.recompute: module {": _LOOKED_UP,
    "ovpatch_plugins.recompute.forward_state: numpy.random": "caught by recompute, which keeps the block's activations",
    "ovpatch_plugins.recompute.forward_state: this node is in no graph": "autograd never runs this backward",
    "ovpatch_plugins.recompute.recompute_options: expected": _PARSED,
    "ovpatch_plugins.tp_linear: module {": _LOOKED_UP,
}


class Sources:
    """The modules of ``ovpatch`` and ``plugins``, with the constants and functions that make error messages."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._values: dict[tuple[str, str], ast.expr] = {}
        self._functions: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
        self._calls: list[tuple[str, ast.Call]] = []
        self._imported: dict[str, set[str]] = {module: set() for module in trees}
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    self._imported[module].update(alias.name for alias in node.names)
                if isinstance(node, ast.Call) and node.args:
                    self._calls.append((module, node))
                if isinstance(node, ast.FunctionDef):
                    self._functions.setdefault(node.name, []).append((module, node))
            for node in tree.body:
                target = (
                    node.targets[0]
                    if isinstance(node, ast.Assign)
                    else getattr(node, "target", None)
                )
                if (
                    isinstance(target, ast.Name)
                    and isinstance(node, (ast.Assign, ast.AnnAssign))
                    and node.value
                ):
                    self._values[module, target.id] = node.value

    def find_texts(self) -> Iterator[tuple[str, int, str, str]]:
        """Yield module, line, class and message of each error that is made, and of each constant with our prefix."""
        for module, node in self._calls:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.endswith("Error"):
                for text in self.read(module, node.args[0]):
                    yield module, node.lineno, name, text
        for (module, _), value in self._values.items():
            for text in self.read(module, value):
                if text.startswith("ovpatch: "):
                    yield module, value.lineno, "constant", text

    def read(self, module: str, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the messages that an expression may have, with ``{…}`` for what is not known."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.IfExp):
            return [*self.read(module, node.body, depth), *self.read(module, node.orelse, depth)]
        if isinstance(node, ast.Name) and (module, node.id) in self._values and depth < 4:
            return self.read(module, self._values[module, node.id], depth + 1)
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.FormattedValue) else part for part in node.values
            ]
            return self._join(module, parts, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._join(module, [node.left, node.right], depth)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "format"
        ):
            return self.read(module, node.func.value, depth)
        if isinstance(node, ast.Call) and depth < 4:
            return self._read_function(module, ast.unparse(node.func), depth)
        return []

    def _join(self, module: str, parts: list[ast.expr], depth: int) -> list[str]:
        found = [""]
        for part in parts:
            # One reading for each part but the last keeps the number of messages small.
            texts = self.read(module, part, depth) or [f"{{{ast.unparse(part)}}}"]
            found = [
                before + text
                for before in found
                for text in (texts if part is parts[-1] else texts[:1])
            ]
        return found

    def _read_function(self, module: str, called: str, depth: int) -> list[str]:
        name = called.split(".")[-1]
        candidates = self._functions.get(name, [])
        imported = self._imported[module]
        # A parameter may have the name of another module's function.
        is_known = name in imported or called.partition(".")[0] in imported
        own = [pair for pair in candidates if pair[0] == module] or (candidates if is_known else [])
        if len(own) != 1:
            return []
        returned = [
            node.value
            for node in ast.walk(own[0][1])
            if isinstance(node, ast.Return) and node.value
        ]
        return [
            text for value in returned for text in self.read(own[0][0], value, depth + 1) if text
        ]


def has_remedy(text: str) -> bool:
    """Return whether the last sentence of a message, or a clause of it, begins with a verb of :data:`VERBS`."""
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n+", text.strip()) if part.strip()]
    clauses = CLAUSES.split(sentences[-1]) if sentences else []
    words = [re.match(r"[A-Za-z]+", clause.strip()) for clause in clauses]
    return any(word is not None and word[0].lower() in VERBS for word in words)


def find_without_remedy(sources: Sources) -> tuple[list[str], set[str]]:
    """Return the messages without a remedy that no exception allows, and the exceptions that are used."""
    found, used = [], set()
    for module, line, kind, text in sources.find_texts():
        if has_remedy(text):
            continue
        reasons = [
            key for key in WITHOUT_REMEDY if key == kind or f"{module}: {text}".startswith(key)
        ]
        used.update(reasons)
        if not reasons:
            found.append(f"{module}:{line} {kind}: ...{text[-160:]}")
    return found, used


def find_reasons_with_remedies(trees: dict[str, ast.Module]) -> list[str]:
    """Return the constants of reasons that are no clause, because they have a remedy or end in a full stop."""
    sources, found = Sources(trees), []
    for module, tree in trees.items():
        for node in tree.body:
            name = getattr(getattr(node, "target", None), "id", "")
            if "REASON_" in name and isinstance(node, ast.AnnAssign) and node.value:
                found += [
                    f"{module}.{name}"
                    for text in sources.read(module, node.value)
                    if has_remedy(text) or ". " in text or text.endswith(".")
                ]
    return found


def make_sources(**texts: str) -> Sources:
    return Sources({name: ast.parse(text) for name, text in texts.items()})


def test_a_text_without_a_remedy_is_found() -> None:
    lacking = (
        "raise ValueError('it is wrong')",
        "raise ValueError(f'it is {wrong}. The reason is unknown.')",
        "_ERROR = 'ovpatch: it is wrong: {}.'\nraise RuntimeError(_ERROR.format(1))",
        "def describe(): return 'it is wrong'\nraise ValueError(describe())",
        "raise ValueError('Set it.' if x else 'it is wrong')",
        "_LOST = 'ovpatch: it was lost.'",
        "def make(): return MyError('it was ' + why + ' lost')",
    )
    for text in lacking:
        assert find_without_remedy(make_sources(m=text))[0], text
    for text in (
        "f'it is {wrong}. Set it.'",
        "'it is wrong: set it'",
        "'it is. Remove it, or turn it off.'",
    ):
        assert not find_without_remedy(make_sources(m=f"raise ValueError({text})"))[0], text


@functools.cache
def read_trees() -> dict[str, ast.Module]:
    files = [
        path for folder in ("ovpatch", "plugins") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    names = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("plugins.")
        for path in files
    }
    return {
        names[path].removesuffix(".__init__"): ast.parse(path.read_text(encoding="utf-8"))
        for path in files
    }


def test_reasons_are_clauses_since_errors_quote_them_before_their_remedy() -> None:
    found = ast.parse("_REASON_A: Final = 'it is. Set it'\nREASON_B: Final = 'it is, since it was'")
    assert find_reasons_with_remedies({"m": found}) == ["m._REASON_A"]
    assert not find_reasons_with_remedies(read_trees())


def test_every_error_text_ends_with_a_remedy() -> None:
    sources = Sources(read_trees())
    assert len(list(sources.find_texts())) > 300
    found, used = find_without_remedy(sources)
    assert not found, "\n".join(found)
    assert used == set(WITHOUT_REMEDY), "exceptions that no text needs"
