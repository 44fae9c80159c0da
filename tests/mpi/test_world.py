# python -m pytest tests/mpi/test_world.py
"""The collectives: sums in rank order, uneven exchanges, agreement, waits that cost little."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_collectives(ranks, world):
    ranks(world, "rank_world.py", timeout=60)
