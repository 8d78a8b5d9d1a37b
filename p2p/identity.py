"""A node's identity: its Ed25519 key, its libp2p peer id, its signatures, and the files that hold the key.

The peer id of an Ed25519 key contains the key: base58 of an identity multihash around libp2p's public-key message. So
a signature can be verified from the peer id alone. The ids of other kinds of keys are converted as well, since nodes of
the public libp2p network have them; a multihash of more than 42 bytes of key message is its SHA-256.

The key file is JSON, ``{"version": 1, "type": "ed25519", "seed": <64 hex digits>}``, mode 0600. An exported identity
is JSON too: ``version``, ``kind`` ("shoal-identity"), ``peer_id``, the scrypt numbers ``n``, ``r``, ``p``, and in hex
``salt``, ``nonce``, ``sealed``: the seed under ChaCha20-Poly1305, whose associated data is the peer id.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p.errors import IdentityError
from p2p.platform import create_private, private_directory

KEY_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_CHARS = 52

_VERSION = 1
_MAX_FILE_BYTES = 4096
# libp2p's public-key message: type (field 1) = Ed25519 (1), data (field 2) of 32 bytes.
_KEY_PREFIX = bytes.fromhex("08011220")
_PEER_ID_PREFIX = bytes.fromhex("0024") + _KEY_PREFIX  # multihash: identity (0x00), 36 bytes
_SHA256_PREFIX = bytes.fromhex("1220")  # multihash: SHA-256 (0x12), 32 bytes
_MAX_INLINE_BYTES = 42  # a longer key message is hashed
_MAX_PEER_ID_BYTES = _MAX_INLINE_BYTES + 2
# The y coordinates of the points of small order, without the sign bit: anybody can sign anything for such a key.
_WEAK_POINTS = (
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)
_WEAK_KEYS = frozenset(
    point[:-1] + bytes([point[-1] | sign]) for point in map(bytes.fromhex, _WEAK_POINTS) for sign in (0, 128)
)
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {letter: value for value, letter in enumerate(_ALPHABET)}
# 2**15 x 8 x 128 bytes = 32 MiB and about a tenth of a second: slow to guess passphrases, fast enough to use.
_SCRYPT = {"n": 2**15, "r": 8, "p": 1}
_MAX_SCRYPT_N = 2**18  # 256 MiB: the most memory that an export file may make this process use


@lru_cache(maxsize=4096)  # base58 takes 15 us, and the same few peers send most of the statements
def peer_id_of(public_key: bytes) -> str:
    """Return the peer id (`12D3Koo…`) of an Ed25519 public key."""
    assert len(public_key) == KEY_BYTES
    return _base58(_PEER_ID_PREFIX + public_key)


def key_message(public_key: bytes) -> bytes:
    """Return libp2p's message of an Ed25519 public key."""
    return _KEY_PREFIX + public_key


def key_in_message(message: bytes) -> bytes | None:
    """Return the Ed25519 public key in libp2p's message of it, or None if that is anything else."""
    is_ed25519 = len(message) == len(_KEY_PREFIX) + KEY_BYTES and message.startswith(_KEY_PREFIX)
    return message[-KEY_BYTES:] if is_ed25519 else None


def peer_id_of_message(message: bytes) -> str:
    """Return the peer id of a public key of any kind, given libp2p's message of the key."""
    if len(message) <= _MAX_INLINE_BYTES:
        return _base58(bytes([0, len(message)]) + message)
    return _base58(_SHA256_PREFIX + hashlib.sha256(message).digest())


def public_key_of(peer_id: str) -> bytes:
    """Return the Ed25519 public key inside a peer id; raises `IdentityError` for any other text."""
    if len(peer_id) != PEER_ID_CHARS:
        raise IdentityError(f"{peer_id[:64]!r} is not the peer id of an Ed25519 key")
    raw = _from_base58(peer_id)
    # The comparison rejects any other spelling of the same number.
    if (
        len(raw) != len(_PEER_ID_PREFIX) + KEY_BYTES
        or not raw.startswith(_PEER_ID_PREFIX)
        or peer_id_of(raw[-KEY_BYTES:]) != peer_id
    ):
        raise IdentityError(f"{peer_id!r} is not the peer id of an Ed25519 key")
    return raw[-KEY_BYTES:]


@lru_cache(maxsize=8192)
def peer_id_bytes(peer_id: str) -> bytes:
    """Return a peer id of any kind of key in binary, a multihash; raises `IdentityError` for any other text."""
    raw = _from_base58(peer_id[: 2 * _MAX_PEER_ID_BYTES])
    _check_multihash(raw)
    return raw


@lru_cache(maxsize=8192)
def peer_id_from_bytes(raw: bytes) -> str:
    """Return the text of a binary peer id; raises `IdentityError` if it is not a multihash of a public key."""
    _check_multihash(raw)
    return _base58(raw)


def _check_multihash(raw: bytes) -> None:
    """Accept an identity multihash of a short public key, or the SHA-256 of a long one."""
    short = 34 <= len(raw) <= _MAX_PEER_ID_BYTES and raw[0] == 0x00 and raw[1] == len(raw) - 2
    hashed = len(raw) == 34 and raw.startswith(_SHA256_PREFIX)
    if not short and not hashed:
        raise IdentityError(f"{raw[:48].hex()!r} is not a binary peer id")


def _base58(raw: bytes) -> str:
    number, letters = int.from_bytes(raw), []
    while number:
        number, digit = divmod(number, 58)
        letters.append(_ALPHABET[digit])
    # base58 writes each leading zero byte as one "1"
    letters.append(_ALPHABET[0] * (len(raw) - len(raw.lstrip(b"\0"))))
    return "".join(reversed(letters))


