"""Compile a kernel to PTX without a GPU, and what must hold of every kernel's text.

No double arithmetic (a constant of the wrong type would bring it in) and no local memory (a
register array that was indexed at run time would).

Nine tenths of a compile are Numba's: typing and lowering to NVVM IR, which asks of the target only
whether it is past sm_75. So that is done once a kernel, for the first target, and libNVVM once a
target; `test_texts_are_those_of_compile_ptx` of test_ptx_stages.py holds this against Numba's own
way.
"""

import functools
import gc
import re

from numba import types
from numba.cuda import compiler

TARGETS = (9, 0), (12, 1)       # an H200, a DGX Spark


def flat(kind, dims):
    """The type of a C-contiguous array."""
    return types.Array(kind, dims, "C")


@functools.lru_cache(1)         # tests of one kernel follow one another; an IR is large
def _library(kernel, signature):
    """The NVVM IR of a kernel: the first half of `cuda.compile_ptx`.

    What a kernel closes over is part of its name in the cache on disk, and a device function has
    another there in every process: numbers only.
    """
    held = [cell.cell_contents for cell in kernel.py_func.__closure__ or ()]
    assert all(isinstance(value, int) for value in held), held
    gc.disable()        # Numba makes millions of small objects: looking for cycles is a fifth
    try:
        return compiler._compile_pyfunc_with_fixup(kernel.py_func, signature, device=False,
                                                   abi="numba", cc=TARGETS[0])[0]
    finally:
        gc.enable()


@functools.cache
def compiled(kernel, signature, cc):
    """The PTX of a kernel for a compute capability: its text, whoever asks again."""
    return _library(kernel, signature).get_asm_str(cc)


def check(text, cc):
    """Assert what must hold of every kernel."""
    body = text[text.index("{"):]
    assert f".target sm_{cc[0]}{cc[1]}" in text
    assert ".f64" not in body
    assert not re.search(r"\b(ld|st)\.local", body)
