"""A trace written, read, told and drawn."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kafila import cli
from kafila.errors import TraceError
from kafila.plan import Plan, Workload, plan_session
from kafila.trace import TraceFile
from kafila.trace_plot import MOST_DOTS, svg, ticks
from kafila.trace_reading import read_trace
from kafila.trace_report import StageTimes, report, stage_times
from tests.plan.oracles import MODEL, member

NAMES = ("ada", "bob & <co>", "eve")


def plan() -> Plan:
    found = plan_session([member(name) for name in NAMES], MODEL, Workload(64, 2), anchor=0)
    assert isinstance(found, Plan)
    return found


def batch(stage_s: tuple[float, ...], *, rows: int = 1, phase: str = "decode") -> dict[str, Any]:
    return {
        "batch": 1,
        "rows": rows,
        "phase": phase,
        "stage_s": list(stage_s),
        "circuit_s": sum(stage_s) + 0.01,
        "hop_bytes": 64 * rows,
        "back_bytes": 64 if phase == "prefill" else 64 * rows,
    }


ANSWER = {"finish": "stop", "prompt_tokens": 9, "answer_tokens": 11, "first_token_s": 0.5, "rest_s": 2.0}


def written(path: Path, records: list[tuple[str, dict[str, Any]]]) -> Path:
    text = io.StringIO()
    recorder = TraceFile(text)
    for number, (what, facts) in enumerate(records):
        recorder.record(what, 100.0 + number, facts)
    path.write_text(text.getvalue())
    return path


def session(path: Path, measured: tuple[float, ...] = (0.004, 0.005, 0.006)) -> Path:
    made = plan()
    return written(
        path,
        [
            ("reachable", {"candidates": []}),
            ("path", {"member": made.names[1], "news": "path changed", "kind": "relayed"}),
            ("plan", {"plan": made.to_json()}),
            ("path", {"member": made.names[1], "news": "path changed", "kind": "direct"}),
            ("path", {"member": made.names[2], "news": "a datagram's size"}),
            ("batch", batch((0.1, 0.2, 0.3), rows=30, phase="prefill")),
            ("batch", batch((9.0, 9.0, 9.0), rows=2)),
            *[("batch", batch(tuple(scale * time for time in measured))) for scale in (1.0, 1.0, 7.0)],
            ("answer", ANSWER),
        ],
    )


def test_medians_of_one_row_stand_beside_what_was_predicted(tmp_path: Path) -> None:
    (epoch,) = read_trace(session(tmp_path / "t.jsonl")).epochs
    times = stage_times(epoch)
    assert [one.median_s for one in times] == [0.004, 0.005, 0.006]
    assert [one.predicted_s for one in times] == list(epoch.plan.stage_s or ())
    for one in times:
        assert one.predicted_s is not None
        assert one.median_s is not None
        assert one.error == pytest.approx((one.predicted_s - one.median_s) / one.median_s)


def test_the_report_tells_stages_circuit_prefill_edges_and_answers(tmp_path: Path) -> None:
    made = plan()
    lines = report(read_trace(session(tmp_path / "t.jsonl"))).splitlines()
    text = "\n".join(lines)
    assert "Decode, 3 of 4 batches, those of one row:" in text
    (second,) = [line for line in lines if line.startswith(f"  {made.names[1]}  ") and "%" in line]
    predicted = (made.stage_s or ())[1]
    assert f"{predicted * 1e3:.2f}" in second
    assert "5.00" in second
    assert f"{predicted / 0.005 - 1:+.1%}" in second
    (circuit,) = [line for line in lines if line.startswith("  circuit")]
    assert "25.00" in circuit
    assert "Prefill, 1 batches, median 30 rows:" in text
    assert "300.00" in text
    edges = {line.split("  ")[1]: line for line in lines if " -> " in line}
    assert " direct " in edges[f"{made.names[0]} -> {made.names[1]}"]
    assert "not seen from here" in edges[f"{made.names[1]} -> {made.names[2]}"]
    assert " relayed " in edges[f"{made.names[2]} -> {made.names[0]}"]
    assert "Every edge carried 320 bytes of decode rows, median 64 a batch." in text
    assert (
        "Every edge but the last carried 1,920 bytes of prefill rows, median 1,920 a batch; "
        "the last, back to the head, 64 bytes, median 64."
    ) in text
    assert "1 answers: median 5.0 tokens/s, first token after 0.50 s." in text


def test_a_members_trace_has_no_batches_and_says_so(tmp_path: Path) -> None:
    made = plan()
    path = written(
        tmp_path / "t",
        [("plan", {"plan": made.to_json()}), *[("path", {"member": made.names[n], "kind": "direct"}) for n in (0, 2)]],
    )
    text = report(read_trace(path))
    assert "No batch in this trace" in text
    (unseen,) = [line for line in text.splitlines() if "not seen" in line]
    assert unseen.startswith(f"  {made.names[2]} -> {made.names[0]}")


def test_every_plan_has_a_part_of_its_own(tmp_path: Path) -> None:
    whole = session(tmp_path / "a").read_text()
    path = tmp_path / "b"
    path.write_text(whole + whole)
    first, second = read_trace(path).epochs
    assert len(first.batches) == len(second.batches) == 5
    assert report(read_trace(path)).count("Decode,") == 2


def test_a_line_that_a_killed_node_did_not_finish_is_left_out_and_said(tmp_path: Path) -> None:
    path = session(tmp_path / "t")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    trace = read_trace(path)
    assert trace.cut
    assert trace.epochs[0].answers == []
    assert len(trace.epochs[0].batches) == 5
    assert "last line is cut off" in report(trace)


@given(st.data())
def test_any_cut_is_read_or_refused_in_words(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = session(tmp_path_factory.mktemp("cut") / "t")
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    has_plan = b'"what":"plan"' in path.read_bytes().rpartition(b"\n")[0]
    with nullcontext() if has_plan else pytest.raises(TraceError, match="holds no plan"):
        report(read_trace(path))


@given(st.binary(max_size=80), st.booleans())
def test_foreign_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, line: bool) -> None:
    path = tmp_path_factory.mktemp("foreign") / "t"
    path.write_bytes(data + b"\n" * line)
    with pytest.raises(TraceError):
        read_trace(path)


def _damaged(change: Callable[[dict[str, Any]], object]) -> str:
    facts = batch((0.1, 0.2, 0.3))
    change(facts)
    return json.dumps({"at_s": 1.0, "what": "batch", **facts})


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "null",
        "[" * 100_000,
        '{"at_s": "x", "what": "batch"}',
        '{"at_s": 1, "what": "plan", "plan": "{}"}',
        '{"at_s": 1, "what": "plan"}',
        '{"at_s": 1, "what": "path", "member": 3, "kind": "direct"}',
        _damaged(lambda facts: facts.pop("stage_s")),
        _damaged(lambda facts: facts.update(stage_s=[0.1])),
        _damaged(lambda facts: facts.update(stage_s=[0.1, 0.2, float("nan")])),
        _damaged(lambda facts: facts.update(phase="both")),
        _damaged(lambda facts: facts.update(rows=-1)),
        _damaged(lambda facts: facts.update(rows=True)),
        _damaged(lambda facts: facts.update(circuit_s=None)),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = session(tmp_path / "t")
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(TraceError, match="line 12 cannot be read"):
        read_trace(path)


def test_batches_of_an_older_version_have_no_bytes(tmp_path: Path) -> None:
    facts = batch((0.1, 0.2, 0.3))
    del facts["hop_bytes"], facts["back_bytes"]
    path = written(tmp_path / "t", [("plan", {"plan": plan().to_json()}), ("batch", facts)])
    assert "Every edge carried" not in report(read_trace(path))


def test_where_nothing_is_said_of_what_came_back_all_rows_did(tmp_path: Path) -> None:
    facts = batch((0.1, 0.2, 0.3), rows=30, phase="prefill")
    del facts["back_bytes"]
    path = written(tmp_path / "t", [("plan", {"plan": plan().to_json()}), ("batch", facts)])
    assert "Every edge carried 1,920 bytes of prefill rows, median 1,920 a batch." in report(read_trace(path))


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    done = CliRunner().invoke(cli.node, ["trace", str(session(tmp_path / "t")), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "Median error of the stages" in done.output
    root = ET.parse(picture).getroot()  # noqa: S314  - our own
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 9  # three batches of one row in three stages
    words = "".join("".join(text.itertext()) for text in root.findall(f"{space}text"))
    assert "bob & <co>" in words


@pytest.mark.parametrize(
    ("content", "picture", "said"),
    [
        (None, None, "cannot be read"),
        ("hello\n", None, "is no trace"),
        ("", None, "holds no plan"),
        ("session", "out.gif", "written as .svg or .png"),
        ("session", "missing/out.svg", "cannot be written"),
    ],
)
def test_what_goes_wrong_is_one_line_and_exit_code_one(
    tmp_path: Path, content: str | None, picture: str | None, said: str
) -> None:
    path = tmp_path / "t"
    if content == "session":
        session(path)
    elif content is not None:
        path.write_text(content)
    options = [] if picture is None else ["--plot", str(tmp_path / picture)]
    done = CliRunner().invoke(cli.node, ["trace", str(path), *options])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_png_is_drawn_where_the_library_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    done = CliRunner().invoke(cli.node, ["trace", str(session(tmp_path / "t")), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_the_library_a_png_is_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    done = CliRunner().invoke(cli.node, ["trace", str(session(tmp_path / "t")), "--plot", str(tmp_path / "out.png")])
    assert done.exit_code == 1
    assert "pip install 'kafila[plot]'" in done.stderr


@given(st.floats(1e-3, 1e6))
def test_ticks_are_few_and_within(top_ms: float) -> None:
    found = list(ticks(top_ms))
    assert found[0] == 0
    assert found[-1] <= top_ms * (1 + 1e-9)
    assert 4 <= len(found) <= 11


def test_many_batches_are_thinned_out() -> None:
    stage = StageTimes("a", "0-3", 0.001, tuple(0.001 for _ in range(10 * MOST_DOTS)))
    assert 0.9 * MOST_DOTS <= svg([stage], "t").count("<circle") <= MOST_DOTS
    assert svg([StageTimes("a", "0-3", None, ())], "t").count("<circle") == 0


def test_a_trace_that_cannot_be_written_any_more_ends_and_says_so_once() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    recorder = TraceFile(Full(), told.append)
    for _ in range(3):
        recorder.record("path", 1.0, {})
    assert told == ["No space left on device"]
