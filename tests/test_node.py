"""The deployed node, unmodified, with stand-in shards: in the virtual network on virtual time."""

from __future__ import annotations

import contextlib

import pytest
import trio
from trio.testing import MockClock

from kafila.errors import (
    DeviceError,
    KafilaError,
    MemberLeft,
    ModelNotFound,
    PlanDeclined,
    RendezvousUnreachable,
    SessionError,
    SessionFull,
    UnknownSession,
    WrongSecret,
)
from kafila.plan import Objective
from kafila.planning import Wishes
from kafila.question import conversation
from kafila.rendezvous_service import rendezvous
from kafila.ring.invite import HostPort, SessionCode, parse_code
from kafila.types import FinishReason, Question
from sims.net import Machine
from sims.topology import VirtualNetwork
from tests.meeting import meeting
from tests.party import Guest, Party, answer_of, solo

QUESTION = "a b c d"
LONG = "e f"


class World:
    """A virtual network with an always-on rendezvous, and a party in it."""

    def __init__(self, net: VirtualNetwork, party: Party, where: HostPort) -> None:
        self.net = net
        self.party = party
        self.where = where
        self.machines: dict[str, Machine] = {}

    def member(self, name: str, **backend: object) -> Guest:
        """A member in a home of its own."""
        machine = self.machines[name] = self.net.nat(f"home of {name}").machine(name)
        return self.party.member(name, machine, **backend)

    async def form(self, count: int) -> list[Guest]:
        """A session of ``count`` members that serves."""
        guests = [self.member(f"m{n}") for n in range(count)]
        code = await self.party.host(guests[0], count, rendezvous=self.where)
        for guest in guests[1:]:
            self.party.join(guest, code)
        with trio.fail_after(30):
            for guest in guests:
                await guest.serving.wait()
        return guests


def firsts(guests: list[Guest]) -> list[int]:
    """Where each member's blocks begin, by the plan that the host was shown."""
    return [stage.blocks.first for stage in guests[0].facts.plan().stages]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
