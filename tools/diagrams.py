"""Draws the diagrams of the documentation, ``docs/pictures/*.svg``: ``python -m tools.diagrams``, or ``make figures``.

They are drawn here, and not by a library of the browser's, so that the site needs no other host and works offline.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

PICTURES: Final = Path(__file__).resolve().parent.parent / "docs" / "pictures"

#: Width of a picture, and of one of its four columns; distance of rows and height of a box; all in pixels.
WIDTH, COLUMN, ROW, HEIGHT = 800, 195, 96, 50
MARGIN: Final = 14
LINE: Final = 16

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
role="img" aria-label="{title}">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0L8 4L0 8z" fill="#37474f"/></marker></defs>
<style>text{{font:13px sans-serif;fill:#212121;text-anchor:middle}}.first{{text-anchor:start}}
.halo{{stroke:#ffffff;stroke-width:4px;paint-order:stroke}}.name{{font-weight:bold}}.small{{font-size:12px}}
rect{{fill:#e0f2f1;stroke:#00897b;rx:5px}}.plain{{fill:#f5f5f5;stroke:#9e9e9e}}.note{{fill:#fff8e1;stroke:#c9822b}}
.frame{{fill:none;stroke:#9e9e9e}}path.line{{fill:none;stroke:#37474f}}.dashed{{stroke-dasharray:5 4}}</style>
<rect width="{width}" height="{height}" style="fill:#ffffff;stroke:none"/>
"""


@dataclass(frozen=True)
class Box:
    """A part, in a grid of four columns; ``label`` has its name and, in further lines, what it does."""

    column: float
    row: float
    label: str
    columns: float = 1
    style: str = ""

    @property
    def left(self) -> float:
        """The left end of the box, in pixels."""
        return (WIDTH - 4 * COLUMN) / 2 + MARGIN + self.column * COLUMN

    @property
    def right(self) -> float:
        """The right end of the box, in pixels."""
        return self.left + self.columns * COLUMN - 2 * MARGIN

    @property
    def top(self) -> float:
        """The upper edge, in pixels."""
        return MARGIN + self.row * ROW


@dataclass(frozen=True)
class Arrow:
    """From one box to another, which are named by the first lines of their labels."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Message:
    """A call between two participants; one to itself is work. ``loop`` encloses it in a frame of that name."""

    start: str
    end: str
    label: str
    loop: str = ""


@dataclass(frozen=True)
class Note:
    """A remark over a participant's line."""

    over: str
    label: str


def _text(x: float, y: float, label: str, style: str = "small") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(label)}</text>\n' if label else ""


def _rectangle(left: float, top: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" class="{style}"/>\n'
    )


