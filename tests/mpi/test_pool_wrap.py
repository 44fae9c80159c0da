# python -m pytest tests/mpi/test_pool_wrap.py
"""Edges of prompts, pages and the pool: no length is special, and no page remembers."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("world", [2, 3])
def test_prompts_at_every_edge_and_the_last_page(ranks, world):
    ranks(world, "rank_edges.py")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_small_pool_filled_three_times_gives_the_replies_of_an_empty_one(ranks, world):
    ranks(world, "rank_pool.py")