async def test_every_member_asks_and_gets_its_answer(count: int, autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(count)
        for guest in guests:
            assert await answer_of(guest, QUESTION) == solo(QUESTION, firsts(guests))
        plan = guests[0].facts.plan()
        assert (plan.scored_percent > 0) == (count > 1), "the last member has scored nothing"


async def test_questions_at_once_from_everybody_stay_apart(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(3)
        words = [f"{a} {b}" for a in "abcd" for b in "efg"]
        answers: dict[tuple[str, str], str] = {}

        async def ask(guest: Guest, question: str) -> None:
            answers[guest.name, question] = await answer_of(guest, question)

        async with trio.open_nursery() as nursery:
            for n, question in enumerate(words):
                nursery.start_soon(ask, guests[n % 3], question)
        assert len(answers) == len(words)
        assert all(answer == solo(question, firsts(guests)) for (_, question), answer in answers.items())


async def test_links_go_direct_where_nats_allow_and_it_is_told(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(3)
        await trio.sleep(3)
        assert guests[1].node is not None
        table = guests[1].node.describe_ring()
        assert table.count("direct") == 3
        assert "unknown" not in table
        assert any("direct" in line for line in guests[1].screen.lines)


async def test_leaving_an_answer_early_cancels_it(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(2)
        node = guests[1].node
        assert node is not None
        async with node.answer(Question(conversation(("user", QUESTION)))) as texts:
            async for _ in texts:
                break
        assert await answer_of(guests[0], QUESTION) == solo(QUESTION, firsts(guests))


async def test_a_host_that_leaves_ends_the_session_for_all_without_fault(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(3)
        guests[0].leaving.set()
        with trio.fail_after(5):
            for guest in guests:
                await guest.ended.wait()
        assert [guest.error for guest in guests] == [None] * 3
        assert any("m0 ended the session" in line for line in guests[1].screen.lines)


async def test_a_member_that_leaves_is_named_to_the_others(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(4)
        guests[2].leaving.set()
        with trio.fail_after(5):
            for guest in guests:
                await guest.ended.wait()
        for guest in (guests[0], guests[1], guests[3]):
            assert isinstance(guest.error, MemberLeft)
            assert "m2 left" in str(guest.error)


async def test_a_member_that_dies_mid_answer_is_named_and_the_asker_keeps_its_text(
    autojump_clock: MockClock,
) -> None:
    async with meeting(World) as w:
        guests = await w.form(3)
        parts: list[str] = []
        finish: list[FinishReason | None] = []
        talking = trio.Event()

        async def ask() -> None:
            node = guests[1].node
            assert node is not None
            async with node.answer(Question(conversation(("user", LONG)))) as texts:
                async for text in texts:
                    parts.append(text.delta)
                    finish.append(text.finish)
                    talking.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await talking.wait()
            w.machines["m2"].unplug()
            with trio.fail_after(15):
                await guests[0].ended.wait()
                await guests[1].ended.wait()
        assert solo(LONG, firsts(guests)).startswith("".join(parts))
        assert finish[-1] is FinishReason.MEMBER_LEFT
        assert all("m2" in str(guest.error) for guest in guests[:2])


async def test_one_member_too_many_is_told_so(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(2)
        late = w.member("late")
        w.party.join(late, parse_code(guests[0].screen.codes[0]))
        with trio.fail_after(10):
            await late.ended.wait()
        assert isinstance(late.error, SessionFull | SessionError)


async def test_a_wrong_secret_and_an_unknown_session_are_told_apart(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        host = w.member("host")
        code = await w.party.host(host, 2, rendezvous=w.where)
        wrong, lost = w.member("wrong"), w.member("lost")
        w.party.join(wrong, SessionCode(code.locator, "0" * 15, code.rendezvous))
        other = "ZZZZZ" if code.locator != "ZZZZZ" else "YYYYY"
        w.party.join(lost, SessionCode(other, code.secret, code.rendezvous))
        with trio.fail_after(10):
            await wrong.ended.wait()
            await lost.ended.wait()
        assert isinstance(wrong.error, WrongSecret)
        assert isinstance(lost.error, UnknownSession)


async def test_a_rendezvous_that_is_not_there_is_told_within_seconds(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guest = w.member("alone")
        began = trio.current_time()
        with pytest.raises(RendezvousUnreachable, match="no rendezvous answers"):
            await w.party.host(guest, 2, rendezvous=HostPort("198.51.100.9", 7443))
        assert trio.current_time() - began < 8


@pytest.mark.parametrize("where", ["offer", "measure", "worker"])
async def test_a_host_whose_device_fails_says_why(where: str, autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        error = ModelNotFound("there is no folder /nowhere") if where == "offer" else DeviceError("no such device")
        guest = w.member("host", faults={where: error})
        with contextlib.suppress(KafilaError):  # it may die before or after there is a code
            await w.party.host(guest, 1, rendezvous=w.where)
        with trio.fail_after(10):
            await guest.ended.wait()
        assert guest.error is error


async def test_a_member_without_the_model_leaves_its_place_to_another(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        host, bad, good = (
            w.member("host"),
            w.member("bad", faults={"measure": ModelNotFound("no folder")}),
            w.member("good"),
        )
        code = await w.party.host(host, 2, rendezvous=w.where)
        w.party.join(bad, code)
        with trio.fail_after(10):
            await bad.ended.wait()
        assert isinstance(bad.error, ModelNotFound)
        w.party.join(good, code)
        with trio.fail_after(20):
            await good.serving.wait()
        assert any("bad cannot take part: no folder" in line for line in host.screen.lines)


async def test_a_model_that_does_not_fit_is_declined_to_everybody_in_words(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        host, small = w.member("host", memory_bytes=2000), w.member("small", memory_bytes=2000)
        code = await w.party.host(host, 2, rendezvous=w.where)
        w.party.join(small, code)
        with trio.fail_after(20):
            await host.ended.wait()
            await small.ended.wait()
        assert isinstance(host.error, PlanDeclined)
        assert str(host.error) in str(small.error)


async def test_a_host_may_start_with_whoever_is_there(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        host = w.member("host")
        host.start_at_once = True
        await w.party.host(host, None, rendezvous=w.where)
        with trio.fail_after(20):
            await host.serving.wait()
        assert await answer_of(host, QUESTION) == solo(QUESTION, [0])


async def test_a_host_without_a_rendezvous_runs_one_and_its_code_says_where(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        home = w.net.nat("shared home")
        host, friend = (w.party.member(name, home.machine(name)) for name in ("host", "friend"))
        code = await w.party.host(host, 2)
        assert code.rendezvous is not None
        w.party.join(friend, code)
        with trio.fail_after(20):
            await friend.serving.wait()
        assert await answer_of(friend, QUESTION) == solo(QUESTION, firsts([host]))


async def test_the_rendezvous_may_go_while_direct_links_serve(autojump_clock: MockClock) -> None:
    net = VirtualNetwork(seed=2)
    server = net.machine("rendezvous")
    async with net.running(), trio.open_nursery() as nursery:
        party = Party(nursery)
        async with rendezvous(server) as running:
            w = World(net, party, HostPort(server.hosts()[0], running.address.port))
            guests = await w.form(3)
            await trio.sleep(5)
        await trio.sleep(60)
        with trio.fail_after(10):
            assert await answer_of(guests[1], QUESTION) == solo(QUESTION, firsts(guests))
        nursery.cancel_scope.cancel()


async def test_the_trace_tells_of_the_plan_the_paths_and_every_batch(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        guests = await w.form(3)
        await answer_of(guests[1], QUESTION)
        kinds = {what for what, _, _ in guests[0].facts.records}
        assert kinds >= {"plan", "path", "batch"}
        batch = next(facts for what, _, facts in guests[0].facts.records if what == "batch")
        assert len(batch["stage_s"]) == 3


async def joined(w: World, guest: Guest, host: Guest) -> Guest:
    """A guest that may ask."""
    w.party.join(guest, parse_code(host.screen.codes[0]), visiting=True)
    with trio.fail_after(30):
        await guest.serving.wait()
    return guest


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_guest_asks_over_a_link_with_the_head_and_may_leave(count: int, autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        members = await w.form(count)
        guests = [await joined(w, w.member(f"g{n}"), members[0]) for n in range(2)]
        right = solo(QUESTION, firsts(members))
        for who in (*guests, *members):
            assert await answer_of(who, QUESTION) == right
        await trio.sleep(3)
        node = guests[0].node
        assert node is not None
        ring = node.ring()
        assert ring is not None
        assert [(edge.kind, edge.measured) for edge in ring.edges] == [("direct", True)] * (count if count > 1 else 0)
        assert "your link to the head: direct" in node.describe_ring()
        assert "(you)" not in node.describe_ring()
        guests[0].leaving.set()
        await guests[0].ended.wait()
        assert guests[0].error is None
        await trio.sleep(10)
        for who in (guests[1], *members):
            assert await answer_of(who, QUESTION) == right
        assert any("guests: g1" in line for line in members[0].screen.lines)


async def test_a_guest_that_vanishes_frees_its_slots_and_ends_nothing(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        members = await w.form(2)
        guest = await joined(w, w.member("g"), members[0])
        right = solo(QUESTION, firsts(members))

        async with trio.open_nursery() as nursery:
            for _ in range(5):  # more than there are slots: some run, some wait
                nursery.start_soon(guest.ask, LONG)
            await trio.sleep(0.3)
            nursery.cancel_scope.cancel()
        guest.scope.cancel()
        await guest.ended.wait()
        with trio.fail_after(60):
            for who in members:
                assert await answer_of(who, QUESTION) == right


async def test_a_guest_waits_for_the_session_and_takes_no_members_place(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        host, member, guest = w.member("host"), w.member("member"), w.member("guest")
        code = await w.party.host(host, 2, rendezvous=w.where)
        w.party.join(guest, code, visiting=True)
        await trio.sleep(5)
        assert not host.serving.is_set()
        w.party.join(member, code)
        with trio.fail_after(30):
            for who in (host, member, guest):
                await who.serving.wait()
        assert await answer_of(guest, QUESTION) == solo(QUESTION, firsts([host]))
        host.leaving.set()
        with trio.fail_after(5):
            await guest.ended.wait()
        assert guest.error is None


async def test_a_member_that_the_plan_leaves_out_asks_as_a_guest(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        names = [w.member("host"), w.member("slow", bandwidth=1.0), w.member("other")]
        wishes = Wishes(objective=Objective.THROUGHPUT, users=1)
        code = await w.party.host(names[0], 3, rendezvous=w.where, wishes=wishes)
        for who in names[1:]:
            w.party.join(who, code)
        with trio.fail_after(30):
            for who in names:
                await who.serving.wait()
        assert len(firsts([names[0]])) < 3
        assert any("asks as a guest" in line for line in names[1].screen.lines)
        assert await answer_of(names[1], QUESTION) == solo(QUESTION, firsts([names[0]]))
