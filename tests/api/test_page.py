"""The page in a headless Chromium: what a person sees, and what hostile words cannot do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kafila.api.engine import EdgeFacts, MemberFacts, RingFacts
from kafila.api.page import PAGE
from tests.api.browser import CHROMIUM, Browser, browser
from tests.api.world import Client, ScriptedEngine, interface, part, said

HOSTILE = "<img src=x onerror='window.broken=1'>"

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: on Debian, scripts/kernel_tests.sh installs it as root"
)


def ring_of(count: int) -> RingFacts:
    names = ["ada@laptop", HOSTILE, "grace", "edsger@workstation", "barbara", "donald"]
    members = tuple(
        MemberFacts(names[i % 6], 4 * i, 4 * i + 4, 0.012, 0.011 + i / 1000, (2 + i) * 10**9, 8 * 10**9)
        for i in range(count)
    )
    edges = tuple(
        EdgeFacts("relayed" if i == 1 else "direct", 0.0123 * (i + 1), measured=i in {0, count - 1})
        for i in range(count if count > 1 else 0)
    )
    return RingFacts(0, members, edges, 0.08, 1, 2, 12345)


class Engine(ScriptedEngine):
    members = 4

    def ring(self) -> RingFacts:
        return ring_of(self.members)


@asynccontextmanager
async def page(engine: ScriptedEngine, folder: Path, key: str | None = None) -> AsyncIterator[tuple[Browser, Client]]:
    async with interface(engine, key=key) as client, browser(folder / "profile") as tab:
        await tab.go(f"http://127.0.0.1:{client.port}/")
        yield tab, client


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)""", PAGE)
    assert re.findall(r"https?://[^\"']+", PAGE) == ["http://www.w3.org/2000/svg"]
    assert "innerHTML" not in PAGE
    assert "on" + "click=" not in PAGE


@needs_chromium
async def test_the_ring_and_hostile_names(tmp_path: Path) -> None:
    async with page(Engine(), tmp_path) as (tab, _):
        await tab.until("document.querySelectorAll('#ring .node').length === 4")
        assert await tab.value("document.querySelectorAll('#ring .edge').length") == 4
        assert await tab.value("document.querySelectorAll('#ring .edge.relayed').length") == 1
        assert await tab.value("[...document.querySelectorAll('#ring title')].map(t => t.textContent)[1]") == HOSTILE
        cells = await tab.value("[...document.querySelectorAll('#members td')].map(t => t.textContent)")
        assert cells[:4] == ["ada@laptop (you)→ direct, 12.3 ms", "0–3", "11.0 ms", "2.0 GB of 8.0 GB"]
        assert cells[4] == f"{HOSTILE}→ unknown (planned: relayed, 24.6 ms)"
        assert await tab.value("document.querySelector('img')") is None
        assert await tab.value("window.broken") is None
        facts = await tab.value("['circuit', 'running', 'waiting'].map(id => document.getElementById(id).textContent)")
        assert facts == ["80.0 ms", "1 of 4", "2"]
        assert not tab.complaints


@needs_chromium
async def test_chat_streams_and_stops(tmp_path: Path) -> None:
    engine = Engine(said("<think>hm</think>", "Hel", f"lo {HOSTILE}"))
    async with page(engine, tmp_path) as (tab, _):
        await tab.until("document.querySelectorAll('#ring .node').length === 4")
        assert await tab.value("document.activeElement.id") == "question"
        await tab.type("Hi")
        await tab.press("Enter")
        await tab.until("document.querySelector('.turn.assistant .note')?.textContent.includes('3 tokens')")
        words = await tab.value("document.querySelector('.turn.assistant > span').textContent")
        assert words == f"Hello {HOSTILE}"
        assert await tab.value("document.querySelector('.turn details span').textContent") == "hm"
        assert await tab.value("document.querySelector('img')") is None

        engine.script = [part("Once"), None]
        await tab.type("More")
        await tab.press("Enter")
        await tab.until("[...document.querySelectorAll('.turn.assistant > span')].at(-2)?.textContent === 'Once'")
        await tab.press("Escape")
        await tab.until("[...document.querySelectorAll('.turn.assistant .note')].at(-1).textContent === 'stopped'")
        assert [len(question.messages) for question in engine.questions] == [1, 3]
        assert not tab.complaints
    assert engine.cancelled == 1


@needs_chromium
async def test_the_key_is_asked_for(tmp_path: Path) -> None:
    async with page(Engine(), tmp_path, key="open-sesame") as (tab, _):
        await tab.until("!document.getElementById('key-row').hidden")
        await tab.value("document.getElementById('key').focus()")
        await tab.type("open-sesame")
        await tab.press("Tab")
        await tab.until("document.querySelectorAll('#ring .node').length === 4")


@needs_chromium
async def test_a_page_of_another_origin_gets_nothing(tmp_path: Path) -> None:
    async with interface(Engine()) as other, page(Engine(), tmp_path) as (tab, client):
        await tab.until("document.querySelectorAll('#ring .node').length === 4")
        # The policy of our own page forbids it to speak to others, so the question is put from one that has none.
        await tab.go("data:text/html,<title>elsewhere</title>")
        await tab.until("document.title === 'elsewhere'")
        for port in (other.port, client.port):
            asked = f"fetch('http://127.0.0.1:{port}/v1/models').then(() => 'read', () => 'refused')"
            assert await tab.value(asked) == "refused"
            blind = f"'http://127.0.0.1:{port}/v1/chat/completions', {{method: 'POST', mode: 'no-cors', body: '{{}}'}}"
            assert await tab.value(f"fetch({blind}).then(r => r.type, () => 'refused')") in {"opaque", "refused"}
        counted = (await client.get("/metrics")).body
        assert b"/v1/chat/completions" not in counted
        assert b'route="/v1/models"' not in counted


@needs_chromium
async def test_it_fits(tmp_path: Path) -> None:
    engine = Engine()
    async with page(engine, tmp_path) as (tab, _):
        for count in (1, 2, 3, 12, 30):
            engine.members = count
            await tab.until(f"document.querySelectorAll('#ring .node').length === {count}")
            for width, height, dark in [(1200, 800, False), (390, 844, True), (320, 568, False)]:
                await tab.screen(width, height, dark=dark)
                assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth"), (count, width)
