# python -m pytest tests/faults/test_end.py
"""The engine's end, asked for or not: replies finish or say why not, nothing is left behind."""

import contextlib
import os
import pathlib
import pty
import signal
import socket
import subprocess
import sys

import pytest

from engine.keeper import descendants
from serving import ROOT, Serve, launched, until

pytestmark = pytest.mark.mpi

LONG = "x" * 50         # the embedded model goes on with it as long as it may


def test_running_replies_finish_and_no_new_one_begins():
    with Serve(2, "--drain", "60") as engine:
        shared, stream = engine.shared(), engine.stream(LONG, 300).begun()
        engine.process.send_signal(signal.SIGTERM)
        status, _, refused = until(lambda: [a for a in [engine.ask(
            "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})] if a[0] != 200], "503")[0]
        assert status == 503 and "it is being stopped" in refused["error"]["message"]
        assert stream.ended() == ("done", None) and len(stream.events) >= 300
        assert engine.wait() == 0
        assert not [f for f in shared if os.path.exists(f)]


@pytest.mark.parametrize("drain, number", [("0", signal.SIGINT), ("1", signal.SIGTERM)])
def test_what_has_not_finished_is_cut_and_told_so(drain, number):
    with Serve(2, "--drain", drain) as engine:
        streams = [engine.stream(LONG, 30_000).begun() for _ in range(2)]
        os.killpg(engine.process.pid, number)       # the script and mpirun get one each
        for stream in streams:
            how, error = stream.ended()
            assert how == "closed" and f"this reply was cut after {drain} s of grace" in error
        assert engine.wait(10 + 20) == 0        # it says 10 s; the rest is this machine's


def test_ctrl_c_on_a_terminal_lets_replies_finish():
    """One Ctrl-C reaches all of the terminal's group at once, and mpirun would take two for "now".
    """
    here, there = pty.openpty()
    setup = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); " \
            "os.execv(sys.argv[1], sys.argv[1:])"

    class Typed(Serve):
        def start(self):
            return subprocess.Popen(self.command, cwd=ROOT, env=self.env, stdin=there,
                                    stdout=self.out, stderr=subprocess.STDOUT)

    def launcher(world, *options):
        return [sys.executable, "-c", setup, *launched(world, *options)]

    try:
        with Typed(2, "--drain", "60", launcher=launcher) as engine:
            stream = engine.stream(LONG, 300).begun()
            os.write(here, b"\x03")
            until(lambda: "replies may finish" in engine.log, "the drain")
            assert stream.ended() == ("done", None)
            assert engine.wait() == 0
    finally:
        os.close(here)
        os.close(there)


def rank_processes(engine):
    """{rank: process id} of ranks that have not told theirs yet."""
    found = {}
    for pid in descendants(engine.process.pid):
        with contextlib.suppress(OSError):
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = [v[9:] for v in variables if v.startswith(b"PMI_RANK=")]
            if rank and command[:3] == [os.fsencode(sys.executable), b"-m", b"engine"]:
                found[int(rank[0])] = pid
    return found


def starting(moment):
    """A Serve of two ranks that has come to that moment of its start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stack = contextlib.ExitStack()
    engine = stack.enter_context(Serve(2, "--port", str(port), ready=False))
    if moment == "joining":
        until(lambda: len(rank_processes(engine)) == 2, "the ranks")
    else:       # the port is taken before weights are read
        def listens():
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port), timeout=1)
        until(listens, "the port").close()
    return stack, engine


@pytest.mark.parametrize("moment", ["joining", "loading"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_start_can_be_interrupted(number, moment):
    stack, engine = starting(moment)
    with stack:
        engine.process.send_signal(number)
        until(lambda: engine.process.poll() is not None, "its end")
        assert engine.process.returncode != 0
        until(lambda: not engine.left(), "the end of all its processes")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_loads_is_named(rank):
    stack, engine = starting("loading")
    with stack:
        os.kill(rank_processes(engine)[rank], signal.SIGKILL)
        assert engine.wait() == 6
        assert f"rank {rank} is lost: its connection closed" in engine.log


def test_mpirun_killed_takes_all_with_it():
    with Serve(2) as engine:
        stopped, mpirun = engine.pids[1], descendants(engine.process.pid)[0]
        os.kill(stopped, signal.SIGSTOP)
        os.kill(mpirun, signal.SIGKILL)
        assert engine.wait() == 128 + signal.SIGKILL


def test_a_taken_port_is_refused_before_weights_are_read():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Serve(2, "--port", port, ready=False) as engine:
            assert engine.wait() == 4
            assert f"port {port} of 127.0.0.1 cannot be served: Address already in use" \
                in engine.log
            assert "--port 0 takes a free one" in engine.log
            assert "ranks on" not in engine.log         # said once the weights are there
