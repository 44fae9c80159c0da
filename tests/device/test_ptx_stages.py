# python -m pytest tests/device/test_ptx_stages.py
"""Every kernel of engine/stages compiles for the H200 and for the Spark, without a GPU.

What the PTX of each must hold is in tests/ptx.py; here also 48 KiB at most of static shared memory.
"""

import re

import pytest

pytest.importorskip("numba_cuda", reason="PTX is compiled by numba-cuda: pip install .[cuda]")

from numba import boolean, float32, int32, int64, uint16, uint32, uint64  # noqa: E402

from engine import device_history, transport  # noqa: E402
from engine.device import cuda  # noqa: E402
from engine.stages import attend_cuda, insert, merge, project, score_cuda  # noqa: E402
from ptx import TARGETS, check, compiled, flat  # noqa: E402


F1, F2, F3, F4 = (flat(float32, d) for d in (1, 2, 3, 4))
I1, I2, I3, H3 = flat(int32, 1), flat(int32, 2), flat(int32, 3), flat(uint16, 3)

KERNELS = {
    "insert": (insert._insert_kernel, (F2, F2, F2, F2, I1, I1, I2, H3, H3, F3, F3)),
    "score": (score_cuda._score_kernel, (F3, F2, I1, I1, I2, H3, float32, int64, int64, int64,
                                         int64, int64, F2, I2, I1)),
    "select": (score_cuda._select_kernel, (I1, I1, int64, int64, int64, int64, int64, F2, I2, I2,
                                           I2, F2, I2, I1)),
    "merge": (merge._merge_kernel, (F3, I3, I2, I1, I1, I2, int64, int64, int64, int64, I2, I2,
                                    I2)),
    "finish": (project._finish_kernel, (F4, F3, F3, I2, I1, F3, F2)),
    "combine": (project._combine_kernel, (F4, F3, F3, F2)),
    "gather pages": (device_history._gather_kernel,
                     (flat(uint64, 2), flat(uint64, 2), I1, int64, flat(uint64, 2))),
    "gather heads": (transport._gather_heads_kernel, (F1, I2, F3)),
    "scatter heads": (transport._scatter_heads_kernel, (F3, I2, int64, F3, F1)),
    "copy": (transport._copy_kernel, (flat(uint32, 1), flat(uint32, 1))),
    "sum parts": (transport._sum_parts_kernel, (F1, int64, F1)),
}

ATTEND = F3, I2, I2, I2, I1, H3, float32, int64, int64, boolean, F4, F3, F3
KERNELS.update({f"attend {tiles}": (attend_cuda.attend_kernel(tiles), ATTEND) for tiles in (1, 4)})


def ptx(name, cc):
    return compiled(*KERNELS[name], cc)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, cc):
    text = ptx(name, cc)
    check(text, cc)
    shared = re.findall(r"\.shared .*\[(\d+)\];", text)
    assert sum(map(int, shared)) <= 48 * 1024


@pytest.mark.parametrize("name, products", [("score", 32), ("attend 1", 64), ("attend 4", 256)])
def test_products_run_on_tensor_cores_and_loads_are_wide(name, products):
    text = ptx(name, (12, 1))
    assert len(re.findall(r"mma\.sync", text)) == products
    wide = r"ld\.global\S*v4\.u32" if name == "score" else r"cp\.async\.cg\.shared\.global\S* .*16"
    assert re.search(wide, text)


@pytest.mark.parametrize("cc", TARGETS)
def test_texts_are_those_of_compile_ptx(cc):
    """But for names, which say how often Numba has compiled and for which target."""
    kernel, signature = KERNELS["combine"]
    ours, numbas = (re.sub(r"_ZN\w+?(?=_param_|\b)", "name", text) for text in (
        compiled(kernel, signature, cc), cuda.compile_ptx(kernel.py_func, signature, cc=cc)[0]))
    assert ours == numbas
