# python -m pytest tests/faults/test_lost_rank.py
"""A rank killed or stopped while the engine serves: who is named, what clients get, what is left.

Real ranks of the embedded model, started as mpi_launch.sh starts them.
"""

import os
import pathlib
import signal

import pytest

from serving import Serve, bare, until

pytestmark = pytest.mark.mpi

LONG_REPLY = ("x" * 50, 30_000)             # the embedded model goes on with it to the end
LONG_PROMPT = ([5, 6, 7, 8] * 7_000, 5)     # half a minute of prefill
NAMED = "rank {} is lost: its connection closed"


def in_phase(engine, phase):
    """A Stream in that phase, None for "idle"."""
    if phase == "idle":
        return None
    if phase == "decode":
        return engine.stream(*LONG_REPLY).begun()
    stream = engine.stream(*LONG_PROMPT)
    until(lambda: any(r["state"] == "prefill" and r["fed"] for r in engine.telemetry()["requests"]),
          "a prompt in prefill")
    return stream


def gone(files):
    """Whether no file of a rank's shared memory is left."""
    return not [f for f in files if pathlib.Path(f).exists()]


@pytest.mark.parametrize("world, rank, phase", [
    (2, 1, "idle"), (3, 1, "prefill"), (2, 1, "decode"), (3, 2, "decode")])
def test_a_killed_rank_is_named_to_everyone(world, rank, phase):
    with Serve(world, "--chunk", "256") as engine:
        shared, stream = engine.shared(), in_phase(engine, phase)
        os.kill(engine.pids[rank], signal.SIGKILL)
        status, found = until(lambda: [h for h in [engine.health()] if h[0] != 200], "health")[0]
        assert status == 503, engine.log
        assert found["status"] == "failed" and found["rank"] == rank
        assert NAMED.format(rank) in found["reason"]
        status, headers, refused = engine.ask("POST", "/v1/completions", {"prompt": "a"})
        assert status == 503 and "Retry-After" in headers
        assert NAMED.format(rank) in refused["error"]["message"]
        if stream is not None:
            how, error = stream.ended()
            assert how == "closed" and NAMED.format(rank) in error
        assert engine.wait() == 6
        assert NAMED.format(rank) in engine.log and "try: look at that rank's" in engine.log
        assert shared and gone(shared)


@pytest.mark.parametrize("phase", ["idle", "prefill", "decode"])
def test_rank_0_killed_ends_all(phase):
    with Serve(2, "--chunk", "256") as engine:
        shared, stream = engine.shared(), in_phase(engine, phase)
        os.kill(engine.pids[0], signal.SIGKILL)
        assert engine.wait() == 6
        assert NAMED.format(0) in engine.log
        assert stream is None or stream.ended()[0] == "broken"
        assert gone(shared)


def test_a_stopped_rank_may_come_back_and_is_given_up_later():
    with Serve(3) as engine:
        stream, pids = in_phase(engine, "decode"), engine.pids
        os.kill(pids[1], signal.SIGSTOP)
        status, found = until(lambda: [h for h in [engine.health()] if h[0] != 200], "health")[0]
        assert status == 503 and found["status"] == "late" and found["rank"] == 1
        os.kill(pids[1], signal.SIGCONT)
        until(lambda: engine.health()[0] == 200, "health 200")
        count = len(stream.events)
        until(lambda: len(stream.events) > count, "more tokens")
        assert stream.end is None

        os.kill(pids[1], signal.SIGSTOP)
        how, error = stream.ended()
        assert how == "closed" and f"rank 1 is lost: process {pids[1]} on " in error
        assert engine.wait() == 6


def test_rank_0_stopped_is_given_up():
    with Serve(2) as engine:
        pid = engine.pids[0]
        os.kill(pid, signal.SIGSTOP)
        assert engine.wait() == 6
        assert f"rank 0 is lost: process {pid} on " in engine.log


@pytest.mark.parametrize("rank", [0, 1])
def test_without_the_script_nothing_hangs_either(rank):
    with Serve(2, launcher=bare) as engine:
        stream = in_phase(engine, "decode")
        os.kill(engine.pids[rank], signal.SIGKILL)
        assert engine.wait() != 0 and stream.ended()[0] != "done"
