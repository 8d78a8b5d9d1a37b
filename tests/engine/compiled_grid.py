"""Compiles kernels for a card that need not be there, and prints what the compiler made of them as JSON.

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

from engine.model import grid_kernels, triton_kernels

SIGNATURE = {
    "x_ptr": "*bf16", "words_ptr": "*i32", "out_ptr": "*bf16", "scale_ptr": "*fp16", "minimum_ptr": "*fp16",
    "bias_ptr": "*bf16", "residual_ptr": "*bf16", "rows": "i32", "n_out": "i32", "mask": "i32",
}  # fmt: skip
CONSTANTS = {
    "K_SIZE": 4096, "GROUP": 32, "BITS": 4, "ZERO": 8, "MINIMUM": True, "PART": 32, "PARTS": 4, "ROWS": 8, "TILES": 1,
    "WIDTH": 1, "SPLITS": 4, "STAGES": 3, "RUN": grid_kernels.RUN, "GATED": False, "BIAS": False, "RESIDUAL": False,
    "OVERLAPS": False,
}  # fmt: skip


# Of a block like Llama-8B's, and its cache.
HEADS = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "PAGE": 64, "QK_NORM": False}
ATTEND = {"GROUP": 16, "SPLITS": 16, "WINDOW": 0, "WRITTEN": False}


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], *more: str, warps: int = 4) -> Any:
    """Compile a kernel; pointers and the arguments `more` are multiples of 16."""
    names = kernel.arg_names
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    source = ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in [*aligned, *more]},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def attention_products(*, int8: bool) -> int:
    """Compile what writes the cache and what reads it; return the products on tensor cores."""
    kept, scales = ("*i8", "*fp32") if int8 else ("*bf16", "*bf16")
    signature = {
        "qkv_ptr": "*bf16", "keys_ptr": kept, "values_ptr": kept, "key_scales_ptr": scales, "value_scales_ptr": scales,
        "pages_ptr": "*i32", "position_ptr": "*i32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "k_norm_ptr": "*bf16",
        "eps": "fp32", "slots": "i32", "max_pages": "i32",
    }  # fmt: skip
    constants = HEADS | {"INT8": int8, "OVERLAPS": True}
    compiled(triton_kernels._write_kernel, signature, constants, warps=1)
    signature |= {
        "out_ptr": "*bf16", "partial_ptr": "*fp32", "stats_ptr": "*fp32", "counter_ptr": "*i32", "q_norm_ptr": "*bf16",
        "scale": "fp32",
    }  # fmt: skip
    made = compiled(triton_kernels._attend_kernel, signature, constants | ATTEND)
    return int(made.asm["ptx"].count("mma.sync"))


def overlapping() -> dict[str, int]:
    """Compile a product that begins before its input is there; loads are those before it waits, and all."""
    constants = CONSTANTS | {"TILES": 2, "STAGES": 1, "OVERLAPS": True}
    made = compiled(grid_kernels._grid_product_kernel, SIGNATURE, constants, "n_out")
    before, after = made.asm["ptx"].split("griddepcontrol.wait")
    return {
        "loads_before": before.count("ld.global"),
        "loads_after": after.count("ld.global"),
        "copies": made.asm["ttgir"].count("ttg.local_alloc %"),
        "products": after.count("mma.sync"),
    }


def main() -> None:
    """Compile and print."""
    made = compiled(grid_kernels._grid_product_kernel, SIGNATURE, CONSTANTS, "n_out")
    code = made.asm["ptx"]
    figures = {
        "shuffles": code.count("shfl.sync"),
        "copies": made.asm["ttgir"].count("ttg.local_alloc %"),
        "vectors": code.count("cp.async.cg.shared.global"),
        "products": code.count("mma.sync"),
        "overlapping": overlapping(),
        "attention": {name: attention_products(int8=name == "int8") for name in ("own", "int8")},
    }
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
