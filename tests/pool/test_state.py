# python -m pytest tests/pool/test_state.py
"""States: sizes by hand; clearing a seat touches no other."""

from types import SimpleNamespace

import numpy as np

from engine.pool.state import States

RELEASE = SimpleNamespace(kda_layers=tuple(range(34)), bindings=12, kda_dim=128, conv=4,
                          index_kpool=4, index_dim=128)
SMALL = SimpleNamespace(kda_layers=(0, 1), bindings=3, kda_dim=4, conv=4, index_kpool=4,
                        index_dim=8)


def part(start, stop):
    return SimpleNamespace(kda_heads=(start, stop))


def arrays(states):
    return states.kda, states.conv, states.tail_k, states.tail_g


def test_bytes_of_a_seat_of_the_release():
    """64 heads: 142,606,336 B of recurrent state and 34 x 3 x 24,576 float32 of convolution."""
    states = States(RELEASE, part(0, 64), 1)
    assert states.kda.nbytes == 142_606_336
    assert states.conv.nbytes == 34 * 3 * 24_576 * 4
    assert states.tail_k.nbytes == states.tail_g.nbytes == 12 * 3 * 128 * 4
    assert states.bytes == sum(a.nbytes for a in arrays(states))


def test_shapes_follow_the_ranks_own_heads():
    states = States(SMALL, part(5, 8), 2)
    assert [a.shape for a in arrays(states)] == [
        (2, 2, 3, 4, 4), (2, 2, 3, 36), (3, 2, 3, 8), (3, 2, 3, 8)]
    assert all(a.dtype == np.float32 for a in arrays(states))
    none = States(SMALL, part(7, 7), 2)
    assert none.kda.size == none.conv.size == 0 and none.tail_k.size
    none.clear(0)


def test_a_seat_is_cleared_and_its_neighbours_are_not():
    states = States(SMALL, part(0, 2), 3)
    for array in arrays(states):
        array[:] = np.nan
    states.clear(1)
    for array in arrays(states):
        assert (array[:, 1] == 0).all() and np.isnan(array[:, [0, 2]]).all()
