"""Makes and uses the key that signs releases, in the formats of minisign: the tool itself can check every signature.

    python packaging/release_key.py new FILE             make a key; prints the line for app/system/releases.py
    python packaging/release_key.py sign FILE NAME...    write NAME.minisig beside each file

A key file is not protected by a passphrase: keep it on a machine that builds releases, and nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_COMMENT = "untrusted comment: "
_NO_PASSPHRASE = b"Ed\0\0B2"  # minisign's algorithm, key derivation (none) and checksum
_SECRET_BYTES = 158


class KeyFileError(Exception):
    """A key file cannot be used; the text says why."""


@dataclass(frozen=True)
class ReleaseKey:
    """A signing key with its number, by which signatures name it."""

    number: bytes
    seed: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> ReleaseKey:
        """Make a key at random."""
        return cls(os.urandom(8), os.urandom(32))

    @classmethod
    def load(cls, path: Path) -> ReleaseKey:
        """Read a secret key file that minisign (`-G -W`) or `save` wrote; raises `KeyFileError`."""
        try:
            raw = base64.b64decode(path.read_text("ascii").splitlines()[1], validate=True)
        except (OSError, ValueError, IndexError) as error:
            raise KeyFileError(f"{path} is not a secret key of minisign: {error}") from None
        if len(raw) != _SECRET_BYTES or raw[:6] != _NO_PASSPHRASE:
            raise KeyFileError(f"{path} is not a secret key of minisign without a passphrase (`minisign -G -W`)")
        return cls(raw[54:62], raw[62:94])

    def save(self, path: Path) -> None:
        """Write the secret key file, readable by its owner alone; raises `FileExistsError` if there is one."""
        keys = self.number + self.seed + self.public_bytes
        checksum = hashlib.blake2b(b"Ed" + keys, digest_size=32).digest()
        raw = _NO_PASSPHRASE + bytes(48) + keys + checksum
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{_COMMENT}minisign secret key {self.number.hex()}\n{base64.b64encode(raw).decode()}\n")

    @property
    def public_bytes(self) -> bytes:
        """The 32 bytes of the public key."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw()

    @property
    def public_line(self) -> str:
        """The public key as `minisign -P` and `RELEASE_KEY` take it."""
        return base64.b64encode(b"Ed" + self.number + self.public_bytes).decode()

    def sign(self, data: bytes, name: str) -> bytes:
        """Return the contents of `name`.minisig."""
        private = Ed25519PrivateKey.from_private_bytes(self.seed)
        signature = private.sign(hashlib.blake2b(data).digest())
        comment = f"timestamp:{time.time():.0f}\tfile:{name}\thashed"
        lines = (
            f"{_COMMENT}signature of a Shoal release",
            base64.b64encode(b"ED" + self.number + signature).decode(),
            f"trusted comment: {comment}",
            base64.b64encode(private.sign(signature + comment.encode())).decode(),
        )
        return "".join(f"{line}\n" for line in lines).encode()


def main(words: list[str]) -> int:
    """Make a key, or sign files; returns the exit status."""
    try:
        match words:
            case ["new", file]:
                key = ReleaseKey.generate()
                key.save(Path(file))
                print(f'RELEASE_KEY = "{key.public_line}"')
            case ["sign", file, *names] if names:
                key = ReleaseKey.load(Path(file))
                for path in map(Path, names):
                    path.with_name(f"{path.name}.minisig").write_bytes(key.sign(path.read_bytes(), path.name))
            case _:
                print(__doc__)
                return 2
    except (KeyFileError, OSError) as error:
        print(f"release_key: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
