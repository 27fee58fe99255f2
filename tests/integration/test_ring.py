"""Rings of real processes answer, token for token, what transformers answers in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.integration.models import talking_checkpoint
from tests.integration.oracle import PROMPTS, answers, demonstration_model
from tests.integration.processes import CODE, Process, machine

TOKENS = 48


async def told(process: Process, prompts: Sequence[str]) -> str:
    """Everything a member prints to these prompts, one a line."""
    for n, prompt in enumerate(prompts):
        await process.say(prompt)
        await process.until_count(" tokens, ", n + 1)
    return process.out


FLOAT32 = ("--dtype", "float32", "--max-tokens", str(TOKENS), "--context", "512")


@pytest.fixture(scope="module")
def smollm() -> Path:
    return demonstration_model()


@pytest.fixture(scope="module")
def smollm_answers(smollm: Path) -> list[str]:
    return answers(smollm, PROMPTS, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2, 3])
async def test_the_demonstration_model_answers_as_in_transformers(
    members: int, smollm: Path, smollm_answers: list[str]
) -> None:
    async with machine() as here:
        ring = await here.ring(smollm, members, *FLOAT32, friend_options=("--max-tokens", str(TOKENS)))
        asker = ring[-1]
        assert await told(asker, PROMPTS) == "".join(f"{answer}\n" for answer in smollm_answers)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"tied": True, "sharded": True},
    "qwen2": {"tied": False},
    "qwen3": {"tied": False, "sharded": True, "head_dim": 32, "attention_bias": True},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}


SIZES = {"qwen3_moe": (3,)}  # rings of so many members; the others in all three


@pytest.mark.parametrize(
    ("family", "members"), [(family, size) for family in VARIANTS for size in SIZES.get(family, (1, 2, 3))]
)
async def test_a_family_answers_as_in_transformers(
    family: str, members: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = talking_checkpoint(tmp_path_factory.mktemp("models") / family, family, **VARIANTS[family])
    wanted = "".join(f"{answer}\n" for answer in answers(folder, PROMPTS[:4], TOKENS))
    async with machine() as here:
        ring = await here.ring(folder, members, *FLOAT32, friend_options=("--max-tokens", str(TOKENS)))
        assert await told(ring[0], PROMPTS[:4]) == wanted


async def test_everybody_asks_at_once_and_nobody_hears_anothers_answer(tmp_path: Path) -> None:
    folder = talking_checkpoint(tmp_path / "tiny")
    wanted = [f"{answer}\n" for answer in answers(folder, PROMPTS[:6], TOKENS)]
    async with machine() as here:
        ring = await here.ring(folder, 3, *FLOAT32, friend_options=("--max-tokens", str(TOKENS)))
        heard: list[str] = [""] * 3

        async def ask(n: int) -> None:
            heard[n] = await told(ring[n], PROMPTS[n * 2 : n * 2 + 2])

        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(ask, n)
        assert heard == [wanted[n] + wanted[n + 1] for n in (0, 2, 4)]


async def test_a_guest_asks_lends_nothing_and_leaves_the_ring_serving(tmp_path: Path) -> None:
    folder = talking_checkpoint(tmp_path / "tiny")
    wanted = [f"{answer}\n" for answer in answers(folder, PROMPTS[:3], TOKENS)]
    async with machine() as here:
        ring = await here.ring(folder, 2, *FLOAT32, friend_options=("--max-tokens", str(TOKENS)))
        code = await ring[0].until(CODE)
        guest = await here.node("--join", code, "--guest", "--name", "visitor", "--max-tokens", str(TOKENS))
        await guest.until("serving: every member may ask")
        assert await told(guest, PROMPTS[:2]) == wanted[0] + wanted[1]
        assert "measuring" not in guest.err
        await guest.hang_up()
        assert await guest.wait() == 0
        await ring[0].until("no guests any more")
        assert await told(ring[1], PROMPTS[2:3]) == wanted[2]
        assert ring[0].out == ""


async def test_shares_are_held_as_given_and_the_trace_tells_of_them(tmp_path: Path) -> None:
    folder = talking_checkpoint(tmp_path / "tiny", blocks=6)
    trace = tmp_path / "trace.jsonl"
    async with machine() as here:
        ring = await here.ring(folder, 3, *FLOAT32, "--shares", "1,2,3", "--trace", str(trace))
        await told(ring[0], PROMPTS[:1])
        assert "1 member" not in ring[0].err
    lines = trace.read_text()
    assert all(f'"what":"{what}"' in lines for what in ("plan", "path", "batch", "answer"))


async def test_a_pipe_asks_prints_and_leaves(tmp_path: Path) -> None:
    folder = talking_checkpoint(tmp_path / "tiny")
    wanted = "".join(f"{answer}\n" for answer in answers(folder, PROMPTS[:2], TOKENS))
    async with machine() as here:
        host = await here.node("--host", "--model", str(folder), "--members", "1", *FLOAT32)
        for prompt in PROMPTS[:2]:
            await host.say(prompt)
        await host.hang_up()
        assert await host.wait() == 0
        assert host.out == wanted


async def test_a_pipe_whose_question_is_refused_says_so_with_its_exit_code(tmp_path: Path) -> None:
    folder = talking_checkpoint(tmp_path / "tiny")
    async with machine() as here:
        host = await here.node("--host", "--model", str(folder), "--members", "1", *FLOAT32)
        await host.say("far too long " * 500)
        await host.say(PROMPTS[0])
        await host.hang_up()
        assert await host.wait() == 1
        assert host.out.strip() == answers(folder, PROMPTS[:1], TOKENS)[0].strip()
        assert host.err.splitlines()[-1] == "error: 1 of the questions got no answer: why stands above"
