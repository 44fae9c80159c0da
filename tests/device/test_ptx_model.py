# python -m pytest tests/device/test_ptx_model.py
"""Every kernel of engine/model compiles for the H200 and for the Spark, without a GPU.

The PTX must hold no double arithmetic (a constant of the wrong type would bring it in) and no
local memory (a register array that was indexed at run time would).
"""

import re

import pytest

pytest.importorskip("numba_cuda", reason="PTX is compiled by numba-cuda: pip install .[cuda]")

from numba import float32, int32, int64, types, uint16, uint32  # noqa: E402

from engine.device import cuda  # noqa: E402
from engine.model import dense, dots, embed, hyper, kda_cuda, moe, norm  # noqa: E402


def flat(kind, dims):
    return types.Array(kind, dims, "C")


F1, F2, F3, F4 = (flat(float32, d) for d in (1, 2, 3, 4))
H2, W2, I1, I2 = flat(uint16, 2), flat(uint32, 2), flat(int32, 1), flat(int32, 2)

KERNELS = {
    "dots bf16": (dots.dots_kernel(True), (F2, W2, I1, int64, F3)),
    "dots float32": (dots.dots_kernel(False), (F2, F2, I1, int64, F3)),
    "rms bf16": (norm.rms_norm_kernel(True), (F2, int64, F1, float32, I1, H2, int64)),
    "rms float32": (norm.rms_norm_kernel(False), (F2, int64, F1, float32, I1, F2, int64)),
    "layer norm bf16": (norm.layer_norm_kernel(True), (F2, int64, F1, F1, float32, I1, H2, int64)),
    "layer norm float32": (norm.layer_norm_kernel(False),
                           (F2, int64, F1, F1, float32, I1, F2, int64)),
    "narrow": (norm._narrow_kernel, (F2, int64, I1, H2)),
    "embed bf16": (embed._embed_kernel, (H2, I1, I1, F3)),
    "embed float32": (embed._embed_kernel, (F2, I1, I1, F3)),
    "swiglu": (dense._swiglu_kernel, (F2, float32, int64, I1, H2)),
    "choose": (moe._choose_kernel, (F3, F1, float32, I1, I2, F2)),
    "hyper_in": (hyper.hyper_in_kernel(4), (F3, F3, F1, F1, float32, float32, int64, F1, I1, H2, F2,
                                            F2, F3)),
    "hyper_out": (hyper.hyper_out_kernel(4), (F3, F3, F2, F3, I1)),
    "hyper_end": (hyper._hyper_end_kernel, (F3, I1, F2)),
    "kda prepare": (kda_cuda._prepare_kernel,
                    (F2, F2, F2, F1, F1, float32, F3, I1, F2, F2, F2)),
    "kda recur 128": (kda_cuda.recur_kernel(128), (F2, F2, F2, F2, I1, F4, F3, F2)),
    "kda recur 32": (kda_cuda.recur_kernel(32), (F2, F2, F2, F2, I1, F4, F3, F2)),
    "kda finish": (kda_cuda._finish_kernel, (F2, F2, F1, float32, I1, H2)),
}


def ptx(name, cc):
    kernel, signature = KERNELS[name]
    return cuda.compile_ptx(kernel.py_func, signature, cc=cc)[0]


@pytest.mark.parametrize("cc", [(9, 0), (12, 1)])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, cc):
    text = ptx(name, cc)
    body = text[text.index("{"):]
    assert f".target sm_{cc[0]}{cc[1]}" in text
    assert ".f64" not in body
    assert not re.search(r"\b(ld|st)\.local", body)


def test_state_moves_in_16_bytes():
    text = ptx("kda recur 128", (12, 1))
    assert len(re.findall(r"ld\.global\.v4\.u32", text)) == 8
    assert len(re.findall(r"st\.global\.v4\.u32", text)) == 8
