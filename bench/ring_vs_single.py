"""What being a ring costs: two processes with one worker thread each, against one process with one thread.

    python bench/ring_vs_single.py [--json] [--model FOLDER] [--rounds N]

Both sessions are formed first and asked the same questions in turns, so each pair meets the same machine. A pair's
figure is the ratio of its decode rates (tokens after the first, over the time they took, by the head's clock); reported
is the median of the pairs. ``rest_of_circuit_ms`` is what a token spends between stages, median over all batches.
"""

from __future__ import annotations

import json
import platform
import statistics
from typing import Any

from sessions import PROMPTS, Session, sessions
from telling import command, tell

TARGETS = {"ring_over_single": ">=0.9"}
TOKENS = 96


def rate(answer: dict[str, Any]) -> float:
    """Decode rate of an answer, tokens a second."""
    tokens, rest_s = int(answer["answer_tokens"]), float(answer["rest_s"])
    return (tokens - 1) / rest_s


def between_stages_ms(session: Session) -> float:
    """Median time of a decode circuit that was no stage's."""
    gaps = [
        record["circuit_s"] - sum(record["stage_s"])
        for record in session.records()
        if record["what"] == "batch" and record["phase"] == "decode"
    ]
    return float(statistics.median(gaps)) * 1e3


def main() -> None:
    """Measure and print."""
    options = command(__doc__, rounds=3).parse_args()
    blocks = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    half = blocks // 2
    pairs = []
    with sessions(options.model, [[blocks], [half, blocks - half]], ["--max-tokens", str(TOKENS)]) as (single, ring):
        for session in (single, ring):
            session.ask(PROMPTS[0])  # warm
        for n in range(options.rounds * len(PROMPTS)):
            prompt = PROMPTS[n % len(PROMPTS)]
            order = (single, ring) if n % 2 else (ring, single)
            rates = {id(session): rate(session.ask(prompt)) for session in order}
            pairs.append((rates[id(single)], rates[id(ring)]))
        gap_ms = between_stages_ms(ring)
    figures = {
        "ring_over_single": statistics.median(ours / alone for alone, ours in pairs),
        "ring_tokens_per_s": statistics.median(ours for _, ours in pairs),
        "single_tokens_per_s": statistics.median(alone for alone, _ in pairs),
        "rest_of_circuit_ms": gap_ms,
    }
    context = {"threads_a_process": 1, "pairs": len(pairs), "python": platform.python_version()}
    tell("ring_vs_single", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main()
