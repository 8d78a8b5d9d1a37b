"""Protobuf messages on a stream, each after its length as a varint, as libp2p's own protocols send them. Bounded."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from multiaddr import Multiaddr

from p2p.addresses import Address, BadAddress, parse_address
from p2p.channel.multistream import NegotiationStream, read_exactly
from p2p.errors import ProtocolError

MAX_MESSAGE_BYTES = 8192

M = TypeVar("M", bound=Message)


async def send_message(stream: Any, message: Message) -> None:
    """Write one message."""
    body = message.SerializeToString()
    assert len(body) <= MAX_MESSAGE_BYTES
    prefix = bytes([len(body)]) if len(body) < 128 else bytes([len(body) & 127 | 128, len(body) >> 7])
    await stream.write(prefix + body)


async def receive_message(stream: NegotiationStream, kind: type[M]) -> M:
    """Read one message; raises `ProtocolError` for anything too long or not of this kind."""
    length = (await read_exactly(stream, 1))[0]
    if length >= 128:
        length = (length & 127) | (await read_exactly(stream, 1))[0] << 7
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are read")
    message = kind()
    try:
        message.ParseFromString(await read_exactly(stream, length))
    except DecodeError:
        raise ProtocolError(f"bytes that are no {kind.__name__}") from None
    return message


def address_bytes(address: Address) -> bytes:
    """An address in libp2p's binary form."""
    return bytes(Multiaddr(str(address)).to_bytes())


def address_from_bytes(data: bytes) -> Address:
    """Read libp2p's binary form; raises `BadAddress`."""
    try:
        return parse_address(str(Multiaddr(data[:512])))
    except BadAddress:
        raise
    except Exception as error:
        # The parser of multiaddr raises whatever its codecs raise.
        raise BadAddress(f"bytes that are no address ({type(error).__name__})") from None
