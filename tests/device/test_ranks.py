# python -m pytest -m gpu tests/device/test_ranks.py
"""Several ranks on one device: every layout gives the expected replies and the same bits."""

import json
import pathlib

import pytest

from engine.device import available
from mpi_run import run_mpi

pytestmark = [pytest.mark.gpu, pytest.mark.mpi,
              pytest.mark.skipif(not available(), reason="no CUDA device answers")]
SCRIPT = pathlib.Path(__file__).with_name("rank_walk.py")


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_layouts_agree_to_the_bit(world):
    done = run_mpi(world, SCRIPT, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print({name: (seconds, transport) for name, (_, _, seconds, transport) in found.items()})
    assert {name: wrong for name, (wrong, *_) in found.items() if wrong} == {}
    assert len({digest for _, digest, *_ in found.values()}) == 1, found
