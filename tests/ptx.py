"""Compile a kernel to PTX without a GPU, and what must hold of every kernel's text.

No double arithmetic (a constant of the wrong type would bring it in) and no local memory (a
register array that was indexed at run time would).
"""

import re

from numba import types

from engine.device import cuda


def flat(kind, dims):
    """The type of a C-contiguous array."""
    return types.Array(kind, dims, "C")


def compiled(kernel, signature, cc):
    """The PTX of a kernel for a compute capability."""
    return cuda.compile_ptx(kernel.py_func, signature, cc=cc)[0]


def check(text, cc):
    """Assert what must hold of every kernel."""
    body = text[text.index("{"):]
    assert f".target sm_{cc[0]}{cc[1]}" in text
    assert ".f64" not in body
    assert not re.search(r"\b(ld|st)\.local", body)
