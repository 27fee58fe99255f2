"""How often and how long a source is waited for."""

from __future__ import annotations

import pytest

from kafila.errors import FetchFailed
from kafila.shard.patience import ATTEMPTS, Attempts, Patience, retry_after_s

NOW = 1_700_000_000.0
HTTP_DATE = "Tue, 14 Nov 2023 22:14:20 GMT"  # a minute after NOW


def _patience(waits: list[float], jitter: float = 1.0) -> Patience:
    return Patience(wait=waits.append, jitter=lambda: jitter, clock=lambda: NOW)


def test_waits_double_and_end_in_words() -> None:
    waits: list[float] = []
    attempts = Attempts(_patience(waits), "model.safetensors of http://host/")
    for _ in range(ATTEMPTS - 1):
        attempts.failed("no route")
    with pytest.raises(FetchFailed, match=r"model.safetensors of http://host/ does not come \(no route, 6 times\)"):
        attempts.failed("no route")
    assert waits == [0.5, 1, 2, 4, 8]


def test_progress_begins_the_count_anew() -> None:
    waits: list[float] = []
    attempts = Attempts(_patience(waits, jitter=0.0), "it")
    for _ in range(3 * ATTEMPTS):
        attempts.failed("broken")
        attempts.progressed()
    assert waits == [0.25] * 3 * ATTEMPTS


def test_a_server_that_says_when_is_asked_then() -> None:
    waits: list[float] = []
    attempts = Attempts(_patience(waits), "it")
    attempts.failed("busy", "7")
    attempts.failed("busy", HTTP_DATE)
    attempts.failed("busy", "0")
    assert waits == [7, 60, 2]
    with pytest.raises(FetchFailed, match="asks to wait 9000 s"):
        attempts.failed("busy", "9000")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("", None), ("soon", None), ("-1", None), (" 12 ", 12.0), (HTTP_DATE, 60.0)],
)
def test_what_retry_after_means(text: str | None, seconds: float | None) -> None:
    assert retry_after_s(text, NOW) == seconds


def test_a_date_that_has_passed_means_now() -> None:
    assert retry_after_s("Tue, 14 Nov 2023 22:00:00 GMT", NOW) == 0


def test_leaving_ends_a_wait() -> None:
    patience = Patience()
    patience.stopping.set()
    with pytest.raises(FetchFailed, match="leaving"):
        Attempts(patience, "it").failed("broken")
