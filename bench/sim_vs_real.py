"""The simulator against reality: rings of two and three processes on this machine, and the same rings simulated.

    python bench/sim_vs_real.py [--json] [--model FOLDER] [--rounds N]

A simulation gets two things, and nothing that was measured while this model was served. What the stages take is what a
probe says (`kafila.shard.probe`, as every member measures itself), taken between the answers while the ring waits, for
this machine's speed changes by tenths within minutes. What lies between two stages (handing over, sealing, the loopback
link) is measured on a ring of the same size that serves another model: a hop between processes whose caches are full of
weights takes ten times one that follows another. ``sim_over_real_*`` compares tokens a second of one user: the median
over answers, each with the probes before and after it.
"""

from __future__ import annotations

import kafila.shard  # noqa: F401  # isort: skip  - before torch: it says how threads wait

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the simulator of this checkout

import torch
import transformers
from predict import make_checkpoint, predict
from sessions import PROMPTS, Session
from telling import command, tell

from kafila.shard.manifest import open_checkpoint
from kafila.shard.probe import memory_of, summary
from kafila.shard.rig import Rig, Round, build_rig, cache_bytes
from kafila.shard.torch_ops import TorchOps
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
CONTEXT = 2048
ROUNDS_A_PROBE = 15
IDLE_S = 0.008
"""Before each of them: about as long as a member of these rings waits for the others. A processor that was idle, or did
something else, reads a few percent more slowly at first."""
OTHER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 9,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 49152, "tie_word_embeddings": False,
}  # fmt: skip
"""The other model: random weights, more than any cache holds, in the words of the first one's tokenizer."""


class Probe:
    """This machine as a member with one thread measures it, again and again."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        ops, config = TorchOps("cpu", "bfloat16", threads=1), open_checkpoint(folder).config
        self._sized = memory_of(ops, config, context=CONTEXT, slots=1)
        self._rig: Rig[Any] = build_rig(ops, config, time.perf_counter, cache_bytes())
        self._chunk_s = self._rig.chunk_s(time.perf_counter)
        self.rounds()  # warm

    def rounds(self) -> list[Round]:
        """Some timed tokens, in a ring's rhythm."""
        rounds = []
        for _ in range(ROUNDS_A_PROBE):
            time.sleep(IDLE_S)
            rounds.append(self._rig.round(time.perf_counter))
        return rounds

    def stages_s(self, rounds: Sequence[Round], model: ModelManifest, shares: Sequence[int]) -> list[float]:
        """What the planner makes of such rounds for each stage, round the ring."""
        capability = summary(self._sized, self._rig, rounds, self._chunk_s)
        return [predict(capability, model, blocks, head=place == 0) for place, blocks in enumerate(shares)]


def other_model(folder: Path, tokenizer_of: Path) -> Path:
    """A checkpoint that rings can serve."""
    transformers.utils.logging.disable_progress_bar()
    make_checkpoint(folder, OTHER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)
    return folder


def even_shares(blocks: int, members: int) -> list[int]:
    """As even as can be, the first ones larger."""
    share, rest = divmod(blocks, members)
    return [share + (place < rest) for place in range(members)]


def decoded(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batches of answers among a trace's records."""
    return [record for record in records if record["what"] == "batch" and record["phase"] == "decode"]


def hop_s(model: Path, members: int) -> float:
    """What lies between two stages of a ring that serves ``model``, median: of a circuit, what is no stage's."""
    with tempfile.TemporaryDirectory() as folder:
        shares = even_shares(OTHER["num_hidden_layers"], members)
        session = Session(Path(folder), model, shares, ["--max-tokens", str(TOKENS)])
        try:
            session.ready()
            for prompt in PROMPTS:
                session.ask(prompt)
            gaps = [batch["circuit_s"] - sum(batch["stage_s"]) for batch in decoded(session.records())]
            return float(statistics.median(gaps)) / members
        finally:
            session.stop()


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
    trial = Trial("processes", str(folder), Net.OVERHEAD, shares=tuple(shares), context=CONTEXT, divide_head=True)
    outcome = run_fleet(trial, fleet, devices, edge_s=edge_s)
    if not isinstance(outcome, Outcome):
        raise SystemExit(f"the simulated session was declined: {outcome.text}")
    return outcome.one_user


@dataclass
class Comparison:
    """One ring's answers: tokens a second, real and simulated; and seconds of every stage, probed and served."""

    real: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)
    probed_s: list[list[float]] = field(default_factory=list)
    served_s: list[list[float]] = field(default_factory=list)


def compare(folder: Path, model: ModelManifest, probe: Probe, members: int, edge_s: float, rounds: int) -> Comparison:
    """Ask, probing before and after every answer, and simulate each."""
    shares = even_shares(model.blocks, members)
    found = Comparison()
    with tempfile.TemporaryDirectory() as place:
        session = Session(Path(place), folder, shares, ["--max-tokens", str(TOKENS)])
        try:
            session.ready()
            session.ask(PROMPTS[0])  # warm
            before = probe.rounds()
            for prompt in PROMPTS * rounds:
                known = len(session.records())
                answer = session.ask(prompt)
                after = probe.rounds()
                stage_s = probe.stages_s([*before, *after], model, shares)
                found.real.append((answer["answer_tokens"] - 1) / answer["rest_s"])
                found.simulated.append(simulated(folder, model, shares, stage_s, edge_s))
                found.probed_s.append(stage_s)
                found.served_s += [batch["stage_s"] for batch in decoded(session.records()[known:])]
                before = after
        finally:
            session.stop()
    return found


def medians_ms(times_s: Sequence[Sequence[float]]) -> list[float]:
    """Of each stage."""
    return [round(statistics.median(stage) * 1e3, 2) for stage in zip(*times_s, strict=True)]


def main() -> None:
    """Measure, simulate, and print."""
    options = command(__doc__, rounds=2).parse_args()
    model, probe = load_model(str(options.model)), Probe(options.model)
    figures: dict[str, float] = {}
    context: dict[str, object] = {"tokens": TOKENS, "python": platform.python_version(), "processors": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        other = other_model(Path(folder), options.model)
        for members in (2, 3):
            edge_s = hop_s(other, members)
            found = compare(options.model, model, probe, members, edge_s, options.rounds)
            ratios = [ours / real for ours, real in zip(found.simulated, found.real, strict=True)]
            figures |= {
                f"hop_{members}_ms": edge_s * 1e3,
                f"real_{members}_tokens_per_s": statistics.median(found.real),
                f"sim_{members}_tokens_per_s": statistics.median(found.simulated),
                f"sim_over_real_{members}": statistics.median(ratios),
            }
            context[f"stages_{members}_ms"] = {
                "probed": medians_ms(found.probed_s),
                "served": medians_ms(found.served_s),
            }
    figures["worst_off"] = max(abs(figures[f"sim_over_real_{members}"] - 1) for members in (2, 3))
    tell("sim_vs_real", figures, TARGETS, context, as_json=options.json)
    if not options.json:
        for name, stages in context.items():
            print(f"{name:22} {stages}")


if __name__ == "__main__":
    main()
