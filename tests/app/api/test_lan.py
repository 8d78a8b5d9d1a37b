"""The API on another address than loopback: only with keys and TLS, under a certificate that programs can trust."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from cryptography import x509

from app.api import certificate, server
from app.api.certificate import addresses_of, lan_certificate
from app.api.keys import KeyRing
from app.api.routes import build_application
from app.api.server import NoKeys, NoSuchAddress, open_lan, open_socket
from app.api.supervisor import ApiHealth, ApiSupervisor
from app.cli.serve import say_ready
from app.cli.status import status_lines
from app.config.home import Home
from app.config.keys import add_key
from app.core.errors import HomeError
from app.snapshot.codec import status_facts
from app.snapshot.views import Snapshot
from app.system.doctor import check_lan
from tests.app.api.api_double import DoubleNode

# A loopback address that the system takes for any other: tests must not need a LAN.
ELSEWHERE = "127.0.0.77"
TOKEN = "the-token-of-this-home"


@pytest.fixture(autouse=True)
def lan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "is_loopback", lambda host: host == "127.0.0.1")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def names_in(file: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(file.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(address) for address in names.get_values_for_type(x509.IPAddress)]


def test_without_keys_there_is_no_listener_and_one_line_says_why(home: Home) -> None:
    with pytest.raises(NoKeys, match="no program has a key: make one with `shoal keys add NAME`") as refused:
        open_lan(home, ELSEWHERE, 0)
    assert "\n" not in str(refused.value)
    assert not home.api_certificate_file.exists()
    assert open_lan(home, "127.0.0.1", 0) is None


def test_an_address_of_another_machine_is_refused(home: Home) -> None:
    add_key(home.keys_file, "laptop", None, None)
    with pytest.raises(NoSuchAddress, match="not an address of this machine"):
        open_lan(home, "192.0.2.1", 0)


def test_a_certificate_is_made_once_and_anew_for_an_address_that_it_lacks(home: Home) -> None:
    first = lan_certificate(home, "192.168.7.5")
    assert lan_certificate(home, "192.168.7.5") == first
    assert home.api_key_file.stat().st_mode & 0o077 == 0
    key = home.api_key_file.read_bytes()
    second = lan_certificate(home, "fd00::5")
    assert second.fingerprint != first.fingerprint
    assert home.api_key_file.read_bytes() == key
    assert names_in(home.api_certificate_file) == ["fd00::5", "192.168.7.5"]
    assert lan_certificate(home, "192.168.7.5") == second, "both addresses are in it"


def test_a_certificate_is_renewed_before_it_ends(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lan_certificate(home, "192.168.7.5")
    monkeypatch.setattr(certificate, "RENEW_DAYS", certificate.DAYS)
    assert lan_certificate(home, "192.168.7.5").fingerprint != first.fingerprint
    found = x509.load_pem_x509_certificate(home.api_certificate_file.read_bytes())
    assert found.not_valid_after_utc - found.not_valid_before_utc < datetime.timedelta(825)


@pytest.mark.parametrize("damage", [b"", b"-----BEGIN CERTIFICATE-----\nno\n", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["api-certificate.pem", "api-certificate.key"])
def test_damaged_files_are_made_anew(home: Home, name: str, damage: bytes) -> None:
    first = lan_certificate(home, "192.168.7.5")
    (home.folder / name).write_bytes(damage)
    second = lan_certificate(home, "192.168.7.5")
    assert second.fingerprint != first.fingerprint
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(second.certificate_file, second.key_file)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match="certificate"):
        lan_certificate(Home(tmp_path / "missing"), "192.168.7.5")


def test_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [ipaddress.ip_address(text) for text in ("192.168.7.5", "127.0.0.1", "fd00::5", "10.0.0.2")]
    monkeypatch.setattr(certificate, "own_ips", lambda: own)
    assert [str(address) for address in addresses_of("0.0.0.0")] == ["10.0.0.2", "192.168.7.5"]


async def answers(url: str, verify: Any, headers: dict[str, str], path: str = "/v1/models") -> int:
    async with httpx.AsyncClient(verify=verify, headers=headers) as client:
        return (await client.get(url + path)).status_code


async def test_programs_with_keys_ask_over_tls_and_loopback_stays_as_it_is(home: Home) -> None:
    _, key = add_key(home.keys_file, "laptop", None, None)
    node = DoubleNode()
    sock = open_socket(0, explicit=False)
    lan = open_lan(home, ELSEWHERE, sock.getsockname()[1])
    assert lan is not None
    assert lan.url.startswith(f"https://{ELSEWHERE}:")

    def build() -> Any:
        return build_application(node, TOKEN, "1.0", everywhere=True, keys=KeyRing(home.keys_file))

    api = ApiSupervisor(sock, build, ApiHealth(), lan)
    trusting = ssl.create_default_context(cafile=str(lan.certificate.certificate_file))
    with_key = {"Authorization": f"Bearer {key}"}
    async with trio.open_nursery() as nursery:
        await nursery.start(api.run)
        assert await answers(lan.url, trusting, with_key) == 200
        assert await answers(lan.url, trusting, {"Authorization": "Bearer wrong"}) == 401
        assert await answers(lan.url, trusting, with_key, "/control/status") == 403
        own = {**with_key, "Origin": lan.url}
        assert await answers(lan.url, trusting, own) == 200, "the API's own pages"
        assert await answers(lan.url, trusting, {**with_key, "Origin": "https://evil.example"}) == 403
        with pytest.raises(httpx.ConnectError):  # a certificate that nobody vouches for
            await answers(lan.url, ssl.create_default_context(), with_key)
        with pytest.raises(httpx.HTTPError):
            await answers(lan.url.replace("https", "http"), trusting, with_key)
        assert await answers(api.url, trusting, {"Authorization": f"Bearer {TOKEN}"}, "/control/status") == 200
        assert api.url.startswith("http://127.0.0.1:")
        await api.end()
    assert lan.sock.fileno() == sock.fileno() == -1


def test_status_start_and_doctor_name_the_fingerprint(capsys: pytest.CaptureFixture[str]) -> None:
    plain = Snapshot("me", "serving", "", "http://127.0.0.1:7465")
    shown = Snapshot(
        "me", "serving", "", "http://127.0.0.1:7465", lan_url="https://192.168.7.5:7466", lan_fingerprint="AB:CD"
    )
    assert ("lan", "https://192.168.7.5:7466, certificate SHA-256 AB:CD") in status_lines(status_facts(shown))
    assert "lan" not in dict(status_lines(status_facts(plain)))
    named = replace(plain, model="Llama\x1b[2J", context_length=8192)
    assert dict(status_lines(status_facts(named)))["model"] == "Llama[2J, context 8192 tokens"
    say_ready(shown)
    assert capsys.readouterr().out == (
        "ready serving swarm=none peer=me api=http://127.0.0.1:7465 lan=https://192.168.7.5:7466\n"
    )
    running = check_lan("127.0.0.1", 0, shown.lan_url, shown.lan_fingerprint)
    assert (running.status, "AB:CD" in running.detail) == ("ok", True)


@pytest.mark.parametrize(
    ("host", "keys", "status", "words"),
    [
        ("127.0.0.1", 0, "ok", "only programs of this machine"),
        ("::1", 0, "ok", "only programs of this machine"),
        ("0.0.0.0", 0, "fail", "no program has a key"),
        ("192.168.7.5", 2, "ok", "for 2 keys"),
    ],
)
def test_the_doctor_says_what_a_node_would_do(host: str, keys: int, status: str, words: str) -> None:
    check = check_lan(host, keys)
    assert (check.status, words in check.detail, bool(check.mend)) == (status, True, status == "fail")
