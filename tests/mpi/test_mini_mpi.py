# python -m pytest tests/mpi/test_mini_mpi.py
"""The embedded model answers as transformers does, on any number of ranks and all at once."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("world, placement, which, cases", [
    (3, "striped", "all", 15), (3, "owner", "all", 15), (2, "striped", "short", 13),
    (2, "owner", "short", 13), (6, "striped", "short", 13)])
def test_replies_of_the_embedded_model(ranks, world, placement, which, cases):
    assert ranks(world, "rank_mini.py", placement, which)["cases"] == cases
