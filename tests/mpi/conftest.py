"""Scripts that run on every rank, started from a test.

A world's ranks start once and run its scripts one after another. So the tests are sorted by world,
and only one world is up at a time.
"""

import json
import os
import pathlib

import pytest

from mpi_run import Ranks

HERE = pathlib.Path(__file__).resolve().parent
PATH = {"PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE.parent)])}
up = {}         # world: Ranks; one at most


def world_of(item):
    """The world that a test asks for, 0 where it asks for none or starts its own."""
    return item.callspec.params.get("world", 0) if hasattr(item, "callspec") else 0


def pytest_collection_modifyitems(items):
    """Sort the tests of this folder by world, in the places that they have."""
    places = [i for i, item in enumerate(items) if item.path.parent == HERE]
    for place, item in zip(places, sorted((items[i] for i in places), key=world_of)):
        items[place] = item


def pytest_runtest_teardown(nextitem):
    """End the ranks after the last test that can use them."""
    if nextitem is None or nextitem.path.parent != HERE or world_of(nextitem) not in up:
        while up:
            assert up.popitem()[1].end() == 0


@pytest.fixture
def ranks():
    """ranks(world, script, *args, timeout=120): a script of this folder on every rank.

    Returns the facts it reported. Fails with what its checks say, with less than one check, and
    with its output where it did not end well.
    """
    def ranks(world, script, *args, timeout=120):
        if world not in up:
            up[world] = Ranks(world, [HERE / "rank_jobs.py"], PATH)
        try:
            said = json.loads(up[world].ask(json.dumps([script.removesuffix(".py"), *args]),
                                            timeout))
        except BaseException:
            up.pop(world).end(at_once=True)     # the next test gets new ones
            raise
        assert not said["failed"], "\n".join(said["failed"][:20])
        assert said["checks"] > 0
        return said["facts"]
    return ranks
