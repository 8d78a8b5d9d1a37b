"""Guarded swarms on the in-memory network: who gets in, who does not, and how fast the removed are out."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.core.errors import AppError
from app.joining.admission import NotAdmitted
from app.membership import GuardedNetwork, wire
from app.membership.guard import GRACE_S, SWEEP_S
from app.swarm.certificates import MAX_REVOKED, Authority, sign_certificate, sign_revocations
from app.swarm.invite import Pass
from p2p.envelope import parse
from p2p.errors import P2PError, Refused, RemoteError
from tests.app.guarded import SECRET, SWARM, GuardedNode, open_guarded
from tests.app.swarms import RECORD, identity

HERE = SWARM.authority
assert HERE is not None
ID = bytes.fromhex(RECORD.id)
GUARD = bytes.fromhex(HERE.swarm)


async def refused(stranger: GuardedNode, member: GuardedNode) -> None:
    """Every call and stream of a stranger is refused, whichever way it asks."""
    for method, body in (
        (wire.TABLE, wire.TableRequest(ID, {}, []).encode()),
        (wire.PROBE, wire.ProbeRequest(ID, 0, []).encode()),
        (wire.TELL, wire.Tell(ID, []).encode()),
    ):
        with pytest.raises(RemoteError) as error:
            await stranger.raw.call(member.peer, method, body, timeout_s=10)
        assert error.value.code == wire.NOT_ADMITTED


async def test_an_invite_admits_one_node_and_then_nobody(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        creator, guest, thief = (sim.add(number) for number in range(3))
        sim.take_part(creator)
        invite = creator.invite()
        await guest.enter(invite)
        sim.take_part(guest, creator)
        await sim.until(lambda: creator.knows() == {guest.peer} and guest.knows() == {creator.peer})
        with pytest.raises(NotAdmitted) as error:
            await thief.enter(invite)
        assert (error.value.code, "used already" in str(error.value)) == ("invite_used", True)
        first = guest.swarm.certificate
        await guest.enter(invite)  # the answer may have been lost: the same peer gets the same certificate
        assert guest.swarm.certificate == first


async def test_a_certificate_of_another_identity_or_a_damaged_one_is_none(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    assert HERE is not None
    async with open_guarded(tmp_path) as sim:
        creator, guest, other = (sim.add(number) for number in range(3))
        await guest.enter(creator.invite())
        saved = guest.swarm.certificate
        assert saved is not None
        assert GuardedNetwork(guest.raw, HERE, saved).certificate == saved
        assert GuardedNetwork(other.raw, HERE, saved).certificate is None
        assert GuardedNetwork(guest.raw, HERE, saved[:-1]).certificate is None


async def test_the_secret_alone_opens_nothing(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(3)
        stranger = sim.add(9)
        sim.take_part(stranger, *nodes)  # an honest program without a certificate
        await trio.sleep(5)
        await refused(stranger, nodes[1])
        nodes[1].guard.accept("any", lambda stream: stream.send(b"for members"))
        stream = await stranger.raw.open(nodes[1].peer, "any")
        with pytest.raises(P2PError):
            await stream.receive()
        assert await (await nodes[2].guard.open(nodes[1].peer, "any")).receive() == b"for members"
        assert stranger.knows() == set()
        assert all(stranger.peer not in node.knows() for node in nodes)
        # Nor does it learn anything where it is called.
        with pytest.raises(RemoteError) as error:
            await nodes[2].guard.call(stranger.peer, wire.TABLE, b"", timeout_s=5)
        assert error.value.code == wire.NOT_ADMITTED


async def test_the_link_of_a_peer_without_a_certificate_is_closed(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        creator, stranger = sim.add(0), sim.add(1)
        await sim.fabric.dial(stranger.raw, creator.peer)
        await trio.sleep(GRACE_S - 1)
        assert [link.peer for link in creator.raw.links()] == [stranger.peer]
        await trio.sleep(2 * SWEEP_S)
        assert [link.peer for link in creator.raw.links()] == []


async def test_two_newcomers_at_one_moment_and_one_token(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        creator = sim.add(0)
        guests = [sim.add(number) for number in range(1, 6)]
        invite = creator.invite(uses=2)
        outcomes: list[str] = []

        async def try_it(guest: GuardedNode) -> None:
            try:
                await guest.enter(invite)
                outcomes.append("in")
            except NotAdmitted as error:
                outcomes.append(error.code)

        async with trio.open_nursery() as nursery:
            for guest in guests:
                nursery.start_soon(try_it, guest)
        assert sorted(outcomes) == ["in", "in", *["invite_used"] * 3]


async def test_a_delegate_invites_while_the_creator_is_away_and_a_plain_member_cannot(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_guarded(tmp_path) as sim:
        creator, delegate, member, guest = (sim.add(number) for number in range(4))
        await delegate.enter(creator.invite(delegate=True))
        await member.enter(creator.invite())
        for node in (delegate, member):
            sim.take_part(node, delegate)
        sim.fabric.kill(creator.peer)
        with pytest.raises(AppError, match="may not invite"):
            member.invite()
        with pytest.raises(AppError, match="only the creator"):
            delegate.invite(delegate=True)
        await guest.enter(delegate.invite())
        sim.take_part(guest, delegate)
        await sim.until(lambda: guest.knows() == {delegate.peer, member.peer})
        assert guest.peer in member.knows()


async def test_a_member_becomes_a_delegate_by_a_second_invite(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        creator, member, guest = await sim.grow(3)
        late = sim.add(9)
        await member.enter(creator.invite(delegate=True))
        await late.enter(member.invite())
        sim.take_part(late, guest)
        await sim.until(lambda: late.knows() == {creator.peer, member.peer, guest.peer})


async def test_a_peer_that_a_member_announces_needs_a_certificate_too(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(3)
        stranger = sim.add(9)
        sim.take_part(stranger)
        assert stranger.membership is not None
        said = wire.Tell(ID, [stranger.membership.own.raw]).encode()
        await nodes[1].guard.call(nodes[2].peer, wire.TELL, said, timeout_s=5)
        table = nodes[2].membership.table  # type: ignore[union-attr]
        assert stranger.peer in table
        await sim.until(lambda: stranger.peer not in table, 20)
        assert all(stranger.peer not in node.knows() for node in nodes)


async def test_a_member_that_admits_without_right_admits_nobody(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(3)
        guest = sim.add(9)
        rogue = nodes[2]
        assert HERE is not None
        forged = sign_certificate(rogue.who, HERE, guest.peer, now_ms=1, by=rogue.swarm.certificate)
        guest.guard.certificate = forged
        await refused(guest, nodes[1])
        guest.guard.certificate = rogue.swarm.certificate  # a member's certificate, replayed by another peer
        await trio.sleep(10)
        await refused(guest, nodes[1])
        another = Authority.of(RECORD.id, b"other secret" * 3, nodes[0].peer)
        guest.guard.certificate = sign_certificate(nodes[0].who, another, guest.peer, now_ms=1)
        await trio.sleep(10)
        await refused(guest, nodes[1])
        with pytest.raises(NotAdmitted, match="does not know it"):
            await guest.enter(Pass(nodes[0].peer, rogue.peer, b"t" * 16))


async def test_approval_by_hand(autojump_clock: MockClock, tmp_path: Path) -> None:
    from app.swarm import invitations

    async with open_guarded(tmp_path) as sim:
        creator, guest, other = (sim.add(number) for number in range(3))
        invite = creator.invite(approve=True, uses=2)
        for node in (guest, other, guest):
            with pytest.raises(NotAdmitted) as error:
                await node.enter(invite)
            assert error.value.is_pending
        assert len(creator.notes) == 2
        assert HERE is not None
        invitations.update(creator.home, HERE.swarm, lambda ledger: ledger.decide(guest.peer, approve=True))
        invitations.update(creator.home, HERE.swarm, lambda ledger: ledger.decide(other.peer, approve=False))
        await guest.enter(invite)
        with pytest.raises(NotAdmitted, match="refused"):
            await other.enter(invite)


async def test_a_revoked_member_is_out_everywhere_and_knows_it(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(6)
        gone = nodes[3]
        rest = [node for node in nodes if node is not gone]
        started = trio.current_time()
        nodes[0].revoke(gone.peer)
        await sim.until(lambda: all(gone.peer not in node.knows() for node in rest), 5)
        assert trio.current_time() - started < 5
        await sim.until(lambda: gone.guard.expelled, 10)
        await trio.sleep(120)  # it tries to come back all the time
        assert all(gone.peer not in node.knows() for node in rest)
        assert all(node.guard.is_revoked(gone.peer) for node in rest)
        with pytest.raises((RemoteError, P2PError)):
            await gone.raw.call(nodes[1].peer, wire.TABLE, wire.TableRequest(ID, {}, []).encode(), timeout_s=5)
        with pytest.raises(P2PError):  # nor with a new invite, until it is taken off the list
            await gone.enter(nodes[0].invite())


async def test_a_member_that_was_away_learns_of_a_revocation_at_first_contact(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(4)
        away, gone = nodes[2], nodes[3]
        sim.fabric.partition([away.peer])
        nodes[0].revoke(gone.peer)
        await trio.sleep(30)
        assert away.guard.is_admitted(gone.peer)
        sim.fabric.heal()
        await sim.until(lambda: not away.guard.is_admitted(gone.peer), 120)


async def test_a_peer_taken_off_the_list_is_welcome_again(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(3)
        nodes[0].revoke(nodes[2].peer)
        await sim.until(lambda: nodes[2].peer not in nodes[1].knows(), 10)
        nodes[0].revoke(nodes[2].peer, remove=True)
        await sim.until(lambda: nodes[2].peer in nodes[1].knows(), 600)


async def test_with_a_revoked_delegate_go_those_that_it_admitted(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        creator, delegate, guest, member = (sim.add(number) for number in range(4))
        sim.take_part(creator)
        await delegate.enter(creator.invite(delegate=True))
        await member.enter(creator.invite())
        await guest.enter(delegate.invite())
        for node in (delegate, guest, member):
            sim.take_part(node, creator)
        await sim.until(lambda: len(member.knows()) == 3)
        with pytest.raises(AppError, match="did not admit"):
            delegate.revoke(member.peer)
        creator.revoke(delegate.peer)
        await sim.until(lambda: member.knows() == {creator.peer} and creator.knows() == {member.peer}, 10)


async def test_lists_from_those_without_right_are_neither_kept_nor_passed_on(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(4)
        rogue, victim = nodes[2], nodes[1]
        assert HERE is not None
        lists = [
            sign_revocations(rogue.who, HERE, [victim.peer], sequence=2**50, by=rogue.swarm.certificate),
            sign_revocations(rogue.who, HERE, [victim.peer], sequence=2**50),
            sign_revocations(nodes[0].who, Authority("x", "00" * 16), [victim.peer], sequence=2**50),
        ]
        for body in (wire.Tell(ID, lists).encode(), wire.Tell(ID, lists * 40).encode()):
            await rogue.guard.call(nodes[3].peer, wire.TELL, body, timeout_s=5)
        await rogue.raw.call(nodes[3].peer, wire.PRESENT, wire.Tell(GUARD, lists).encode(), timeout_s=5)
        await trio.sleep(5)
        assert all(list(node.guard.book.statements()) == [] for node in nodes)
        assert victim.peer in nodes[3].knows()


async def test_a_stranger_cannot_make_a_member_check_lists(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(2)
        stranger = sim.add(9)
        assert HERE is not None
        genuine = sign_revocations(nodes[0].who, HERE, [nodes[1].peer], sequence=2**50)
        with pytest.raises(RemoteError) as error:
            await stranger.raw.call(nodes[1].peer, wire.PRESENT, wire.Tell(GUARD, [genuine]).encode(), timeout_s=5)
        assert error.value.code == wire.NOT_ADMITTED
        assert list(nodes[1].guard.book.statements()) == []


async def test_an_oversized_list_costs_its_sender_the_call(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        nodes = await sim.grow(2)
        long = wire.Tell(GUARD, [b"x" * wire.MAX_STATEMENT_BYTES] * 20).encode()
        with pytest.raises(RemoteError):
            await nodes[1].raw.call(nodes[0].peer, wire.PRESENT, long, timeout_s=5)
        assert nodes[0].guard.is_admitted(nodes[1].peer)
        peers = [identity(1000 + n).peer_id for n in range(MAX_REVOKED + 1)]
        for peer in peers[:-1]:
            nodes[0].revoke(peer)
        with pytest.raises(AppError, match="new swarm"):
            nodes[0].revoke(peers[-1])


async def test_tokens_cannot_be_guessed_at_speed(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_guarded(tmp_path) as sim:
        creator, stranger = sim.add(0), sim.add(1)
        outcomes: list[str] = []
        for number in range(20):
            try:
                await stranger.enter(Pass(creator.peer, creator.peer, number.to_bytes(16)))
            except NotAdmitted as error:
                outcomes.append(error.code)
            except Refused:
                outcomes.append("busy")
        assert outcomes.count("busy") >= 10
        assert set(outcomes) == {"invite_unknown", "busy"}
        for body in (b"", GUARD, GUARD + b"t" * 16 + b"x" * 200, GUARD + b"t" * 16 + b"\x1b[31m"):
            await trio.sleep(10)
            with pytest.raises(RemoteError):
                await stranger.raw.call(creator.peer, wire.ADMIT, body, timeout_s=5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from((wire.PRESENT, wire.ADMIT)),
    st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: GUARD + rest),
    st.lists(st.binary(min_size=1, max_size=300), max_size=4),
)
def test_whatever_bytes_a_stranger_sends_it_stays_one(
    tmp_path_factory: pytest.TempPathFactory, method: str, body: bytes, statements: list[bytes]
) -> None:
    async def send() -> None:
        async with open_guarded(tmp_path_factory.mktemp("fuzz")) as sim:
            creator, stranger = sim.add(0), sim.add(1)
            for sent in (body, wire.Tell(GUARD, statements).encode()):
                with pytest.raises((RemoteError, Refused)):
                    await stranger.raw.call(creator.peer, method, sent, timeout_s=5)
            assert not creator.guard.is_admitted(stranger.peer)
            assert list(creator.guard.book.statements()) == []

    trio.run(send, clock=MockClock(autojump_threshold=0))


async def test_saved_lists_hold_after_a_restart(autojump_clock: MockClock, tmp_path: Path) -> None:
    from app.membership import GuardedNetwork
    from app.swarm import invitations

    async with open_guarded(tmp_path) as sim:
        creator, guest = sim.add(0), sim.add(1)
        await guest.enter(creator.invite())
        creator.revoke(guest.peer)
        assert HERE is not None
        lists = invitations.load(creator.home, HERE.swarm).lists
        again = GuardedNetwork(sim.fabric.node("again"), HERE, None, [*lists, b"damaged"])
        assert again.is_revoked(guest.peer)
        assert list(again.book.statements()) == [raw for raw in lists if parse(raw).peer == creator.peer]
        assert SECRET == SWARM.secret
