"""What a conversation's next turn costs: the new text, or all of it again?

    python bench/turns.py [--json] [--model FOLDER] [--rounds N]

A ring of two processes hears a first turn of 256 to 2,048 tokens, answers, and hears a second turn of a few words.
``computed_over_new_tokens`` is how many tokens the second turn computes over how many it adds to what was computed
before; ``longest_over_shortest`` compares the time to the second turn's first token after the longest and the shortest
first turn (a whole conversation computed again would take eight times as long); ``second_over_first_turn`` is, for the
longest, the second turn's time to the first token over the first's.
"""

from __future__ import annotations

import json
import platform
import statistics

from asker import Asked, Asker, asker
from concurrency import Prompts
from telling import command, tell

TARGETS = {"computed_over_new_tokens": "<=1.1", "longest_over_shortest": "<=2.5"}
LENGTHS = (256, 512, 1024, 2048)
ANSWER_TOKENS = 24
NEXT = "And then? Tell me in a few words what became of the travellers and of their camels."


def turns(ring: Asker, text: str) -> tuple[float, float, float]:
    """First tokens' times of the first and second turn, and the second's computed over its new tokens."""
    (first,) = ring.ask(Asked(ANSWER_TOKENS, turns=[text]))
    (second,) = ring.ask(Asked(1, turns=[text, first.text, NEXT]))
    known = first.prompt_tokens + ANSWER_TOKENS
    computed = (second.prompt_tokens - second.reused_tokens) / (second.prompt_tokens - known)
    return first.token_at[0] - first.asked_at, second.token_at[0] - second.asked_at, computed


def main() -> None:
    """Measure and print."""
    options = command(__doc__, rounds=3).parse_args()
    blocks = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    half = blocks // 2
    prompts = Prompts(options.model)
    seen: dict[int, list[tuple[float, float, float]]] = {length: [] for length in LENGTHS}
    with asker(options.model, [half, blocks - half], threads=1, slots=1) as ring:
        turns(ring, prompts.of(LENGTHS[-1]))  # warm
        for _ in range(options.rounds):
            for length in LENGTHS:
                seen[length].append(turns(ring, prompts.of(length)))
    second = {length: statistics.median(one for _, one, _ in found) for length, found in seen.items()}
    longest = LENGTHS[-1]
    figures = {
        "computed_over_new_tokens": statistics.median(share for found in seen.values() for _, _, share in found),
        "longest_over_shortest": second[longest] / second[LENGTHS[0]],
        "second_over_first_turn": second[longest] / statistics.median(one for one, _, _ in seen[longest]),
        **{f"second_turn_after_{length}_ms": 1e3 * took for length, took in second.items()},
    }
    figures = {name: round(value, 3) for name, value in figures.items()}
    context = {"threads_a_process": 1, "rounds": options.rounds, "python": platform.python_version()}
    tell("turns", figures, TARGETS, context, as_json=options.json)


if __name__ == "__main__":
    main()
