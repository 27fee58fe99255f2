"""What the classifier takes the kernel's NATs for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import trio

from kafila.nat.report import Allocator, Filtering, Mapping, NatReport, from_json, nat_class
from kafila.types import NatClass
from tests.kernel import report, rules
from tests.kernel.conftest import World
from tests.kernel.spaces import Space


async def classified(machine: Space, rendezvous: str) -> NatReport:
    command = [*machine.prefix, sys.executable, report.__file__, rendezvous]
    done = await trio.run_process(command, capture_stdout=True, stdin=subprocess.DEVNULL)
    return from_json(json.loads(done.stdout))


KEPT, CHANGING = Allocator.PRESERVING, Allocator.RANDOM
NATS = {
    # rules, then the class as a rendezvous with one address sees it, then all that a second address tells
    "restricted": (rules.RESTRICTED, NatClass.ORDINARY, Mapping.EIM, Filtering.APDF, KEPT, NatClass.ORDINARY),
    "answering": (rules.ANSWERING, NatClass.ORDINARY, Mapping.EIM, Filtering.APDF, KEPT, NatClass.ORDINARY),
    "address": (rules.ADDRESS_RESTRICTED, NatClass.ORDINARY, Mapping.EIM, Filtering.ADF, KEPT, NatClass.ORDINARY),
    "cone": (rules.CONE, NatClass.ORDINARY, Mapping.EIM, Filtering.EIF, KEPT, NatClass.PERMISSIVE),
    "random": (rules.RANDOM, NatClass.RESTRICTIVE, Mapping.APDM, Filtering.APDF, CHANGING, NatClass.RESTRICTIVE),
}


@pytest.mark.parametrize("name", NATS)
async def test_a_nat_is_seen_for_what_it_is(world: World, name: str) -> None:
    nat, at_first, mapping, filtering, allocator, in_full = NATS[name]
    home = world.nets.home(nat)
    machine = world.nets.machine(home)
    partial = await classified(machine, world.plain_rendezvous)
    full = await classified(machine, world.rendezvous)
    assert (full.mapping, full.filtering, full.allocator) == (mapping, filtering, allocator)
    assert full.reflexive_v4 is not None
    assert full.reflexive_v4.host == home.public
    assert nat_class(full) is in_full
    # One address tells less and nothing that is false.
    assert mapping in partial.mapping
    assert filtering in partial.filtering
    assert nat_class(partial) is at_first


@pytest.mark.parametrize(
    ("outer", "inner", "mapping", "filtering"),
    [
        (rules.RESTRICTED, rules.RESTRICTED, Mapping.EIM, Filtering.APDF),
        (rules.CONE, rules.RESTRICTED, Mapping.EIM, Filtering.APDF),
        (rules.RANDOM, rules.CONE, Mapping.APDM, Filtering.APDF),
    ],
    ids=["restricted-restricted", "cone-restricted", "random-cone"],
)
async def test_a_chain_of_nats_is_as_strict_as_its_strictest(
    world: World, outer: str, inner: str, mapping: Mapping, filtering: Filtering
) -> None:
    carrier = world.nets.carrier(outer)
    machine = world.nets.machine(world.nets.home(inner, carrier))
    full = await classified(machine, world.rendezvous)
    assert (full.mapping, full.filtering) == (mapping, filtering)
    assert full.reflexive_v4 is not None
    assert full.reflexive_v4.host == carrier.public


async def test_blocked_udp_is_seen(world: World) -> None:
    machine = world.nets.machine(world.nets.home(rules.BLOCKED))
    assert await classified(machine, world.rendezvous) == NatReport(udp_blocked=True)


async def test_a_public_machine_needs_no_nat(world: World) -> None:
    machine, (host,) = world.nets.server()
    full = await classified(machine, world.rendezvous)
    assert full.on_public_address
    assert (full.mapping, full.filtering) == (Mapping.EIM, Filtering.EIF)
    assert full.reflexive_v4 is not None
    assert full.reflexive_v4.host == host
