"""Hidden states as bytes: the number formats that cross between machines, to tensors and back."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import SessionError

WIRE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}


def wire_name(dtype: torch.dtype) -> str:
    """The wire's name for a format."""
    return _NAMES[dtype]


def to_tensor(parts: list[memoryview], dtype: str, width: int) -> Tensor:
    """Rows of numbers from the bytes of several messages, joined: (N, width) on the CPU."""
    data = bytearray().join(parts)  # one copy: the tensor owns aligned, writable memory
    if dtype not in WIRE_DTYPES or not data or len(data) % (width * WIRE_DTYPES[dtype].itemsize):
        raise SessionError(f"{len(data)} bytes of {dtype} do not make rows of {width} numbers")
    return torch.frombuffer(data, dtype=WIRE_DTYPES[dtype]).view(-1, width)


def to_bytes(rows: Tensor, dtype: str) -> memoryview:
    """The bytes of (N, width) in a wire format."""
    cpu = rows.to("cpu", WIRE_DTYPES[dtype]).contiguous()
    return cpu.view(torch.uint8).numpy().data.cast("B")
