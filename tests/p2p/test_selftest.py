"""The start-up check refuses a libp2p whose inside has changed, and says what."""

from __future__ import annotations

from typing import Any

import pytest
from libp2p.security.noise import messages

from p2p.channel import compatibility as selftest
from p2p.channel.compatibility import IncompatibleLibp2p, changes, check_libp2p
from p2p.channel.yamux import YamuxConnection


def test_the_installed_libp2p_is_the_one_expected() -> None:
    assert list(changes()) == []
    check_libp2p()


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(key: Any, noise_static_pubkey: Any) -> bytes:
        return b""

    monkeypatch.setattr(
        selftest, "_SIGNATURES", ((renamed, ("id_privkey", "noise_static_pubkey")), *selftest._SIGNATURES)
    )
    with pytest.raises(
        IncompatibleLibp2p, match=r"renamed takes \(key, noise_static_pubkey\).*Install libp2p==0\.8\.1"
    ):
        check_libp2p()


def test_a_new_abstract_method_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(YamuxConnection, "__abstractmethods__", frozenset({"migrate"}))
    with pytest.raises(IncompatibleLibp2p, match="IMuxedConn now requires migrate"):
        check_libp2p()


def test_the_checked_functions_are_the_ones_in_use() -> None:
    assert messages.make_handshake_payload_sig in [function for function, _ in selftest._SIGNATURES]
