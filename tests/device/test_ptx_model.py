# python -m pytest tests/device/test_ptx_model.py
"""Every kernel of engine/model compiles for the H200 and for the Spark, without a GPU.

What the PTX of each must hold is in tests/ptx.py.
"""

import re

import pytest

pytest.importorskip("numba_cuda", reason="PTX is compiled by numba-cuda: pip install .[cuda]")

from numba import float32, int32, int64, uint16, uint32  # noqa: E402

from engine.model import (dense, embed, hyper_cuda, kda_chunk_cuda, kda_cuda,  # noqa: E402
                          mix_cuda, moe, norm, thirds)
from ptx import TARGETS, check, compiled, flat  # noqa: E402


F1, F2, F3, F4 = (flat(float32, d) for d in (1, 2, 3, 4))
H2, W2, I1, I2 = flat(uint16, 2), flat(uint32, 2), flat(int32, 1), flat(int32, 2)

H1, H3 = flat(uint16, 1), flat(uint16, 3)
NORM = F2, int64, F1, F1, float32, I1
TURN = F3, F3, F2, F3, H2, I1, int64, F3
IN = F3, F3, F1, F1, float32, float32, int64, F1, I1, H3, F2, F3, int64, int64

KERNELS = {
    "thirds": (thirds._thirds_kernel, (F1, H1)),
    "rms bf16": (norm.norm_kernel(False, 16, True), NORM + (H2, int64)),
    "rms float32": (norm.norm_kernel(False, 2, False), NORM + (F2, int64)),
    "layer norm bf16": (norm.norm_kernel(True, 1, True), NORM + (H2, int64)),
    "layer norm float32": (norm.norm_kernel(True, 2, False), NORM + (F2, int64)),
    "narrow": (norm._narrow_kernel, (F2, int64, I1, H2)),
    "embed bf16": (embed.embed_kernel(True), (H2, I1, I1, F3)),
    "embed float32": (embed.embed_kernel(False), (F2, I1, I1, F3)),
    "swiglu": (dense._swiglu_kernel, (F2, float32, int64, I1, H2)),
    "choose": (moe.choose_kernel(9, 8, 1), (F3, F1, float32, I1, I2, F2)),
    "choose, thirds": (moe.choose_kernel(9, 8, 3), (F3, F1, float32, I1, I2, F2)),
    "hyper_first": (hyper_cuda.turn_kernel(False, 1), TURN),
    "hyper_out": (hyper_cuda.turn_kernel(True, 1), TURN),
    "hyper_out, thirds": (hyper_cuda.turn_kernel(True, 3), TURN),
    "hyper_in": (mix_cuda.in_kernel(1), IN),
    "hyper_in, thirds": (mix_cuda.in_kernel(3), IN),
    "hyper_out, last": (hyper_cuda._out_kernel, (F3, F3, F2, F3, I1)),
    "hyper_end": (mix_cuda._end_kernel, (F3, I1, F1, float32, H2)),
    "kda few 128": (kda_cuda.few_kernel(128, 4), (F2, H2, H2, F2, F1, F1, F1, float32, float32, I1,
                                                  F4, F3, H2)),
    "kda few 32": (kda_cuda.few_kernel(32, 4), (F2, H2, H2, F2, F1, F1, F1, float32, float32, I1,
                                                F4, F3, H2)),
    "kda prepare": (kda_chunk_cuda.prepare_kernel(128, 4),
                    (F2, H2, F2, F1, F1, float32, F3, I1, F1)),
    "kda recur 128": (kda_chunk_cuda.recur_kernel(128), (F2, F1, I1, F4, F3, F1)),
    "kda recur 32": (kda_chunk_cuda.recur_kernel(32), (F2, F1, I1, F4, F3, F1)),
    "kda finish": (kda_chunk_cuda.finish_kernel(128), (F2, H2, F2, F1, float32, I1, H2)),
}


def ptx(name, cc):
    return compiled(*KERNELS[name], cc)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, cc):
    text = ptx(name, cc)
    check(text, cc)


@pytest.mark.parametrize("name", ["kda few 128", "kda recur 128"])
def test_state_moves_in_16_bytes(name):
    text = ptx(name, (12, 1))
    assert len(re.findall(r"ld\.global\.v4\.u32", text)) == 8
    assert len(re.findall(r"st\.global\.v4\.u32", text)) == 8
