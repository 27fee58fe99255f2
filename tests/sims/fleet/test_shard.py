"""The simulated worker: how long jobs take, and what comes of them."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from kafila.backend import Duty
from kafila.scoring import better
from kafila.shard.worker import Forward, Forwarded, Job, Loaded, Result, Sample, Sampled, Score, Scored
from kafila.types import BlockRange, Sampling, Segment
from sims.fleet.device import Device
from sims.fleet.shard import LOAD_BYTES_PER_S, SimulatedWorker
from sims.models import load_model
from sims.topology import VirtualNetwork

MODEL = load_model("Qwen3-8B")
DEVICE = Device(24 * 10**9, 400e9, 400e9, 50e-6, 100e12)
SEGMENTS = (Segment(0, 5, 1, True), Segment(1, 7, 1, True))
FORWARD = Forward(0, SEGMENTS, None, b"", "bfloat16")
SCORE = Score(0, SEGMENTS, b"", "bfloat16")
HEAD_S = MODEL.head_read_bytes / 400e9


async def did(percent: int, *jobs: Job, holds_head: bool) -> list[tuple[float, Result]]:
    """What came of jobs that were all there from the start, each with the time since loading."""
    found: list[tuple[float, Result]] = []
    net = VirtualNetwork(seed=1)
    duty = Duty(BlockRange(2, 4), holds_head, 4, 16, "bfloat16", percent)

    def note(result: Result) -> None:
        found.append((net.fabric.now, result))

    async with net.running():
        worker = SimulatedWorker(DEVICE, MODEL, duty, note, net.fabric, one_by_one=False, log=[])
        worker.start()
        for job in jobs:
            worker.submit(job)
        await trio.sleep(60)
    loaded_at, loaded = found.pop(0)
    assert isinstance(loaded, Loaded)
    held = 2 * MODEL.block_bytes + MODEL.head_bytes * (100 if holds_head else percent) // 100
    assert loaded.load_s == pytest.approx(held / LOAD_BYTES_PER_S)
    return [(at - loaded_at, result) for at, result in found]


async def test_scores_take_their_part_of_the_vocabulary_and_the_next_job_waits(autojump_clock: MockClock) -> None:
    (sent_at, sent), (scored_at, scored), (next_at, _) = await did(40, FORWARD, SCORE, FORWARD, holds_head=False)
    assert isinstance(sent, Forwarded)
    assert isinstance(scored, Scored)
    assert len(scored.best) == 2
    assert sent_at == pytest.approx(DEVICE.forward_s(MODEL, 2, SEGMENTS, 2))
    assert scored_at - sent_at == pytest.approx(0.4 * HEAD_S)
    assert next_at == pytest.approx(scored_at + sent_at)


@pytest.mark.parametrize(("last_only", "rows"), [(False, 12), (True, 2)])
async def test_a_prompts_rows_come_back_all_or_the_last_of_each(
    autojump_clock: MockClock, last_only: bool, rows: int
) -> None:
    prompts = (Segment(0, 5, 9, False), Segment(1, 0, 3, True))
    ((took_s, result),) = await did(0, Forward(0, prompts, None, b"", "bfloat16", last_only), holds_head=False)
    assert isinstance(result, Forwarded)
    assert len(result.hidden) == rows * MODEL.hidden_bytes
    assert took_s == pytest.approx(DEVICE.forward_s(MODEL, 2, prompts, 2))


async def test_the_head_draws_from_the_rest_and_the_better_is_what_it_would_have_drawn(
    autojump_clock: MockClock,
) -> None:
    ((_, scored),) = await did(40, SCORE, holds_head=False)
    assert isinstance(scored, Scored)
    samples = [Sample(0, SEGMENTS, (Sampling(),) * 2, b"", "bfloat16", partial=partial) for partial in (True, False)]
    (part_at, part), (whole_at, whole) = await did(40, *samples, holds_head=True)
    assert isinstance(part, Sampled)
    assert isinstance(whole, Sampled)
    assert part_at == pytest.approx(0.6 * HEAD_S)
    assert whole_at - part_at == pytest.approx(HEAD_S)
    assert tuple(better(*pair).token for pair in zip(part.best, scored.best, strict=True)) == whole.tokens
    assert whole.best == ()
