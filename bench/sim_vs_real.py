"""The simulator against reality: rings of two and three processes on this machine, and the same rings simulated.

    python bench/sim_vs_real.py [--json] [--model FOLDER] [--rounds N]

Each process probes its device while the others wait, then the ring answers. The simulation gets what the probes said
(the plan's predicted stage times, from the host's trace) and what a hop over a loopback link costs (`hop.py`), and
nothing that was measured while serving. ``sim_over_real_*`` compares tokens a second of one user, median of answers.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the simulator of this checkout

import hop
import trio
from sessions import Session
from telling import command, tell

from kafila.types import ModelManifest
from sims.fleet.device import Device
from sims.fleet.place import Net
from sims.fleet.session import run_fleet
from sims.fleet.trial import Outcome, Trial
from sims.fleets import read_fleet
from sims.models import load_model
from sims.reading import Section

TARGETS = {"worst_off": "<=0.15"}
TOKENS = 64
PROBED_WITHIN_S = 8.0
"""Python and torch start, then the probe takes up to three seconds."""
HOPS = 200
PROMPTS = (
    "Tell me a long story about a caravan that crosses a desert.",
    "Explain how bread is baked, step by step and at length.",
    "Describe the life of a lighthouse keeper in great detail.",
    "Write a long letter from a sailor to his sister.",
)


class Spaced(Session):
    """Processes that start far enough from one another for every probe to have the machine to itself."""

    def _start(self, name: str, options: Sequence[str]) -> Any:
        process = super()._start(name, options)
        time.sleep(PROBED_WITHIN_S)
        return process


def served(model: Path, shares: Sequence[int], rounds: int) -> tuple[float, list[dict[str, Any]]]:
    """Median decode rate of real answers, and the host's trace."""
    with tempfile.TemporaryDirectory() as folder:
        session = Spaced(Path(folder), model, shares, ["--max-tokens", str(TOKENS)])
        try:
            session.ready()
            session.ask(PROMPTS[0])  # warm
            answers = [session.ask(prompt) for _ in range(rounds) for prompt in PROMPTS]
            return statistics.median((a["answer_tokens"] - 1) / a["rest_s"] for a in answers), session.records()
        finally:
            session.stop()


def predicted_s(records: Sequence[dict[str, Any]]) -> list[float]:
    """What the probes made of each stage, round the ring."""
    plan = next(json.loads(record["plan"]) for record in records if record["what"] == "plan")
    return [float(stage["stage_s"]) for stage in plan["stages"]]


def measured_s(records: Sequence[dict[str, Any]]) -> list[float]:
    """What the stages then took, round the ring."""
    batches = [record["stage_s"] for record in records if record["what"] == "batch" and record["phase"] == "decode"]
    return [statistics.median(times) for times in zip(*batches, strict=True)]


async def hop_s(payload_bytes: int) -> float:
    """What a message over a loopback link takes, median."""
    async with trio.open_nursery() as nursery:
        sender, receiver = await hop.connect(nursery, 1452)
        payload = os.urandom(payload_bytes)
        await hop.hops(sender, receiver, payload, HOPS)
        times = []
        for _ in range(HOPS):
            began = time.perf_counter()
            await hop.hops(sender, receiver, payload, 1)
            times.append(time.perf_counter() - began)
        nursery.cancel_scope.cancel()
    return statistics.median(times)


def simulated(
    folder: Path, model: ModelManifest, shares: Sequence[int], stage_s: Sequence[float], edge_s: float
) -> float:
    """One user's tokens a second with devices that take ``stage_s``."""
    read = [count * model.block_bytes + (place == 0) * model.head_read_bytes for place, count in enumerate(shares)]
    rates = [size / seconds for size, seconds in zip(read, stage_s, strict=True)]
    table = {
        "name": "processes",
        "member": [
            {"name": f"m{place}", "memory_gb": 64, "bandwidth_gbps": rate / 1e9, "overhead_us": 0}
            for place, rate in enumerate(rates)
        ],
    }
    fleet = read_fleet(Section(table, "processes", {"name", "member"}))
    devices = [Device(64 * 10**9, rate, rate, 0.0, rate * 50) for rate in rates]
    trial = Trial("processes", str(folder), Net.OVERHEAD, shares=tuple(shares), context=2048)
    outcome = run_fleet(trial, fleet, devices, edge_s=edge_s)
    if not isinstance(outcome, Outcome):
        raise SystemExit(f"the simulated session was declined: {outcome.text}")
    return outcome.one_user


def main() -> None:
    """Measure, simulate, and print."""
    options = command(__doc__, rounds=2).parse_args()
    model = load_model(str(options.model))
    edge_s = trio.run(hop_s, model.hidden_bytes)
    figures: dict[str, float] = {"hop_ms": edge_s * 1e3}
    context: dict[str, object] = {"tokens": TOKENS, "python": platform.python_version(), "processors": os.cpu_count()}
    for members in (2, 3):
        share, rest = divmod(model.blocks, members)
        shares = [share + (place < rest) for place in range(members)]
        real, records = served(options.model, shares, options.rounds)
        ours = simulated(options.model, model, shares, predicted_s(records), edge_s)
        figures |= {
            f"real_{members}_tokens_per_s": real,
            f"sim_{members}_tokens_per_s": ours,
            f"sim_over_real_{members}": ours / real,
        }
        context[f"stages_{members}_ms"] = {
            "probed": [round(time_s * 1e3, 2) for time_s in predicted_s(records)],
            "served": [round(time_s * 1e3, 2) for time_s in measured_s(records)],
        }
    figures["worst_off"] = max(abs(figures[f"sim_over_real_{members}"] - 1) for members in (2, 3))
    tell("sim_vs_real", figures, TARGETS, context, as_json=options.json)
    if not options.json:
        for name, stages in context.items():
            print(f"{name:22} {stages}")


if __name__ == "__main__":
    main()
