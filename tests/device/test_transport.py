# python -m pytest -m gpu tests/device/test_transport.py
"""Arrays that cross the ranks, on the device: layouts of heads and sums against NumPy, in mapped
host memory and in device memory alike; walks with branches and cuts against eager ones."""

import numpy as np
import pytest

from engine.device import available

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not available(), reason="no CUDA device answers")]
HEADS = ((0, 11), (11, 22), (22, 22), (22, 33), (33, 43), (43, 64))     # a rank without heads too


@pytest.fixture
def stream():
    from engine.device import cuda
    return cuda.stream()


def crossing(shape, mapped):
    from engine.device_graph import Buffers
    return Buffers().crossing("it", shape, np.float32, mapped)


def seen(crossing):
    wire = crossing.wire
    return wire if isinstance(wire, np.ndarray) else wire.copy_to_host()


def fill(crossing, values):
    if isinstance(crossing.wire, np.ndarray):
        crossing.wire[:] = values
    else:
        crossing.array.copy_to_device(values)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("n, width", [(1, 512), (3, 512), (5, 1), (2, 40)])
def test_heads_rank_by_rank(stream, mapped, n, width):
    from engine.transport import gather_heads, head_spans, scatter_heads
    whole = np.random.default_rng(n).standard_normal((n, 64, width)).astype(np.float32)
    flat = np.concatenate([whole[:, a:b].ravel() for a, b in HEADS])
    parts, target = crossing((flat.size,), mapped), crossing(whole.shape, False)
    fill(parts, flat)
    spans = head_spans(HEADS)
    gather_heads(parts.array, spans, target.array, stream)
    stream.synchronize()
    assert (seen(target) == whole).all()

    fill(parts, np.zeros_like(flat))
    mine = crossing((n, 11, width), mapped)
    scatter_heads(target.array, spans, 22, mine.array, parts.array, stream)
    stream.synchronize()
    flat[n * 22 * width:n * 33 * width] = 0     # the own heads are not sent
    assert (seen(mine) == whole[:, 22:33]).all() and (seen(parts) == flat).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_sum_parts_and_zero(stream, mapped):
    from engine.device import cuda
    from engine.transport import sum_parts, zero
    parts = np.random.default_rng(1).standard_normal((3, 7, 1000)).astype(np.float32)
    y = crossing((7, 1000), mapped)
    sum_parts(cuda.to_device(parts), 3, y.array, stream)
    stream.synchronize()
    assert (seen(y) == parts[0] + parts[1] + parts[2]).all()
    zero(y.array, stream)
    stream.synchronize()
    assert not seen(y).any()


def test_host_work_waits_or_runs_beside(stream):
    """A replayed walk: what the host reads at a cut, on what the next stretch works."""
    from engine.device_graph import Buffers, Side, Walk
    from engine.device import cuda
    from engine.transport import sum_parts
    buffers, side = Buffers(), Side(stream, cuda.stream())
    one, two, out = (buffers.crossing(name, (1, 64), np.float32, True)
                     for name in ("one", "two", "out"))
    both, read = buffers.take("both", 2, 1, 64), []

    def launches(cut):
        branch = side.fork()
        sum_parts(one.array.reshape(1, 1, 64), 1, both[0], branch)
        done = side.mark()
        sum_parts(two.array.reshape(1, 1, 64), 1, both[1], stream)
        side.join(done)
        sum_parts(both, 2, out.array, stream)
        cut(lambda: read.append(out.wire[0, 0]), True)
        sum_parts(both, 1, both[1], stream)             # one is in both places now
        cut(lambda: two.wire.fill(100))
        sum_parts(both, 2, out.array, stream)
    one.wire[:], two.wire[:] = 1, 2
    walk = Walk(stream, launches)
    walk.run()
    buffers.fixed = True
    walk.capture()
    assert read == [3.0] and (out.wire == 2).all()
    for one_value, two_value in ((1, 2), (5, 100), (7, 100)):
        one.wire[:], two.wire[:] = one_value, two_value
        walk.replay()
        assert read[-1] == one_value + two_value
        assert (out.wire == 2 * one_value).all() and (two.wire == 100).all()


def test_buffers_keep_their_place_once_fixed():
    from engine.device_graph import Buffers
    buffers = Buffers()
    first = buffers.take("x", 4, 8)
    assert buffers.take("x", 4, 8) is first and buffers.take("x", 2, 3).shape == (2, 3)
    buffers.name("row", first[2])
    assert buffers.take("row", 8).shape == (8,)
    buffers.fixed = True
    with pytest.raises(AssertionError, match="would move"):
        buffers.take("x", 5, 8)
