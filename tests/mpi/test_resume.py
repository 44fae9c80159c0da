# python -m pytest tests/mpi/test_resume.py
"""Resumed = fresh: a prompt that goes on where a conversation ended gives the same bytes."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_conversation_that_goes_on_is_as_if_read_afresh(ranks, world):
    ranks(world, "rank_resume.py")