def _line(x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> str:
    style = "line dashed" if dashed else "line"
    return f'<path class="{style}" marker-end="url(#tip)" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>\n'


def _draw_box(box: Box, height: float) -> str:
    name, *rest = box.label.split("\n")
    middle = (box.left + box.right) / 2
    first = box.top + (20 if "frame" in box.style else height / 2 + 5 - len(rest) * LINE / 2)
    texts = [_text(middle, first, name, "name")]
    texts += [_text(middle, first + LINE * (index + 1), line) for index, line in enumerate(rest)]
    return _rectangle(box.left, box.top, box.right - box.left, height, box.style) + "".join(texts)


def _draw_arrow(arrow: Arrow, start: Box, end: Box) -> str:
    # Boxes of one row are connected from side to side.
    if start.row == end.row:
        left, right = sorted((start, end), key=lambda box: box.left)
        y = start.top + HEIGHT / 2
        x1, x2 = (left.right, right.left) if left is start else (right.left, left.right)
        return _line(x1, y, x2, y, arrow.dashed) + _text((x1 + x2) / 2, y - 7, arrow.label)
    shared = max(start.left, end.left), min(start.right, end.right)
    if shared[0] < shared[1]:
        x1 = x2 = sum(shared) / 2
    else:
        x1, x2 = ((box.left + box.right) / 2 for box in (start, end))
    y1, y2 = start.top + HEIGHT, end.top
    return _line(x1, y1, x2, y2, arrow.dashed) + _text(
        (x1 + x2) / 2, (y1 + y2) / 2 + 4, arrow.label, "small halo"
    )


def draw_parts(title: str, boxes: list[Box], arrows: list[Arrow]) -> str:
    """Return the SVG of parts and of who calls whom. A box of style ``frame`` encloses those below it."""
    named = {box.label.split("\n")[0]: box for box in boxes}
    bottom = max(box.top for box in boxes) + HEIGHT
    frames = [_draw_box(box, bottom + MARGIN - box.top) for box in boxes if "frame" in box.style]
    solid = [_draw_box(box, HEIGHT) for box in boxes if "frame" not in box.style]
    lines = [_draw_arrow(arrow, named[arrow.start], named[arrow.end]) for arrow in arrows]
    head = _HEAD.format(width=WIDTH, height=f"{bottom + 2 * MARGIN:g}", title=escape(title))
    return head + "".join([*frames, *lines, *solid]) + "</svg>\n"


def draw_sequence(title: str, participants: list[str], events: list[Message | Note]) -> str:
    """Return the SVG of the events of participants, from top to bottom."""
    distance = (WIDTH - 2 * MARGIN) / len(participants)
    centres = {name: MARGIN + distance * (index + 0.5) for index, name in enumerate(participants)}
    y: float = MARGIN + HEIGHT
    drawn: list[str] = []
    loop, loop_top = "", 0.0
    for event in [*events, None]:
        new = event.loop if isinstance(event, Message) else ""
        if loop and new != loop:
            y += 14
            frame = _rectangle(MARGIN, loop_top, WIDTH - 2 * MARGIN, y - loop_top, "frame dashed")
            drawn += [frame, _text(MARGIN + 8, loop_top + 16, loop, "first")]
        if new and new != loop:
            loop_top = y + 10
            y += 18
        loop = new
        if isinstance(event, Note):
            width = 24 + 6.4 * len(event.label)
            drawn.append(_rectangle(centres[event.over] - width / 2, y + 10, width, 26, "note"))
            drawn.append(_text(centres[event.over], y + 27, event.label))
            y += 38
        elif event is not None:
            y += 36
            x1, x2 = centres[event.start], centres[event.end]
            if x1 == x2:
                drawn.append(
                    f'<path class="line" marker-end="url(#tip)" d="M{x1:g} {y - 10:g}h26v14h-24"/>\n'
                )
                drawn.append(_text(x1 + 32, y, event.label, "small halo first"))
            else:
                drawn.append(
                    _line(x1, y, x2, y) + _text((x1 + x2) / 2, y - 6, event.label, "small halo")
                )
    bottom = y + 20
    lines = [
        f'<path class="line dashed" d="M{x:g} {MARGIN + HEIGHT - 10}V{bottom:g}" style="stroke:#9e9e9e"/>\n'
        for x in centres.values()
    ]
    heads = [
        _rectangle(x - distance / 2 + 8, MARGIN, distance - 16, HEIGHT - 12, "")
        + _text(x, MARGIN + 24, name, "name")
        for name, x in centres.items()
    ]
    head = _HEAD.format(width=WIDTH, height=f"{bottom + MARGIN:g}", title=escape(title))
    return head + "".join([*lines, *drawn, *heads]) + "</svg>\n"


def layers() -> str:
    """Draw the calls from a script down to the runtime."""
    boxes = [
        Box(0, 0, "your script", style="plain"),
        Box(1, 0, "ovpatch run\nlist, doctor", style="plain"),
        Box(2, 0, "import torch", style="plain"),
        Box(3, 0, "ovpatch verify\nbench, timeline, pipeline", style="plain"),
        Box(0, 1, "api\napply, revert, report", columns=2),
        Box(2, 1, "autoload"),
        Box(3, 1, "insight\nruns it twice, compares"),
        Box(0, 2, "session\nwhich features are on, with which options", columns=2),
        Box(0, 3, "patching\ntargets, slots, undo"),
        Box(1, 3, "plugins\none folder a feature"),
        Box(1, 4, "overlap\nbuckets, shards, peers"),
    ]
    arrows = [
        Arrow("your script", "api"),
        Arrow("ovpatch run", "api"),
        Arrow("import torch", "autoload", "OVPATCH_AUTO=1", dashed=True),
        Arrow("ovpatch verify", "insight"),
        Arrow("autoload", "api"),
        Arrow("insight", "autoload", dashed=True),
        Arrow("api", "session"),
        Arrow("session", "patching"),
        Arrow("session", "plugins", "hooks (pluggy)", dashed=True),
        Arrow("plugins", "overlap"),
    ]
    return draw_parts("The layers of ovpatch", boxes, arrows)


def folders() -> str:
    """Draw which folder imports which."""
    boxes = [
        Box(1, 0, "ovpatch/cli", columns=2),
        Box(2, 1, "ovpatch/insight\nverify, bench, timeline"),
        Box(0, 2, "ovpatch/session\nwhat apply() does", columns=3),
        Box(0, 3, "ovpatch/settings"),
        Box(1, 3, "ovpatch/patching\nslots, wrappers, undo"),
        Box(2, 3, "plugins/ovpatch_plugins\none folder a feature", columns=1.4),
        Box(0, 4, "ovpatch/overlap", columns=4, style="frame"),
        Box(0.1, 4.5, "peer_rpc", columns=0.9),
        Box(2, 4.5, "data_parallel", columns=0.9),
        Box(0.1, 5.4, "tensors", columns=0.9),
        Box(2, 5.4, "kernels", columns=0.9),
        Box(0.1, 6.3, "comm\ncollectives, agreement of ranks, streams", columns=3.75),
    ]
    arrows = [
        Arrow("ovpatch/cli", "ovpatch/insight"),
        Arrow("ovpatch/cli", "ovpatch/session"),
        Arrow("ovpatch/insight", "ovpatch/session"),
        Arrow("ovpatch/session", "ovpatch/settings"),
        Arrow("ovpatch/session", "ovpatch/patching"),
        Arrow("ovpatch/session", "plugins/ovpatch_plugins", "hooks (pluggy)", dashed=True),
        Arrow("plugins/ovpatch_plugins", "ovpatch/overlap"),
        Arrow("peer_rpc", "tensors"),
        Arrow("data_parallel", "tensors"),
        Arrow("data_parallel", "kernels"),
        *(Arrow(name, "comm") for name in ("tensors", "kernels")),
    ]
    return draw_parts("The folders of ovpatch", boxes, arrows)


def ddp_step() -> str:
    """Draw a step with ``ddp``."""
    script, ddp, reducer, group = participants = [
        "your script",
        "DistributedDataParallel",
        "reducer of ddp",
        "process group",
    ]
    condition = "for each gradient"
    return draw_sequence(
        "A step with ddp",
        participants,
        [
            Message(script, ddp, "forward"),
            Message(ddp, reducer, "prepare_for_forward"),
            Message(script, ddp, "loss.backward()"),
            Note(reducer, "the first output is reached: the step begins"),
            Message(reducer, reducer, "count its contribution", condition),
            Message(reducer, group, "bucket full: all_reduce", condition),
            Note(reducer, "end of backward"),
            Message(reducer, group, "what is left, and step flags"),
            Message(group, reducer, "wait"),
            Message(reducer, script, "p.grad is the average"),
        ],
    )


def sharded_step() -> str:
    """Draw a step with ``dist_optimizer``."""
    participants = ["your script", "optimizer", "this rank's shards", "other ranks"]
    script, optimizer, shards, peers = participants
    return draw_sequence(
        "A step with dist_optimizer",
        participants,
        [
            Message(script, shards, "loss.backward()"),
            Message(shards, peers, "reduce_scatter, by bucket"),
            Note(script, "p.grad is a lazy tensor"),
            Message(script, optimizer, "step()"),
            Message(optimizer, shards, "torch's step, on shards"),
            Message(shards, peers, "all_gather, by bucket"),
            Note(script, "parameters are pending"),
            Message(script, shards, "the next forward reads a parameter"),
            Message(peers, shards, "wait for its bucket"),
            Message(shards, script, "its new value"),
        ],
    )


DIAGRAMS: Final = {
    "layers": layers,
    "folders": folders,
    "ddp-step": ddp_step,
    "sharded-step": sharded_step,
}


def main() -> None:
    """Write all diagrams."""
    for name, draw in DIAGRAMS.items():
        (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
