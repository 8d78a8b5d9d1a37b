"""The certificate of the API on other addresses than loopback: self-signed, made at first use, renewed before it ends.

Nobody vouches for it: people compare its fingerprint, or give programs the file `api-certificate.pem` to trust. It has
the addresses that the API listens on; for an address that it lacks, a new one is made with the same key.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.config.home import Home
from app.core.errors import HomeError
from p2p.platform import write_private
from p2p.sockets import own_ips

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

DAYS = 800  # some systems refuse certificates that are valid for longer than 825 days
RENEW_DAYS = 30  # before its end
MAX_ADDRESSES = 64
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

log = logging.getLogger("shoal.api")


@dataclass(frozen=True)
class LanCertificate:
    """A certificate and its key, as files, and the fingerprint that people compare."""

    certificate_file: Path
    key_file: Path
    fingerprint: str  # SHA-256 in pairs of hex digits


def lan_certificate(home: Home, host: str) -> LanCertificate:
    """Return the certificate for this address, made or renewed if need be; raises `HomeError`."""
    from cryptography.hazmat.primitives import hashes, serialization

    wanted = addresses_of(host)
    try:
        key = _read_key(home.api_key_file)
        if key is None:
            key = _make_key(home.api_key_file)
        found = _read_certificate(home.api_certificate_file)
        if found is None or not _is_good(found, key, wanted):
            known = () if found is None else _addresses_in(found)
            found = _make_certificate(key, [*dict.fromkeys((*wanted, *known))][:MAX_ADDRESSES])
            write_private(home.api_certificate_file, found.public_bytes(serialization.Encoding.PEM))
    except OSError as error:
        raise HomeError(f"the API's certificate in {home.folder} cannot be used: {error.strerror or error}") from error
    digits = found.fingerprint(hashes.SHA256()).hex(":").upper()
    return LanCertificate(home.api_certificate_file, home.api_key_file, digits)


def addresses_of(host: str) -> list[IPAddress]:
    """Return the addresses at which others reach an API that listens on `host`: for all, those of IPv4."""
    address = ipaddress.ip_address(host)
    if not address.is_unspecified:
        return [address]
    return sorted(own for own in own_ips() if isinstance(own, ipaddress.IPv4Address) and not own.is_loopback)


def _read_key(file: Path) -> EllipticCurvePrivateKey | None:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(file.read_bytes(), password=None)
    except FileNotFoundError:
        return None
    except ValueError:
        log.warning("%s is damaged: a new certificate is made", file)
        return None
    return key if isinstance(key, EllipticCurvePrivateKey) else None


def _make_key(file: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    kinds = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(file, key.private_bytes(*kinds))
    return key


def _read_certificate(file: Path) -> x509.Certificate | None:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        log.warning("%s is damaged: a new one is made", file)
        return None


def _is_good(found: x509.Certificate, key: EllipticCurvePrivateKey, wanted: Collection[IPAddress]) -> bool:
    """True if a certificate is of this key, names these addresses and is valid for a while."""
    now = datetime.datetime.now(datetime.UTC)
    is_valid = found.not_valid_before_utc <= now < found.not_valid_after_utc - datetime.timedelta(RENEW_DAYS)
    return is_valid and found.public_key() == key.public_key() and set(wanted) <= set(_addresses_in(found))


def _addresses_in(certificate: x509.Certificate) -> list[IPAddress]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [
        value
        for value in names.get_values_for_type(x509.IPAddress)
        if isinstance(value, ipaddress.IPv4Address | ipaddress.IPv6Address)
    ]


def _make_certificate(key: EllipticCurvePrivateKey, addresses: Collection[IPAddress]) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Shoal on {socket.gethostname()}"[:64])])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), *map(x509.IPAddress, addresses)]
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
