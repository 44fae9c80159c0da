# python -m pytest tests/pool/test_owner.py
"""Owner arithmetic against hand cases and against counting page by page."""

import pytest

from engine.errors import ResidueMismatch, WorldError
from engine.pool import owner


def test_a_page_id_by_hand():
    assert [owner.page_class(i, 3) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [owner.local_index(i, 3) for i in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [owner.stripe(k, 3) for k in range(5)] == [0, 1, 2, 0, 1]
    assert [owner.stripe(k, 1) for k in range(5)] == [0] * 5


@pytest.mark.parametrize("classes", range(1, 9))
def test_ids_are_packed_in_their_class(classes):
    for total in range(0, 3 * classes + 2):
        members = [[i for i in range(total) if i % classes == c] for c in range(classes)]
        for c, ids in enumerate(members):
            assert owner.class_size(total, classes, c) == len(ids)
            assert [owner.local_index(i, classes) for i in ids] == list(range(len(ids)))


def test_needed_by_hand():
    assert owner.needed("striped", 7, 0, 3) == [3, 2, 2]
    assert owner.needed("striped", 7, 2, 3) == [2, 1, 2]  # pages 0 and 1 are replicated
    assert owner.needed("striped", 2, 5, 3) == [0, 0, 0]  # shorter than R
    assert owner.needed("owner", 7, 0, 3, owner=1) == [0, 7, 0]
    assert owner.needed("striped", 7, 0, 1) == [7] == owner.needed("owner", 7, 0, 1)


@pytest.mark.parametrize("world", range(1, 9))
def test_needed_against_counting(world):
    for pages in range(0, 20):
        for replicated in range(0, 20):
            counted = [0] * world
            for k in range(replicated, pages):
                counted[k % world] += 1
            assert owner.needed("striped", pages, replicated, world) == counted


@pytest.mark.parametrize("world", range(1, 9))
def test_smallest_pool_fits_and_one_page_less_does_not(world):
    for counts in ([1] * world, [3] + [0] * (world - 1), [0] * (world - 1) + [2],
                   list(range(world)), [5, 4][:world] + [4] * max(0, world - 2)):
        total = owner.smallest_pool(counts)
        fits = [all(owner.class_size(size, world, c) >= n for c, n in enumerate(counts))
                for size in range(total + 1)]
        assert fits == [size == total for size in range(total + 1)]


@pytest.mark.parametrize("available, rank", [
    ([0], 0), ([4, 4, 4], 0), ([3, 4, 4], 1), ([0, 0, 1], 2), ([5, 7, 6, 7], 1), ([0, 0], 0),
])
def test_choose_owner_takes_most_pages_then_lowest_rank(available, rank):
    assert owner.choose_owner(available) == rank


def test_residue_mismatch_names_id_class_and_expected_class():
    owner.check_residue(14, 2, 3, rank=0)
    with pytest.raises(ResidueMismatch) as caught:
        owner.check_residue(14, 1, 3, rank=2)
    error = caught.value
    assert str(error).startswith("rank 2 received page id 14, which is class 2 of 3")
    assert "class 1 was expected" in str(error)
    assert error.rank == 2 and error.hint and isinstance(error, WorldError)


@pytest.mark.parametrize("page_id, expected", [(-1, 0), (-3, 0), (3, 1), (4, 2), (5, 0)])
def test_no_other_residue_passes(page_id, expected):
    with pytest.raises(ResidueMismatch):
        owner.check_residue(page_id, expected, 3, rank=0)
