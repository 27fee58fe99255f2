"""What the local interface costs: tokens a second of a stream of server-sent events, against those of the bare ring.

    python bench/api.py [--json] [--model FOLDER] [--rounds N]

One ring of two processes, one thread each, is asked the same questions in turns at its prompt and through
``/v1/chat/completions``. The prompt's rate is the head's own (tokens after the first, over the time they took); the
stream's is a client's, from the event with the first token to the one with the last. Reported is the median of the
pairs' ratios, and how much later than the head a client has the first token: with a page that looks on each second, as
an open browser does.
"""

from __future__ import annotations

import http.client
import json
import platform
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sessions import PROMPTS, Session, sessions
from telling import command, tell

TARGETS = {"sse_over_ring": ">=0.97"}
TOKENS = 96
LOOK_EVERY_S = 1.0
"""How often an open page asks for the ring."""


@dataclass(frozen=True)
class Streamed:
    """One answer as a client had it."""

    tokens: int
    first_s: float
    """From the request to the first token."""
    rest_s: float

    @property
    def rate(self) -> float:
        """Tokens a second, the first left out."""
        return (self.tokens - 1) / self.rest_s


def stream(where: str, prompt: str) -> Streamed:
    """Ask for one answer, over a connection of its own, and read it as it comes."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(where)
    connection.connect()
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    at, tokens = list[float](), 0
    for line in response:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        tokens = event["usage"]["completion_tokens"] if event["usage"] else tokens
        if any(choice["delta"].get("content") for choice in event["choices"]):
            at.append(now)
    connection.close()
    return Streamed(tokens, at[0] - began, at[-1] - at[0])


@contextmanager
def onlooker(where: str) -> Iterator[None]:
    """Asks for the ring again and again, as an open page does."""
    done = threading.Event()

    def look() -> None:
        connection = http.client.HTTPConnection(where)
        while not done.wait(LOOK_EVERY_S):
            connection.request("GET", "/ring")
            connection.getresponse().read()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rate(answer: dict[str, Any]) -> float:
    """The prompt's decode rate, tokens a second."""
    return (int(answer["answer_tokens"]) - 1) / float(answer["rest_s"])


def measure(ring: Session, rounds: int) -> dict[str, float]:
    """The figures of one session."""
    where = urlsplit(ring.api).netloc
    ring.ask(PROMPTS[0])  # warm
    stream(where, PROMPTS[0])
    ratios, rates, later_s = list[float](), list[float](), list[float]()
    with onlooker(where):
        for n in range(rounds * len(PROMPTS)):
            prompt = PROMPTS[n % len(PROMPTS)]
            bare = None if n % 2 else rate(ring.ask(prompt))
            streamed = stream(where, prompt)
            told = ring.answers()[-1]
            bare = rate(ring.ask(prompt)) if bare is None else bare
            ratios.append(streamed.rate / bare)
            rates.append(streamed.rate)
            later_s.append(streamed.first_s - float(told["first_token_s"]))
    return {
        "sse_over_ring": statistics.median(ratios),
        "sse_tokens_per_s": statistics.median(rates),
        "first_token_later_ms": statistics.median(later_s) * 1e3,
    }


def main() -> None:
    """Measure and print."""
    options = command(__doc__, rounds=3).parse_args()
    blocks = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    half = blocks // 2
    with sessions(options.model, [[half, blocks - half]], ["--max-tokens", str(TOKENS)]) as (ring,):
        figures = measure(ring, options.rounds)
    context = {"threads_a_process": 1, "pairs": options.rounds * len(PROMPTS), "python": platform.python_version()}
    tell("api", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main()
