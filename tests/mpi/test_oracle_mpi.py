# python -m pytest tests/mpi/test_oracle_mpi.py
"""The small models' greedy replies at world sizes that divide none of their dimensions."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("world", [2, 3, 5, 6, 8])     # of 8 ranks one has no head
def test_greedy_replies_are_the_references(ranks, world):
    ranks(world, "rank_oracle.py")
