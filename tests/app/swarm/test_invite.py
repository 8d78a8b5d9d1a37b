"""Invites: short, exact, and clear about what is wrong when they are mistyped."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import AppError, RecordError
from app.swarm.invite import MAX_ADDRESSES, PREFIX, Invite, Pass, invite_in, is_invite, new_secret, parse_invite
from p2p.errors import P2PError
from p2p.identity import Identity

MODEL = "1a2b3c4d" * 8
ALICE, RELAY = Identity(b"a" * 32).peer_id, Identity(b"r" * 32).peer_id
TYPICAL = Invite(
    "attic",
    MODEL,
    (f"/ip4/192.168.1.20/tcp/7464/p2p/{ALICE}", f"/ip6/2001:db8::7/tcp/7464/p2p/{ALICE}"),
    secret=b"s" * 32,
)


def sealed(body: bytes) -> str:
    raw = body + hashlib.sha256(body).digest()[:4]
    return PREFIX + base64.b32encode(raw).decode().rstrip("=").lower()


def test_an_invite_comes_back_and_fits_in_a_message() -> None:
    line = str(TYPICAL)
    assert parse_invite(line) == TYPICAL
    assert parse_invite(line).secret == TYPICAL.secret
    assert len(line) < 280
    assert line.startswith("shoal:")
    assert line.isascii()
    assert line.split() == [line]


@pytest.mark.parametrize("issuer", [ALICE, RELAY])
def test_an_invite_to_a_guarded_swarm_holds_its_authority_its_issuer_and_a_token(issuer: str) -> None:
    invite = replace(TYPICAL, entry=Pass(ALICE, issuer, b"t" * 16))
    line = str(invite)
    assert parse_invite(line) == invite
    assert parse_invite(line).entry.token == b"t" * 16  # type: ignore[union-attr]
    assert "token" not in repr(invite.entry)
    assert len(line) < 420


names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
peers = st.sampled_from([ALICE, RELAY])
places = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.sampled_from(["/dns4/example.org", "/dns/node.example.org"]),
)
direct = st.tuples(places, st.integers(0, 65535), peers).map(lambda it: f"{it[0]}/tcp/{it[1]}/p2p/{it[2]}")
relayed = st.tuples(direct, peers).map(lambda it: f"{it[0]}/p2p-circuit/p2p/{it[1]}")


@given(
    names,
    st.binary(min_size=32, max_size=32),
    st.lists(direct | relayed, max_size=MAX_ADDRESSES),
    st.none() | st.binary(min_size=32, max_size=32),
)
def test_every_invite_comes_back(name: str, model: bytes, addresses: list[str], secret: bytes | None) -> None:
    invite = Invite(name, model.hex(), tuple(addresses), secret)
    assert parse_invite(str(invite)) == invite


@given(st.data())
def test_any_mistyped_letter_is_noticed(data: st.DataObject) -> None:
    line = str(TYPICAL)
    place = data.draw(st.integers(len(PREFIX), len(line) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda it: it != line[place]))
    with pytest.raises(RecordError, match="mistyped or cut off; copy the whole line again"):
        parse_invite(line[:place] + letter + line[place + 1 :])


@given(st.integers(1, 200))
def test_a_cut_line_is_noticed(cut: int) -> None:
    with pytest.raises(RecordError, match="mistyped or cut off"):
        parse_invite(str(TYPICAL)[:-cut])


@given(st.one_of(st.text(max_size=300), st.text(max_size=300).map(lambda text: PREFIX + text)))
def test_any_text_raises_the_one_error(text: str) -> None:
    with pytest.raises(RecordError):
        parse_invite(text)


@given(st.binary(max_size=300))
def test_any_bytes_with_a_right_checksum_are_taken_or_raise_the_one_error(body: bytes) -> None:
    for raw in (body, b"\x01" + body, b"\x01\x01\x05attic\x02\x20" + bytes(32) + body):
        try:
            invite = parse_invite(sealed(raw))
        except RecordError:
            continue
        assert invite.name == "attic"
        assert len(invite.addresses) <= MAX_ADDRESSES
        assert parse_invite(str(invite)) == invite


def test_mail_programs_may_wrap_and_capitalise_it() -> None:
    line = str(TYPICAL)
    wrapped = "\n".join(line[start : start + 40] for start in range(0, len(line), 40))
    assert parse_invite(f"  {wrapped}\r\n") == TYPICAL
    assert parse_invite(line.upper()) == TYPICAL


HEAD = b"\x01\x01\x05attic\x02\x20" + bytes(32)
KEY = b"\x04\x20" + bytes(32)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x03" + HEAD[1:], "version 3, this Shoal reads up to 2"),
        (b"\x02" + HEAD[1:], "a field is missing"),
        (b"\x02" + HEAD[1:] + b"\x03\x20" + bytes(32) + b"\x07\x20" + bytes(32), "a field is missing"),
        (b"\x02" + HEAD[1:] + b"\x03\x20" + bytes(32) + b"\x07\x20" + bytes(32) + b"\x09\x02ab", "wrong length"),
        (b"\x01", "names no swarm"),
        (HEAD + b"\x01\x05attic", "appears twice"),
        (HEAD + b"\x03\x04abcd", "wrong length"),
        (HEAD + b"\x04\x04abcd", "wrong length"),
        (HEAD + b"\x05\x06\x01\x02\x03\x04\x1d\x28", "without a peer"),
        (HEAD + KEY + b"\x05\x05\x01\x02\x03\x04\x1d", "wrong length"),
        (HEAD + KEY + b"\x06\x04/abc", "damaged"),
        (HEAD + KEY + b"\x06\x02\xff\xfe", "damaged"),
        (HEAD + KEY + b"\x05\x06\x01\x02\x03\x04\x1d\x28" * 9, "too many addresses"),
        (HEAD + b"\x09", "cut off"),
        (HEAD + b"\x09\x05ab", "cut off"),
        (b"\x01\x01\x05ATTIC\x02\x20" + bytes(32), "names no swarm"),
        (b"\x01\x01\x05attic\x02\x04abcd", "names no swarm"),
    ],
)
def test_damage_is_named(body: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse_invite(sealed(body))


def test_fields_from_the_future_are_ignored() -> None:
    assert parse_invite(sealed(HEAD + b"\x63\x03abc\x63\x00")) == Invite("attic", "00" * 32)


def test_a_line_that_is_too_long_is_not_even_decoded() -> None:
    with pytest.raises(RecordError, match="too long"):
        parse_invite(PREFIX + "a" * 10_000_000)


def test_only_dialable_addresses_of_named_peers_are_written() -> None:
    for address in ("/ip4/1.2.3.4/tcp/1", "nonsense", "/ip4/1.2.3.4/tcp/1/p2p/Qm" + "a" * 44):
        with pytest.raises((AppError, P2PError)):
            str(Invite("attic", MODEL, (address,)))


def test_the_secret_is_not_printed_by_accident() -> None:
    assert "ssss" not in repr(TYPICAL)
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(new_secret()) == 32


def test_a_frame_that_was_selected_with_it_does_no_harm() -> None:
    line = str(TYPICAL)
    framed = "\n".join(["┌────┐", *(f"│ {line[at : at + 20]:<20} ┃" for at in range(0, len(line), 20)), "└────┘"])
    assert is_invite(framed)
    assert parse_invite(framed) == TYPICAL


def in_lines(line: str, before: str = "", wide: int = 40) -> str:
    return "\n".join(f"{before}{line[start : start + wide]}" for start in range(0, len(line), wide))


LINE = str(TYPICAL)
OTHER = str(replace(TYPICAL, name="cellar"))


@pytest.mark.parametrize(
    "pasted",
    [
        f'"{LINE}"',
        f"'{LINE}'",
        f"`{LINE}`",
        f"\u201c{LINE}\u201d",
        f"\u201e{LINE}\u201c",
        f"\u00ab\u00a0{LINE}\u00a0\u00bb",
        f"<{LINE}>",
        f"({LINE}).",
        f"[{LINE}]",
        f"> {LINE}",
        in_lines(LINE, "> "),
        in_lines(LINE, ">> "),
        f"Hi! My swarm is {LINE}. See you there",
        f"Hi!\n\n> Join with\n{in_lines(LINE, '> ')}\n> and tell me.\n\nBye",
        f"an invite begins with shoal: like this one: {LINE}",
        f"{LINE} and once more {LINE.upper()}",
        f"shoal join {LINE} --force",
    ],
)
def test_an_invite_is_found_in_what_was_copied_with_it(pasted: str) -> None:
    assert is_invite(pasted)
    assert invite_in(pasted) == LINE
    assert parse_invite(pasted) == TYPICAL


def test_of_several_invites_none_is_chosen() -> None:
    with pytest.raises(RecordError, match="there are 2 invites in this text: give one of them"):
        parse_invite(f"{LINE} or, for the cellar, {in_lines(OTHER)}")


def test_a_mistyped_invite_between_words_is_called_so() -> None:
    wrong = LINE[:-1] + ("a" if LINE[-1] != "a" else "b")
    with pytest.raises(RecordError, match="the invite is mistyped"):
        parse_invite(f'Join with "{wrong}"')


def test_what_is_meant_as_an_invite() -> None:
    assert is_invite(" SHOAL:abc")
    assert not is_invite("shoal")
    assert not is_invite("attic#1a2b3c4d")


def test_the_qr_code_is_square_and_small_enough_for_a_terminal() -> None:
    lines = TYPICAL.qr().splitlines()
    assert len(lines) <= 45
    assert "▀" in TYPICAL.qr() or "▄" in TYPICAL.qr()
