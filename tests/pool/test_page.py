# python -m pytest tests/pool/test_page.py
"""Pages: sizes by hand, NaN in both regions and only where asked, nothing held at all."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.pool.page import Pages, rank_pages

RELEASE = SimpleNamespace(bindings=12, kv_lora=512, index_dim=128, index_kpool=4)
SMALL = SimpleNamespace(bindings=3, kv_lora=16, index_dim=8, index_kpool=4)


@pytest.mark.parametrize("page_rows", [64, 512])
def test_a_token_of_the_release_takes_13_056_bytes(page_rows):
    assert Pages(RELEASE, 3, page_rows, "bf16").bytes == 3 * page_rows * 13_056


def test_shapes_and_dtypes():
    for kv_dtype, dtype in (("bf16", np.uint16), ("float32", np.float32)):
        pages = Pages(SMALL, 5, 64, kv_dtype)
        assert len(pages.latents) == len(pages.keys) == 3
        assert all(a.shape == (5, 64, 16) and a.dtype == dtype for a in pages.latents)
        assert all(a.shape == (5, 16, 8) and a.dtype == dtype for a in pages.keys)
        assert all(a.flags.c_contiguous for a in pages.latents + pages.keys)


@pytest.mark.parametrize("kv_dtype", ["bf16", "float32"])
def test_poison_is_nan_in_the_given_pages_alone(kv_dtype):
    pages = Pages(SMALL, 5, 64, kv_dtype)
    pages.poison(np.array([4, 1], np.int32))
    for array in pages.latents + pages.keys:
        wide = array.astype(np.uint32) << 16 if kv_dtype == "bf16" else array
        values = wide.view(np.float32)
        nan = np.isnan(values).reshape(5, -1)
        assert nan[[1, 4]].all() and not nan[[0, 2, 3]].any()
    pages.poison(np.empty(0, np.int32))


def test_a_rank_with_no_page():
    pages = Pages(SMALL, 0, 64, "bf16")
    assert pages.bytes == 0 and pages.latents[0].shape == (0, 64, 16)
    pages.poison(np.empty(0, np.int32))


@pytest.mark.parametrize("world", range(1, 9))
def test_ranks_hold_all_pages_between_them(world):
    for total in range(0, 20):
        sizes = [rank_pages(total, world, rank) for rank in range(world)]
        assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    assert [rank_pages(7, world, rank, 3) - rank_pages(7, world, rank) for rank in range(world)] \
        == [3] * world
    assert rank_pages(7, 1, world - 1) == 7  # nothing split: each rank holds all
