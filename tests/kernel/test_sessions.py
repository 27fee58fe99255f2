"""Whole sessions of ``kafila-node`` processes behind the kernel's NATs."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from kafila.errors import RendezvousUnreachable
from tests.integration.models import talking_checkpoint
from tests.integration.processes import CODE, Machine, Process, machine
from tests.kernel import rules
from tests.kernel.conftest import World
from tests.kernel.spaces import Space

NODE = ("--memory", "200MB", "--max-tokens", "8", "--trace", "/dev/stderr")
"""The trace goes where the tests wait for lines."""


class Member(NamedTuple):
    """Where one runs, and the address at which those outside its network reach it."""

    space: Space
    public: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint(tmp_path_factory.mktemp("models") / "tiny", endless=True)


async def host(here: Machine, world: World, model: Path, member: Member, members: int, name: str) -> Process:
    opening = ("--host", "--model", str(model), "--members", str(members), "--dtype", "float32", "--context", "128")
    options = (*opening, "--rendezvous", world.rendezvous, "--name", name, *NODE)
    return await here.node(*options, prefix=member.space.prefix)


async def ring(here: Machine, world: World, model: Path, members: dict[str, Member]) -> dict[str, Process]:
    """A session that serves: the first member is the host. In a ring of up to three everybody is linked with all."""
    (first, where), *others = members.items()
    nodes = {first: await host(here, world, model, where, len(members), first)}
    code = await nodes[first].until(CODE)
    for name, member in others:
        nodes[name] = await here.node("--join", code, "--name", name, *NODE, prefix=member.space.prefix)
    for node in nodes.values():
        await node.until("serving: every member may ask")
    return nodes


async def takes_itself_for(node: Process, kind: str, mapping: str, filtering: str, ports: str) -> None:
    """What a node tells its person about the network it is in."""
    assert await node.until("network: ") == f"{kind} NAT (mapping {mapping}, filtering {filtering}, ports {ports})"


async def planned(node: Process) -> dict[frozenset[str], str]:
    """The kinds of edges in the plan, by the names at their ends."""
    plan = json.loads(json.loads('{"plan":' + await node.until('"what":"plan","plan":'))["plan"])
    names = {stage["member"]: stage["name"] for stage in plan["stages"]}
    return {frozenset((names[edge["source"]], names[edge["target"]])): edge["kind"] for edge in plan["edges"]}


async def everybody_is_answered(nodes: dict[str, Process]) -> None:
    """The same, since all ask the same."""
    for node in nodes.values():
        await node.say("Is the road clear?")
        await node.until(" tokens, ")
    answers = {node.out for node in nodes.values()}
    assert len(answers) == 1
    assert len(answers.pop()) > 1


def _news(peer: str, text: str) -> str:
    return f'"what":"path","member":"{peer}","news":"{text}'


async def is_direct(nodes: dict[str, Process], one: str, other: str, ends: tuple[str, str]) -> None:
    """Both ends go straight to where the other is reached (``ends``: of ``one``, of ``other``)."""
    await nodes[one].until(_news(other, f"path changed from relayed to direct {ends[1]}:"))
    await nodes[other].until(_news(one, f"path changed from relayed to direct {ends[0]}:"))


async def is_relayed(nodes: dict[str, Process], one: str, other: str) -> None:
    """Both ends have tried all there is, in vain."""
    for here, there in ((one, other), (other, one)):
        await nodes[here].until(_news(there, "no direct path to any of"))
        assert _news(there, "path changed") not in nodes[here].err


@pytest.mark.slow
async def test_filters_by_port_and_by_address_and_a_carrier_meet_directly(world: World, model: Path) -> None:
    """One of them over a radio that loses one datagram in twenty."""
    homes = {
        "carried": world.nets.home(rules.RESTRICTED, world.nets.carrier(rules.RESTRICTED)),
        "restricted": world.nets.home(rules.LOSSY),
        "address": world.nets.home(rules.ADDRESS_RESTRICTED),
    }
    members = {name: Member(world.nets.machine(home), home.public) for name, home in homes.items()}
    async with machine() as here:
        nodes = await ring(here, world, model, members)
        await takes_itself_for(nodes["carried"], "ordinary", "EIM", "APDF", "preserving")
        await takes_itself_for(nodes["address"], "ordinary", "EIM", "ADF", "preserving")
        assert set((await planned(nodes["carried"])).values()) == {"direct"}
        for one, other in combinations(members, 2):
            await is_direct(nodes, one, other, (members[one].public, members[other].public))
        await everybody_is_answered(nodes)


@pytest.mark.slow
async def test_random_ports_on_both_sides_need_the_relay_and_a_cone_on_one_side_does_not(
    world: World, model: Path
) -> None:
    homes = {
        "random-1": world.nets.home(rules.RANDOM),
        "random-2": world.nets.home(rules.RANDOM),
        "cone": world.nets.home(rules.CONE),
    }
    members = {name: Member(world.nets.machine(home), home.public) for name, home in homes.items()}
    async with machine() as here:
        nodes = await ring(here, world, model, members)
        await takes_itself_for(nodes["random-1"], "restrictive", "APDM", "APDF", "random")
        await takes_itself_for(nodes["cone"], "permissive", "EIM", "EIF", "preserving")
        edges = await planned(nodes["random-1"])
        assert edges.pop(frozenset(("random-1", "random-2"))) == "relayed"
        assert set(edges.values()) == {"direct"}
        for random in ("random-1", "random-2"):
            await is_direct(nodes, random, "cone", (members[random].public, members["cone"].public))
        await is_relayed(nodes, "random-1", "random-2")
        await everybody_is_answered(nodes)


@pytest.mark.slow
async def test_neighbours_under_one_carrier(world: World, model: Path) -> None:
    """Two machines of one home meet on its LAN. Another home of the same carrier, which does not hairpin, is beyond
    reach; its machine has the very private address of one of the two, who must not be taken for it."""
    carrier = world.nets.carrier(rules.RESTRICTED)
    first, second = (world.nets.home(rules.RESTRICTED, carrier) for _ in range(2))
    members = {
        "desk": Member(world.nets.machine(first), carrier.public),
        "sofa": Member(world.nets.machine(first), carrier.public),
        "next door": Member(world.nets.machine(second), carrier.public),
    }
    assert members["desk"].space.host == members["next door"].space.host
    async with machine() as here:
        nodes = await ring(here, world, model, members)
        await is_direct(nodes, "desk", "sofa", (members["desk"].space.host, members["sofa"].space.host))
        for inside in ("desk", "sofa"):
            await is_relayed(nodes, inside, "next door")
        await everybody_is_answered(nodes)


@pytest.mark.slow
async def test_where_udp_is_blocked_a_member_is_told(world: World, model: Path) -> None:
    open_home, blocked_home = world.nets.home(rules.RESTRICTED), world.nets.home(rules.BLOCKED)
    async with machine() as here:
        waiting = await host(here, world, model, Member(world.nets.machine(open_home), open_home.public), 2, "host")
        code = await waiting.until(CODE)
        space = world.nets.machine(blocked_home)
        blocked = await here.node("--join", code, "--name", "blocked", *NODE, prefix=space.prefix)
        assert await blocked.wait() == RendezvousUnreachable.exit_code
        assert "UDP" in await blocked.until(f"no rendezvous answers at {world.rendezvous}")
        assert "2 of 2 here" not in waiting.err
