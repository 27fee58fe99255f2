"""Several people at once: a ring of two processes with one worker thread each, divided by a plan.

    python bench/concurrency.py [--json] [--model FOLDER] [--rounds N] [--llama PROGRAM] [--gguf FILE]

``gain_N_users`` is the ring's tokens a second with N answers running over those with one, ``least_rate_2_users`` the
slower of two people's rates over one's alone. ``first_token_over_one_process`` compares the time to the first token
after a prompt of 1,024 tokens with one process of two threads; ``worst_gap_over_median`` is a running answer's longest
wait for a token while a prompt of 2,048 tokens is read in, over its median wait before that. Every figure is the median
of rounds, each of which measures both sides one after the other.

Where llama.cpp's ``llama-batched-bench`` is on the path, or named, it runs first with the demonstration model's GGUF
file: ``llama_gain_N_users`` is what sharing batches gains there.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

from asker import Asked, Asker, Heard, asker
from batched import gains as peer_gains
from batched import peer
from telling import command, tell
from tokenizers import Tokenizer

TARGETS = {
    "gain_2_users": ">=1.8",
    "gain_4_users": ">=2.5",
    "least_rate_2_users": ">=0.85",
    "first_token_over_one_process": "<=1.15",
    "worst_gap_over_median": "<=4",
}
USERS = (1, 2, 4, 8)
ANSWER_TOKENS = 96
SHORT_TOKENS = 24
LONG_TOKENS, LONGER_TOKENS = 1024, 2048
BEFORE_TOKENS = 40
"""Tokens of a running answer before the long prompt comes: what its median gap is taken from."""
_STORY = "The caravan left at dawn, {n} camels in a row, and the sand was still cold under their feet. "


class Prompts:
    """Texts of a given length in tokens, no two with a common beginning, so that no cache helps."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._numbers = count(1)

    def of(self, tokens: int) -> str:
        """One of about so many tokens."""
        text = f"{next(self._numbers)} times: " + "".join(_STORY.format(n=n) for n in range(tokens // 12))
        ids = self._tokenizer.encode(text).ids
        return str(self._tokenizer.decode(ids[:tokens]))


def rates(heard: Sequence[Heard]) -> list[float]:
    """Tokens a second of each answer while all of them run."""
    began = max(one.token_at[0] for one in heard)
    ended = min(one.token_at[-1] for one in heard)
    return [sum(began < at <= ended for at in one.token_at) / (ended - began) for one in heard]


def crowd(ring: Asker, prompts: Prompts, users: int) -> list[float]:
    """The rates of so many people at once."""
    return rates(ring.ask(*(Asked(ANSWER_TOKENS, prompts.of(SHORT_TOKENS)) for _ in range(users))))


def first_token_s(ring: Asker, prompts: Prompts) -> float:
    """After a long prompt."""
    (heard,) = ring.ask(Asked(1, prompts.of(LONG_TOKENS)))
    return heard.token_at[0] - heard.asked_at


def worst_gap(ring: Asker, prompts: Prompts) -> float:
    """Of a running answer while a longer prompt is read in, over its median gap before."""
    for tokens in (1024, 1536):
        running, long = ring.ask(
            Asked(tokens, prompts.of(SHORT_TOKENS)), Asked(1, prompts.of(LONGER_TOKENS), after_tokens=BEFORE_TOKENS)
        )
        if running.token_at[-1] > long.token_at[0]:  # it ran all the time
            break
    else:
        raise SystemExit("the running answer ended before the long prompt was read in")
    gaps = [(later, later - earlier) for earlier, later in pairwise(running.token_at)]
    usual = statistics.median(gap for at, gap in gaps if at <= long.asked_at)
    return max(gap for at, gap in gaps if long.asked_at < at <= long.token_at[0]) / usual


def measure(ring: Asker, single: Asker, prompts: Prompts, rounds: int) -> dict[str, float]:
    """All figures."""
    for one in (ring, single):  # warm, and let the scheduler see what circuits take
        one.ask(Asked(ANSWER_TOKENS, prompts.of(SHORT_TOKENS)))
        first_token_s(one, prompts)
        first_token_s(one, prompts)
    for users in USERS:
        crowd(ring, prompts, users)
    gains: dict[str, list[float]] = {}
    for _ in range(rounds):
        (alone,) = crowd(ring, prompts, 1)
        for users in USERS[1:]:
            together = crowd(ring, prompts, users)
            gains.setdefault(f"gain_{users}_users", []).append(sum(together) / alone)
            gains.setdefault(f"least_rate_{users}_users", []).append(min(together) / alone)
        gains.setdefault("tokens_per_s_alone", []).append(alone)
        first = first_token_s(ring, prompts)
        gains.setdefault("first_token_over_one_process", []).append(first / first_token_s(single, prompts))
        gains.setdefault("first_token_s", []).append(first)
        gains.setdefault("worst_gap_over_median", []).append(worst_gap(ring, prompts))
    return {name: round(statistics.median(values), 3) for name, values in gains.items()}


def main() -> None:
    """Measure and print."""
    parser = command(__doc__, rounds=3)
    parser.add_argument("--llama", help="llama.cpp's batched-bench, if it is not on the path")
    parser.add_argument("--gguf", type=Path, help="its model, if not the demonstration's")
    options = parser.parse_args()
    rates_there, words = peer(
        options.llama, options.gguf, USERS, prompt_tokens=SHORT_TOKENS, answer_tokens=ANSWER_TOKENS, threads=2
    )
    if not options.json:
        print(words)
    with (
        asker(options.model, 2, threads=1, slots=max(USERS)) as ring,
        asker(options.model, 1, threads=2, slots=2) as single,
    ):
        figures = measure(ring, single, Prompts(options.model), options.rounds)
    figures |= rates_there | peer_gains(rates_there)
    context = {
        "threads_a_process": 1,
        "rounds": options.rounds,
        "python": platform.python_version(),
        "llama": words,
    }
    tell("concurrency", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main()
