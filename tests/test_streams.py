"""Processes whose standard streams are closed, full, or of another encoding."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEADY = "import os, socket, sys; from kafila.streams import steady_streams; steady_streams(); "


def run(script: str, redirections: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = 'exec "$0" -c "$1" ' + redirections
    return subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, STEADY + script],
        input=b"caf\xe9\n",
        capture_output=True,
        env=environment,
        check=False,
    )


def test_closed_streams_lead_nowhere_and_no_socket_takes_their_place() -> None:
    script = (
        "s = socket.socket(); print('lost'); print('lost', file=sys.stderr); "
        "os._exit(s.fileno() if not sys.stdin.read() and s.fileno() > 2 else 1)"
    )
    done = run(script, "<&- >&- 2>&-")
    assert done.returncode > 2
    assert (done.stdout, done.stderr) == (b"", b"")


def test_bytes_that_are_no_text_are_read_as_such() -> None:
    done = run("print(ascii(sys.stdin.readline()))", "", PYTHONUTF8="1")
    assert done.stdout == b"'caf\\ufffd\\n'\n"


def test_characters_that_the_encoding_lacks_are_written_as_question_marks() -> None:
    done = run("print('caf\\u00e9')", "", PYTHONIOENCODING="ascii")
    assert (done.stdout, done.returncode) == (b"caf?\n", 0)


@pytest.mark.parametrize("arguments", [["--join", "nonsense"], ["--host", "--members", "1"]])
def test_an_error_that_cannot_be_told_is_an_exit_code(arguments: list[str]) -> None:
    command = 'exec "$0" -m kafila "$@" 2>/dev/full'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
