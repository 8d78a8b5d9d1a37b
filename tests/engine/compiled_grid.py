"""Compiles the product with a grid for a card that need not be there, and prints what the compiler made of it as JSON.

Run by `tests/engine/test_kernels.py` in a process of its own, because there Triton's interpreter takes the compiler's
place.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.model import grid_kernels

SIGNATURE = {
    "x_ptr": "*bf16", "words_ptr": "*i32", "out_ptr": "*bf16", "scale_ptr": "*fp16", "minimum_ptr": "*fp16",
    "bias_ptr": "*bf16", "residual_ptr": "*bf16", "rows": "i32", "n_out": "i32", "mask": "i32",
}  # fmt: skip
CONSTANTS = {
    "K_SIZE": 4096, "GROUP": 32, "BITS": 4, "ZERO": 8, "MINIMUM": True, "PART": 32, "PARTS": 4, "ROWS": 8, "TILES": 1,
    "WIDTH": 1, "SPLITS": 4, "STAGES": 3, "RUN": grid_kernels.RUN, "GATED": False, "BIAS": False, "RESIDUAL": False,
}  # fmt: skip


def main() -> None:
    """Compile and print."""
    kernel: Any = grid_kernels._grid_product_kernel
    names = kernel.arg_names
    aligned = [name for name, kind in SIGNATURE.items() if kind.startswith("*")]
    source = ASTSource(
        kernel,
        {name: SIGNATURE.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in CONSTANTS.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in [*aligned, "n_out"]},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    code = made.asm["ptx"]
    figures = {
        "shuffles": code.count("shfl.sync"),
        "copies": made.asm["ttgir"].count("ttg.local_alloc %"),
        "vectors": code.count("cp.async.cg.shared.global"),
        "products": code.count("mma.sync"),
    }
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
