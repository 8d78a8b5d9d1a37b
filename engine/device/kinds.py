"""What each kind of device needs: one row for each, read wherever the code depends on the kind.

| kind | format | attention | graphs | kernels | memory of the driver | tried |
|---|---|---|---|---|---|---|
| CUDA | the model's own from capability 8 on, else measured | flash | yes | Triton | context and libraries | H200 |
| ROCm | measured | flash | yes | Triton, where it passes its test | as CUDA, assumed | no |
| XPU | measured | torch's own, a key for each query head | no | no | not known | no |
| MPS | measured | torch's own, a key for each query head | no | no | none: shares the machine's memory | no |
| CPU | measured | torch's own | no | no | none | x86, ARM |

"No" under `tried` means: only with fakes, by `tests/engine/test_kinds.py`. Importing this module loads no torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["cuda", "rocm", "xpu", "mps", "cpu"]
UNTESTED = "untested: Shoal has not been tested on this kind of device; please report problems"


@dataclass(frozen=True)
class DeviceKind:
    """The needs and abilities of one kind of device; the defaults are those of a GPU that nothing is known of."""

    torch_type: str  # the type of `torch.device`
    tried: bool = False  # on real hardware
    own_format_from: tuple[int, int] | None = None  # compute capability with 16-bit units; None: formats are timed
    flash_attention: bool = False  # attention has kernels for long contexts, which masks and lengths must suit
    grouped_attention: bool = False  # attention takes fewer key heads than query heads
    int8_product: bool = False  # torch multiplies int8 weights without converting them first
    captures_steps: bool = False  # decode steps become graphs, on Triton's kernels where these work
    direct_reads: bool = False  # files are read through pinned buffers
    runs_head: bool = False  # the head may run beside the blocks
    shared_memory: bool = False  # the machine's own memory
    context_bytes: int = 0  # that the driver usually takes, where it does not say so
    library_bytes: int = 0  # kernels and libraries that the driver loads later
    scratch_bytes: int = 0  # captured steps, the libraries' workspace, and what the allocator rounds up


_CUDA = DeviceKind(
    torch_type="cuda",
    tried=True,
    own_format_from=(8, 0),
    flash_attention=True,
    grouped_attention=True,
    int8_product=True,
    captures_steps=True,
    direct_reads=True,
    runs_head=True,
    context_bytes=700 << 20,  # 612 MiB on an H200, less on consumer cards
    library_bytes=288 << 20,  # 244 MiB were seen on an H200
    scratch_bytes=224 << 20,
)
_ROCM = DeviceKind(
    torch_type="cuda",  # torch uses CUDA's names
    flash_attention=True,
    grouped_attention=True,
    captures_steps=True,
    direct_reads=True,
    runs_head=True,
    context_bytes=_CUDA.context_bytes,
    library_bytes=_CUDA.library_bytes,
    scratch_bytes=_CUDA.scratch_bytes,
)
KINDS: dict[str, DeviceKind] = {
    "cuda": _CUDA,
    "rocm": _ROCM,
    "xpu": DeviceKind(torch_type="xpu"),
    "mps": DeviceKind(torch_type="mps", shared_memory=True),
    "cpu": DeviceKind(torch_type="cpu", tried=True, grouped_attention=True, int8_product=True, shared_memory=True),
}
_UNKNOWN = DeviceKind(torch_type="")


def kind_named(name: str) -> DeviceKind:
    """Return the row of a kind by its name; for another name, such as a planned machine's, that of a plain GPU."""
    return KINDS.get(name, _UNKNOWN)


@functools.cache
def kind_of(device: torch.device) -> DeviceKind:
    """Return the row of a torch device."""
    if device.type == "cuda":
        import torch

        return KINDS["rocm" if torch.version.hip else "cuda"]
    return kind_named(device.type)
