"""Reading traces: times are exact, ranks are found, and what is no trace is named with the remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ovpatch.insight.timeline.trace import TraceError, find_rank, load_trace, read_trace
from tests.insight.traces import Synthetic


def event(ts, dur, name="aten::mm"):
    return f'{{"ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 1, "tid": 1, "ts": {ts}, "dur": {dur}}}'


def written(path: Path, *events, base=0) -> Path:
    path.write_text(f'{{"baseTimeNanoseconds": {base}, "traceEvents": [{", ".join(events)}]}}')
    return path


@pytest.mark.parametrize(
    ("ts", "dur", "start", "end"),
    [
        ("4404684937622.820", "74.380", 4404684937622820, 4404684937697200),
        # Rounded to a multiple of 0.25 us if read as a float.
        ("1795261711123456.789", "0.001", 1795261711123456789, 1795261711123456790),
        ("5", "2", 5000, 7000),
        ("0.999", "0.001", 999, 1000),
    ],
)
def test_times_are_exact(tmp_path, ts, dur, start, end):
    (found_event,) = read_trace(written(tmp_path / "rank0.json", event(ts, dur))).events
    assert (found_event.start, found_event.end) == (start, end)


def test_times_count_from_the_base(tmp_path):
    path = written(tmp_path / "rank0.json", event("0.5", "1"), base=1_790_857_026_000_000_000)
    assert read_trace(path).events[0].start == 1_790_857_026_000_000_500


def test_packed_and_plain_are_the_same(tmp_path):
    trace = Synthetic().op("aten::mm", 0, 5).note("ovpatch::a::b", 1, 2)
    plain, packed = (read_trace(trace.write(tmp_path / name)) for name in ("a.json", "a.json.gz"))
    assert plain.events == packed.events
    assert len(plain.events) == 2


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    path = tmp_path / "rank0.json"
    path.write_text(f"[{event('1', '1')}]")
    assert read_trace(path).events[0].name == "aten::mm"


def test_events_come_by_start_the_longer_first(tmp_path):
    path = written(
        tmp_path / "rank0.json", event("5", "1", "c"), event("1", "2", "b"), event("1", "9", "a")
    )
    assert [found_event.name for found_event in read_trace(path).events] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("information", "name", "rank"),
    [
        ({"rank": 3}, "rank1.json", 3),
        (None, "rank7.json", 7),
        (None, "trace_rank-12.json.gz", 12),
        (
            None,
            "host_4242.1795261711.pt.trace.json",
            None,
        ),  # tensorboard's: process and time, no rank
        (None, "20261121.json", None),
        (None, "trace_4.json", 4),
        (None, "trace.json", None),
    ],
)
def test_the_rank_is_the_files_or_else_its_names(information, name, rank):
    assert find_rank({"distributedInfo": information} if information else {}, Path(name)) == rank


@pytest.mark.parametrize(
    ("content", "complaint", "remedy"),
    [
        (b'{"traceEvents": [{"ph": "X", ', "is not complete JSON", "record it again"),
        (
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12],
            "is not complete JSON",
            "record it again",
        ),
        (b"\xff\xfe\x00", "is not complete JSON", "record it again"),
        (b'{"weights": 1}', "has no traceEvents", "export_chrome_trace"),
        (b'{"traceEvents": []}', "no ops and no kernels", "ProfilerActivity.CPU"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a"}]}',
            "cannot be understood",
            "again",
        ),
        (b'{"traceEvents": [7]}', "cannot be understood", "again"),
        (f'{{"traceEvents": [{event("NaN", "1")}]}}'.encode(), "cannot be understood", "again"),
        (b'{"baseTimeNanoseconds": "?", "traceEvents": []}', "cannot be understood", "again"),
    ],
)
def test_what_is_no_trace_is_named_with_the_remedy(tmp_path, content, complaint, remedy):
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=complaint) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert remedy in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "none.json")


def test_numbers_in_args_do_not_matter(tmp_path):
    trace = Synthetic()
    trace.add("k", "kernel", 0, 1, occupancy=0.5)
    path = trace.write(tmp_path / "rank0.json")
    assert json.loads(path.read_text())["traceEvents"][0]["args"] == {"occupancy": 0.5}
    assert float(read_trace(path).events[0].args["occupancy"]) == 0.5
