"""Scripts that run on every rank, started from a test."""

import json
import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def ranks(mpirun):
    """ranks(world, script, *args, timeout=120): a script of this folder on every rank.

    Returns the facts it reported. Fails with what its checks say, with less than one check, and
    with its output where it did not end well.
    """
    def ranks(world, script, *args, timeout=120):
        path = os.pathsep.join([str(HERE.parent.parent), str(HERE.parent)])
        done = mpirun(world, [HERE / script, *args], timeout, env={"PYTHONPATH": path})
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        said = json.loads(done.stdout.splitlines()[-1])
        assert not said["failed"], "\n".join(said["failed"][:20])
        assert said["checks"] > 0
        return said["facts"]
    return ranks