def _from_base58(text: str) -> bytes:
    number = 0
    for letter in text:
        if letter not in _DIGITS:
            raise IdentityError(f"{text!r} is not a peer id: {letter!r} is not a base58 letter")
        number = number * 58 + _DIGITS[letter]
    zeros = len(text) - len(text.lstrip(_ALPHABET[0]))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8)


def is_signed(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """True if `signature` over `data` was made with the private key of `public_key`, which must not be a weak key."""
    if public_key in _WEAK_KEYS:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Identity:
    """One node's key pair; `seed` is the secret key and is left out of `repr`."""

    seed: bytes = field(repr=False)
    public_key: bytes = field(repr=False, init=False)
    peer_id: str = field(init=False)
    _private: Ed25519PrivateKey = field(repr=False, init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.seed) != KEY_BYTES:
            raise IdentityError(f"an Ed25519 seed has {KEY_BYTES} bytes, this one has {len(self.seed)}")
        private = Ed25519PrivateKey.from_private_bytes(self.seed)
        public = private.public_key().public_bytes_raw()
        object.__setattr__(self, "_private", private)
        object.__setattr__(self, "public_key", public)
        object.__setattr__(self, "peer_id", peer_id_of(public))

    @classmethod
    def generate(cls) -> Identity:
        """Create an identity from a random seed."""
        return cls(os.urandom(KEY_BYTES))

    def secret_for(self, purpose: str) -> bytes:
        """Return a secret of this node for one purpose, the same each time; nothing else follows from it."""
        return hmac.digest(self.seed, purpose.encode(), "sha256")

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte signature of `data`."""
        return self._private.sign(data)


def load_or_create(path: Path) -> Identity:
    """Load the identity in the key file `path`, or create it; processes that start at once get the same one.

    Raises `IdentityError` if the file is damaged or cannot be used.
    """
    try:
        if not path.exists():
            private_directory(path.parent)
            create_private(path, key_file(Identity.generate()))
        return load(path)
    except OSError as error:
        raise IdentityError(f"the key file {path} cannot be used: {error.strerror or error}") from error


def load(path: Path) -> Identity:
    """Load the identity in the key file `path`; raises `IdentityError`."""
    content = _read_json(path, "key file")
    if content.get("type") != "ed25519":
        raise IdentityError(f"the key file {path} does not contain an Ed25519 key; restore it from an export")
    return Identity(_hex_field(content, "seed", KEY_BYTES, path))


def key_file(identity: Identity) -> bytes:
    """Return the contents of a key file for `identity`."""
    return _json({"version": _VERSION, "type": "ed25519", "seed": identity.seed.hex()})


def export_identity(identity: Identity, passphrase: str) -> bytes:
    """Return the contents of an export file: `identity` encrypted with a passphrase, which must not be empty."""
    if not passphrase:
        raise IdentityError("the passphrase is empty; choose one, because nothing else protects the exported key")
    salt, nonce = os.urandom(16), os.urandom(12)
    key = _stretch(passphrase, salt, **_SCRYPT)
    sealed = _cipher(key).encrypt(nonce, identity.seed, identity.peer_id.encode())
    envelope = {"version": _VERSION, "kind": "shoal-identity", "peer_id": identity.peer_id, **_SCRYPT}
    return _json(envelope | {"salt": salt.hex(), "nonce": nonce.hex(), "sealed": sealed.hex()})


def import_identity(path: Path, passphrase: str) -> Identity:
    """Load the identity in the export file `path`; raises `IdentityError`.

    A wrong passphrase and a damaged file cannot be told apart.
    """
    content = _read_json(path, "export file")
    numbers = {name: content.get(name) for name in _SCRYPT}
    n, r, p = numbers["n"], numbers["r"], numbers["p"]
    if not (isinstance(n, int) and 2 <= n <= _MAX_SCRYPT_N and n & (n - 1) == 0 and r == 8 and p == 1):
        raise IdentityError(f"the export file {path} is damaged: its scrypt parameters are not those that Shoal writes")
    salt = _hex_field(content, "salt", 16, path)
    nonce = _hex_field(content, "nonce", 12, path)
    sealed = _hex_field(content, "sealed", KEY_BYTES + 16, path)
    claimed = str(content.get("peer_id"))
    try:
        seed = _cipher(_stretch(passphrase, salt, n=n, r=r, p=p)).decrypt(nonce, sealed, claimed.encode())
    except (InvalidTag, UnicodeEncodeError):
        raise IdentityError(f"wrong passphrase, or the export file {path} is damaged") from None
    return Identity(seed)


def _stretch(passphrase: str, salt: bytes, *, n: int, r: int, p: int) -> bytes:
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    return Scrypt(salt=salt, length=32, n=n, r=r, p=p).derive(passphrase.encode("utf-8", "surrogatepass"))


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        content = json.loads(raw) if len(raw) <= _MAX_FILE_BYTES else None
    except OSError as error:
        raise IdentityError(f"the {what} {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise IdentityError(f"the {what} {path} is damaged; restore it from a backup")
    version = content.get("version")
    if version != _VERSION:
        raise IdentityError(f"the {what} {path} has version {str(version)[:20]}; this Shoal reads version {_VERSION}")
    return content


def _hex_field(content: dict[str, Any], name: str, length: int, path: Path) -> bytes:
    try:
        value = bytes.fromhex(content[name])
    except (KeyError, TypeError, ValueError):
        value = b""
    if len(value) != length:
        raise IdentityError(f"{path} is damaged: its field {name!r} is not {length} bytes in hex; restore a backup")
    return value
