# python -m pytest tests/device/test_history.py
"""A prompt chunk's history from several ranks: who sends what, what arrives, and the same logits as
where nothing is split."""

import json
import pathlib

import numpy as np
import pytest

from engine.config import Config
from engine.device import available
from engine.device_history import gathered_pages, history_scratch_bytes, plan_route
from engine.pool.table import EVERY_RANK
from engine.shape import Shape
from mpi_run import run_mpi
from release import CONFIG

HERE = pathlib.Path(__file__).parent
RELEASE = Shape.from_config(CONFIG)
GIB = 1 << 30
needs_device = pytest.mark.skipif(not available(), reason="no CUDA device answers")


def on_ranks(world, command, timeout, env=None):
    """What a script of this folder prints as JSON lines, in one dict."""
    script, *args = [command] if isinstance(command, str) else command
    done = run_mpi(world, [HERE / script, *args], timeout=timeout, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found.update(json.loads(line))
    return found


# ---- who sends what -----------------------------------------------------------------------------

@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("a_stretch", [1, 3, 40])
def test_routes_meet(world, a_stretch):
    """What the ranks' picks put into the messages is what their sources take out of them."""
    rng = np.random.default_rng(10 * world + a_stretch)
    holders = rng.integers(-1, world, 23).astype(np.int32)
    assert EVERY_RANK == -1
    locals_ = [np.where((holders == r) | (holders < 0), rng.permutation(23), -1).astype(np.int32)
               for r in range(world)]
    routes = [plan_route(holders, local, r, world, a_stretch) for r, local in enumerate(locals_)]
    logical = []                        # of each rank's local pages
    for local in locals_:
        logical.append({int(page): k for k, page in enumerate(local) if page >= 0})
    covered = []
    for i in range(-(-23 // a_stretch)):
        stretches = [stretches[i] for *_, stretches in routes]
        assert len({(s.first, s.stop, s.counts) for s in stretches}) == 1
        sent = [[logical[r][int(page)] for page in picks[s.pick:s.pick + s.counts[r]]]
                for r, ((picks, *_), s) in enumerate(zip(routes, stretches))]
        for r, (_, sources, _) in enumerate(routes):
            got = [k for q in range(world) if q != r for k in sent[q]]
            for k in range(stretches[0].first, stretches[0].stop):
                source = int(sources[k])
                assert (logical[r][source] if source >= 0 else got[~source]) == k
        assert all(holders[k] >= 0 for part in sent for k in part)      # the others travel nowhere
        covered += range(stretches[0].first, stretches[0].stop)
    assert covered == list(range(23))


def test_buffers_of_the_release():
    million = Config(context=1 << 20)
    for world in (2, 6, 8):
        sizes = dict(history_scratch_bytes(million, RELEASE, world))
        assert sizes["history latents"] == 3 * 32768 * 1024
        candidates = world * 2048 * 512 * 8
        assert sizes["history candidates"] == 2 * candidates
        # pooled keys of 4 KiB a page: no more than candidates would be, nor than there are
        assert sizes["history keys"] == 3 * min(candidates, 16_385 * 4096)
    short = Config(context=8192, placement="owner")
    assert gathered_pages(short, RELEASE, 6) == 129
    assert dict(history_scratch_bytes(short, RELEASE, 6))["history latents"] == 3 * 129 * 65536
    replicated = Config(context=1 << 20, replicate=64 * 1000)
    assert gathered_pages(replicated, RELEASE, 2) == gathered_pages(million, RELEASE, 2) + 1000


# ---- what arrives -------------------------------------------------------------------------------

@pytest.mark.mpi
def test_pages_arrive_in_the_simulator():
    found = on_ranks(3, "rank_fetch.py", 240, {"NUMBA_ENABLE_CUDASIM": "1"})
    assert len(found) == 4 and not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.mpi
@needs_device
@pytest.mark.parametrize("world", [2, 5])
def test_pages_arrive(world):
    found = on_ranks(world, "rank_fetch.py", 120)
    assert len(found) == 4 and not any(found.values()), found


# ---- what comes of it ---------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.mpi
@needs_device
@pytest.mark.parametrize("world, cases", [(2, ["long"]), (3, ["pages of 512"]), (8, ["tiny"])])
def test_history_changes_no_bit(world, cases):
    """At 8 ranks the tiny model's last rank has none of its 7 heads."""
    found = on_ranks(world, ["rank_history.py", *cases], 240)
    print({name: seconds for name, (_, seconds) in found.items()})
    for case in cases:
        digests = {n: d for n, (d, _) in found.items() if n.partition(":")[0] == case}
        assert len(digests) > 2 and len(set(digests.values())) == 1, digests
