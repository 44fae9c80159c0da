# python -m pytest tests/device/test_ptx_gemm.py
"""The matrix kernels compile to PTX for both GPUs, with the instructions they are built on.

No GPU is needed. sm_90 is an H200, sm_121 a DGX Spark.
"""

import pytest

pytest.importorskip("numba_cuda", reason="PTX is compiled by numba-cuda: pip install .[cuda]")

from numba import types  # noqa: E402

from engine import (gemm_experts, gemm_experts_many, gemm_few, gemm_ring,  # noqa: E402
                    gemm_tile)
from ptx import TARGETS, compiled, flat  # noqa: E402

INT, BOOL = types.int64, types.boolean
X, F, C = (flat(kind, 1) for kind in (types.uint16, types.float32, types.int32))


def kernels(w):
    """name -> (kernel, argument types) with weights of dtype w."""
    W = flat(w, 1)
    product = (X, W, F, F) + (INT,) * 6 + (BOOL,)
    table = {f"few {form}": (gemm_few.gemv_kernel(*form), product) for form in ((2, 4), (4, 2))}
    table |= {f"ring {form}": (gemm_ring.ring_kernel(*form), product)
              for form in ((1, 1, 2, True), (2, 2, 1, True), (2, 4, 1, False))}
    return {**table, "gemm": (gemm_tile.gemm_kernel(gemm_tile.FORMS[w == types.uint8]), product),
            "few up": (gemm_experts._few_up_kernel,
                       (X, C, W, F, X) + (INT,) * 6 + (types.float32,)),
            "few down": (gemm_experts._few_down_kernel, (X, C, F, W, F, F) + (INT,) * 5),
            "many up": (gemm_experts_many.up_kernel(),
                        (X, C, C, W, F, X) + (INT,) * 5 + (types.float32,)),
            "many down": (gemm_experts_many.down_kernel(),
                          (X, C, C, W, F, F) + (INT,) * 4)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("w", [types.uint16, types.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", list(kernels(types.uint16)))
def test_products(name, w, target):
    text = compiled(*kernels(w)[name], target)
    assert f".target sm_{target[0]}{target[1]}" in text
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text
    assert "call" not in text and ".local" not in text      # all inlined, all in registers
    tiled = name.split()[0] in ("gemm", "many", "ring")
    assert ("cp.async.cg.shared.global" in text) == tiled
    assert ("ld.global.nc.L1::no_allocate.L2::256B.v4.u32" in text) != tiled
    assert ("mul.rn.bf16x2" in text) == (w == types.uint8)


@pytest.mark.parametrize("target", TARGETS)
def test_order(target):
    text = compiled(gemm_experts_many._order_kernel, (C, C, C, INT, INT), target)
    assert "vote.sync.ballot" in text or "vote.ballot" in text


@pytest.mark.parametrize("target", TARGETS)
def test_combine(target):
    text = compiled(gemm_experts_many._combine_kernel, (F, C, F, F, INT, INT), target)
    assert "fma.rn.f32" in text and "call" not in text
