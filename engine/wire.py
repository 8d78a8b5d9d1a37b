"""Converts hidden states between tensors and the byte formats that cross between machines: bare rows, no header.

The formats are torch's own `f32`, `bf16` and `f16`, and `int8` of `engine.int8_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import int8_rows
from engine.errors import SessionError

INT8 = "int8"
WIRE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# For each format: the integers that its bits are read as, and the bits of the exponent.
_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}


def wire_name(dtype: torch.dtype) -> str:
    """Return the wire's name for a dtype."""
    return _NAMES[dtype]


def to_tensor(parts: list[memoryview], dtype: str, width: int) -> Tensor:
    """Join the bytes of several messages into rows of numbers: (N, width) on the CPU; float32 for `int8`.

    Raises `SessionError` for an unknown format or a length that is not a positive number of whole rows.
    """
    data = bytearray().join(parts)  # one copy: the tensor owns aligned, writable memory
    if dtype != INT8 and dtype not in WIRE_DTYPES:
        raise SessionError(f"the number format {dtype} is unknown")
    size = int8_rows.row_bytes(width) if dtype == INT8 else width * WIRE_DTYPES[dtype].itemsize
    if not data or len(data) % size:
        raise SessionError(f"{len(data)} bytes of {dtype} do not make rows of {width} numbers")
    if dtype == INT8:
        return torch.from_numpy(int8_rows.decode(data, width))
    return torch.frombuffer(data, dtype=WIRE_DTYPES[dtype]).view(-1, width)


def is_finite(rows: Tensor) -> bool:
    """True if no number of these rows (on the CPU) is NaN or infinite."""
    # All exponent bits set mean NaN or infinity. numpy on the bits takes a fraction of torch's time: one pass, and no
    # threads, which on a busy machine wait for each other.
    whole, exponent = _BITS[rows.dtype]
    bits = rows.contiguous().view(whole).numpy() & exponent
    return not bits.size or int(bits.max()) < exponent


def to_bytes(rows: Tensor, dtype: str) -> memoryview:
    """Return the bytes of (N, width) in a wire format."""
    if dtype == INT8:
        return memoryview(int8_rows.encode(rows.detach().to("cpu", torch.float32).numpy()))
    cpu = rows.to("cpu", WIRE_DTYPES[dtype]).contiguous()
    return cpu.view(torch.uint8).numpy().data.cast("B")
