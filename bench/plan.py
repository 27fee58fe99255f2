"""How long planning takes, over members and blocks: ``python bench/plan.py [--json]``.

Fleets are drawn from a fixed seed: bandwidths 80 to 1,300 GB/s, memories that hold the model 1.5 to 4 times over
together, round trips of 5 to 120 ms, all NAT classes. Every plan searches both objectives, for one user and for four.
The figure is the slowest of the fleets, each the best of its repeats (a shared machine only ever adds).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from random import Random

from kafila.plan import Member, ModelManifest, Plan, Workload, plan_session
from kafila.types import NatClass
from sims.models import load_model

MEMBERS = (2, 5, 9, 12, 16, 24, 32)
BLOCKS = (32, 64, 96)
FLEETS = 3
REPEATS = 3
WORKLOAD = Workload(context=4096, concurrency=4)


def fleet(random: Random, members: int, model: ModelManifest) -> list[Member]:
    """Members that can hold the model together."""
    needed = model.blocks * (model.block_bytes * 1.1) + model.head_bytes
    return [
        Member(
            name=f"member {number}",
            memory_bytes=round(random.uniform(1.5, 4.0) * needed / members + 2 * model.head_bytes),
            bandwidth_bytes_per_s=random.uniform(80e9, 1300e9),
            overhead_s=random.uniform(20e-6, 100e-6),
            flops=None,
            rtt_s=random.uniform(0.005, 0.12),
            nat=random.choice(list(NatClass)),
        )
        for number in range(members)
    ]


def slowest_ms(members: int, blocks: int) -> float:
    """The slowest fleet's planning time."""
    random = Random(members * 1000 + blocks)
    model = replace(load_model("Qwen3-32B"), blocks=blocks)
    slowest = 0.0
    for _ in range(FLEETS):
        asked = fleet(random, members, model)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            outcome = plan_session(asked, model, WORKLOAD, anchor=0)
            times.append(time.perf_counter() - start)
            if not isinstance(outcome, Plan):
                raise SystemExit(f"a fleet of {members} was declined: {outcome.message}")
        slowest = max(slowest, min(times) * 1e3)
    return slowest


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description="Planning time over members and blocks.")
    parser.add_argument("--json", action="store_true", help="one object with figures in milliseconds")
    as_json = parser.parse_args().json
    figures: dict[str, float] = {}
    if not as_json:
        print("members  " + "  ".join(f"{blocks:>3} blocks" for blocks in BLOCKS))
    for members in MEMBERS:
        row = {blocks: slowest_ms(members, blocks) for blocks in BLOCKS}
        figures |= {f"plan_ms_m{members}_k{blocks}": value for blocks, value in row.items()}
        if not as_json:
            print(f"{members:>7}  " + "  ".join(f"{value:>7.1f} ms" for value in row.values()), flush=True)
    if as_json:
        print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
