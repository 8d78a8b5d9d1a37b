"""Protobuf messages of libp2p's own protocols on a stream: a varint length, then the message, at most 8192 bytes."""

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
    """Write one message with its length; it must not exceed `MAX_MESSAGE_BYTES`."""
    body = message.SerializeToString()
    assert len(body) <= MAX_MESSAGE_BYTES
    prefix = bytes([len(body)]) if len(body) < 128 else bytes([len(body) & 127 | 128, len(body) >> 7])
    await stream.write(prefix + body)


async def receive_message(stream: NegotiationStream, kind: type[M]) -> M:
    """Read one message; raises `ProtocolError` if it is too long or not of this kind."""
    length = (await read_exactly(stream, 1))[0]
    if length >= 128:
        length = (length & 127) | (await read_exactly(stream, 1))[0] << 7
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has {length} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    message = kind()
    try:
        message.ParseFromString(await read_exactly(stream, length))
    except DecodeError:
        raise ProtocolError(f"a message is not a valid {kind.__name__}") from None
    return message


def address_bytes(address: Address) -> bytes:
    """Encode an address in libp2p's binary form."""
    return bytes(Multiaddr(str(address)).to_bytes())


def address_from_bytes(data: bytes) -> Address:
    """Decode an address from libp2p's binary form; raises `BadAddress`."""
    try:
        return parse_address(str(Multiaddr(data[:512])))
    except BadAddress:
        raise
    except Exception as error:
        # multiaddr passes on any exception of its codecs.
        raise BadAddress(f"a binary address is malformed ({type(error).__name__})") from None
