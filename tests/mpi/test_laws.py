# python -m pytest tests/mpi/test_laws.py
"""The laws in bytes: whatever the layout, chunk, batch or page, a token's row is the same bits."""

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_layouts_chunks_and_batches_leave_the_bytes_alone(ranks, world):
    facts = ranks(world, "rank_laws.py")
    exchanged, gathered = facts["exchanged"], facts["gathered"]
    if world == 1:
        assert not any(exchanged.values()) and not any(gathered.values())
        return
    assert len(facts["owners"]) > 1
    # small chunks exchange candidates and large ones gather keys: both ways were compared
    for small in ("striped 1", "striped 7", "owner 7"):
        assert exchanged[small] > 0, facts
    for large in ("whole", "striped 64", "R = 128 100"):
        assert gathered[large] > 0, facts
