# python -m pytest tests/mpi/test_disagree.py
"""Ranks that are not in the same state stop by name, before anything is computed from it."""

import pathlib

import pytest

from mpi_run import run_mpi

pytestmark = pytest.mark.mpi
SCRIPT = pathlib.Path(__file__).with_name("rank_disagree.py")


@pytest.mark.parametrize("what, named", [("tokens", "tokens fed"), ("tables", "page tables")])
def test_a_rank_in_another_state_stops_all_by_name(what, named):
    path = {"PYTHONPATH": f"{SCRIPT.parent.parent}:{SCRIPT.parent.parent.parent}"}
    done = run_mpi(2, [SCRIPT, what], timeout=120, env=path)
    assert done.returncode == 6, done.stderr[-2000:]
    assert f"rank 1: before round 1 the {named} differ" in done.stderr
    assert "rank 0 went on" not in done.stdout
