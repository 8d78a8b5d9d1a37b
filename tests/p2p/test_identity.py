"""Keys, peer ids and exports: the same as libp2p's, private, and one clear error for anything damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.rsa import create_new_key_pair as rsa_keys
from libp2p.crypto.secp256k1 import create_new_key_pair as secp256k1_keys
from libp2p.peer.id import ID

from p2p import identity
from p2p.errors import IdentityError
from p2p.identity import Identity
from p2p.platform import is_private

# The key pair of RFC 8032's first test vector.
RFC_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
RFC_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_are_libp2ps(seed: bytes) -> None:
    ours = Identity(seed)
    theirs = create_new_key_pair(seed)
    assert ours.public_key == theirs.public_key.to_bytes()
    assert ours.peer_id == ID.from_pubkey(theirs.public_key).to_base58()
    assert identity.public_key_of(ours.peer_id) == ours.public_key
    assert ours.sign(b"x") == theirs.private_key.sign(b"x")
    message = theirs.public_key.serialize()
    assert identity.key_message(ours.public_key) == message
    assert identity.key_in_message(message) == ours.public_key
    assert identity.peer_id_of_message(message) == ours.peer_id


@pytest.mark.parametrize("keys", [rsa_keys, secp256k1_keys], ids=["RSA", "secp256k1"])
def test_peer_ids_of_other_kinds_of_keys_are_libp2ps(keys: Callable[[], KeyPair]) -> None:
    theirs = keys().public_key
    peer_id = ID.from_pubkey(theirs)
    assert identity.peer_id_of_message(theirs.serialize()) == peer_id.to_base58()
    assert identity.key_in_message(theirs.serialize()) is None
    assert identity.peer_id_bytes(peer_id.to_base58()) == peer_id.to_bytes()
    assert identity.peer_id_from_bytes(peer_id.to_bytes()) == peer_id.to_base58()
    with pytest.raises(IdentityError):
        identity.public_key_of(peer_id.to_base58())


def test_a_key_that_anybody_can_sign_for_signs_nothing() -> None:
    """The signature (R = the key, S = 0) is right for every text, and OpenSSL accepts it."""
    for sign in (0, 128):
        weak = b"\1" + bytes(30) + bytes([sign])
        assert not identity.is_signed(weak, b"anything", weak + bytes(32))
    neutral = b"\1" + bytes(31)
    Ed25519PublicKey.from_public_bytes(neutral).verify(neutral + bytes(32), b"anything")


def test_the_weak_keys_are_all_points_of_small_order() -> None:
    prime = 2**255 - 19
    ys = {(int.from_bytes(key, "little") & (2**255 - 1)) % prime for key in identity._WEAK_KEYS}
    # Order 1: y is 1. Order 2: -1. Order 4: 0. Twice a point of order 8 has y = 0, which the curve's equation makes
    # -121665 y^4 + 243332 y^2 - 121666 = 0 for the point itself; it has two solutions.
    others = ys - {0, 1, prime - 1}
    assert len(ys) == 5
    assert all((-121665 * y**4 + 243332 * y**2 - 121666) % prime == 0 for y in others)


def test_a_known_key() -> None:
    known = Identity(RFC_SEED)
    assert known.public_key == RFC_PUBLIC
    assert known.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a")
    assert known.peer_id.startswith("12D3KooW")


@given(st.text(max_size=80))
def test_any_text_is_a_peer_id_or_an_identity_error(text: str) -> None:
    with pytest.raises(IdentityError):
        identity.public_key_of(text)


@given(st.integers(0, 51), st.sampled_from("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz0OIl é"))
def test_one_changed_letter_is_another_key_or_refused(place: int, letter: str) -> None:
    original = Identity(RFC_SEED).peer_id
    changed = original[:place] + letter + original[place + 1 :]
    try:
        key = identity.public_key_of(changed)
    except IdentityError:
        return
    assert (key == RFC_PUBLIC) == (changed == original)
    assert identity.peer_id_of(key) == changed


@given(st.binary(max_size=64), st.binary(min_size=64, max_size=64))
def test_only_the_owner_signs(data: bytes, forged: bytes) -> None:
    owner, other = Identity(RFC_SEED), Identity(bytes(32))
    good = owner.sign(data)
    assert identity.is_signed(owner.public_key, data, good)
    assert not identity.is_signed(other.public_key, data, good)
    assert not identity.is_signed(owner.public_key, data + b"!", good)
    assert not identity.is_signed(owner.public_key, data, forged)
    assert not identity.is_signed(owner.public_key, data, good[:-1])


def test_the_key_file_is_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    first = identity.load_or_create(path)
    assert is_private(path)
    assert identity.load_or_create(path) == first
    assert first.seed.hex() not in repr(first)


STARTER = """
import sys
from pathlib import Path
from p2p import identity
sys.stdin.readline()
print(identity.load_or_create(Path(sys.argv[1])).peer_id)
"""


def test_processes_that_start_at_once_get_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    command = [sys.executable, "-c", STARTER, str(path)]
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    ids = {starter.communicate(timeout=30)[0].strip() for starter in starters}
    assert ids == {identity.load(path).peer_id}


def test_who_loses_the_race_takes_the_winners_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner = Identity(RFC_SEED)

    def lost(path: Path, data: bytes) -> bool:
        path.write_bytes(identity.key_file(winner))
        return False

    monkeypatch.setattr(identity, "create_private", lost)
    assert identity.load_or_create(tmp_path / "identity.key") == winner


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 4000,
        b'{"version": 1, "type": "ed25519", "seed": "00"}',
        b'{"version": 1, "type": "rsa"}',
        b'{"version": 2, "type": "ed25519", "seed": "00"}',
        b'{"version": 1, "type": "ed25519", "seed": 7}',
        b" " * 5000,
    ],
)
def test_a_damaged_key_file_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"identity\.key"):
        identity.load_or_create(path)
    assert path.read_bytes() == content


def test_an_unusable_folder_is_an_identity_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(IdentityError, match="cannot be used"):
        identity.load_or_create(tmp_path / "file" / "identity.key")


def test_export_and_import(tmp_path: Path) -> None:
    owner = Identity(RFC_SEED)
    path = tmp_path / "backup.json"
    path.write_bytes(identity.export_identity(owner, "correct horse"))
    assert RFC_SEED.hex() not in path.read_text()
    assert identity.import_identity(path, "correct horse") == owner
    for wrong in ("wrong", "", "\ud800"):
        with pytest.raises(IdentityError, match="wrong passphrase"):
            identity.import_identity(path, wrong)
    with pytest.raises(IdentityError, match="empty"):
        identity.export_identity(owner, "")


def test_an_altered_export_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(identity._SCRYPT, "n", 2)  # what is tried here is the format, not the stretching
    good = json.loads(identity.export_identity(Identity(RFC_SEED), "p"))
    path = tmp_path / "backup.json"
    changes: list[dict[str, object]] = [
        {"peer_id": Identity(bytes(32)).peer_id},
        {"peer_id": "\ud800"},
        {"sealed": "00" * 48},
        {"sealed": "00" * 4},
        {"salt": None},
        {"nonce": "zz"},
        {"n": 2**40},
        {"n": 3},
        {"n": "2"},
        {"r": 2**30},
        {"p": 2},
        {"version": 9},
    ]
    for change in changes:
        path.write_text(json.dumps(good | change))
        with pytest.raises(IdentityError, match=r"backup\.json"):
            identity.import_identity(path, "p")
    with pytest.raises(IdentityError, match="cannot be read"):
        identity.import_identity(tmp_path / "absent", "p")


def test_importing_stays_light() -> None:
    code = "import sys, p2p.identity; print(sorted({'libp2p', 'trio', 'torch', 'psutil'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
