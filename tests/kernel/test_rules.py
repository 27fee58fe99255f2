"""What the classifier cannot see of the kernel's NATs."""

from __future__ import annotations

import sys

import pytest

from tests.integration.processes import machine
from tests.kernel import rules, stranger
from tests.kernel.conftest import World

INNER, OUTER = "5000", "6000"


@pytest.mark.parametrize(
    ("nat", "kept"), [(rules.RESTRICTED, True), (rules.ANSWERING, False)], ids=["drops", "answers"]
)
async def test_a_router_that_answers_a_stranger_cannot_map_to_it_as_before(
    world: World, nat: str, *, kept: bool
) -> None:
    """So of two members behind such routers, the one whose probe comes first closes the other's way to itself."""
    home = world.nets.home(nat)
    inside = world.nets.machine(home)
    outside, (host,) = world.nets.server()
    async with machine() as here:
        first = await here.start(*outside.prefix, sys.executable, stranger.__file__, OUTER, home.public, INNER)
        await first.until("sent", stream="out")
        await here.start(*inside.prefix, sys.executable, stranger.__file__, INNER, host, OUTER)
        port = await first.until("heard from port ", stream="out")
        assert (port == INNER) is kept
