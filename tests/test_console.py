"""Lines that replace each other on a terminal, and do not flood a log."""

from __future__ import annotations

import errno
import io
import os

import pytest

from kafila.console import PROGRESS_EVERY_S, StderrConsole


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("kafila.console.time.monotonic", lambda: now[0])
    return now


def test_progress_in_a_log_comes_now_and_then(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    console = StderrConsole()
    for second in range(25):
        clock[0] = 100.0 + second
        console.progress(f"at {second}")
    console.status("done")
    shown = capsys.readouterr().err.splitlines()
    assert PROGRESS_EVERY_S == 10
    assert shown == ["at 0", "at 10", "at 20", "done"]


def test_progress_on_a_terminal_stays_in_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafila.console.sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("kafila.console.shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    console = StderrConsole()
    console.progress("one")
    console.progress("two " * 10)
    console.status("done")
    shown = capsys.readouterr().err
    lines = [line.rpartition("\x1b[2K")[2] for line in shown.split("\r")]
    assert [line.replace("\x1b[2m", "").replace("\x1b[0m", "") for line in lines] == [
        "one",
        ("two " * 10)[:19],
        "done\n",
    ]


def test_quiet_means_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    StderrConsole(quiet=True).progress("one")
    assert not capsys.readouterr().err


def test_what_cannot_be_told_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    console = StderrConsole()
    console.status("one")
    console.progress("two")
    console.error("three")
    console.invite("four")
