# python -m pytest tests/tui/test_ending.py
"""A console that ends by a signal, in a real terminal: what it holds is saved, and nothing is left
of it or of the engine that it has started."""

import fcntl
import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid

import pytest
from textual.app import App

from tui.ending import Ending

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 40.0
MARK = "SPARKGRID_TEST_CONSOLE"     # in the environment of all that a console starts
F2, F3 = b"\x1bOQ", b"\x1bOR"
# Started as an engine: has a rank, which it leaves behind, and drains until it may go.
ENGINE = """
import os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
def end(*_):
    (here / "draining").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    (here / "drained").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
if sys.argv[2:]:
    os.kill(os.getppid(), signal.SIGTERM)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(here / "up").touch()
while True:
    time.sleep(600)
"""
# The console's own main, which does not wait long for an app that cannot end.
QUICK = "import sys, tui.ending, tui.__main__ as m; tui.ending.GRACE = 0.5; sys.exit(m.main())"


def until(condition, what):
    """The first true value of condition(), asked again and again."""
    give_up = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < give_up, what
        time.sleep(0.02)
    return found


class Console:
    """`python -m tui options` on a pseudo terminal. seen: all that it has written there."""

    def __init__(self, folder, *options, python=("-m", "tui")):
        self.folder = folder
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        env = {**os.environ, name: value, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        self._master, theirs = pty.openpty()
        self.terminal = os.ttyname(theirs)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x18\0\x50\0\0\0\0\0")       # 24 x 80
        self.process = subprocess.Popen([sys.executable, *python, *options], cwd=ROOT, env=env,
                                        preexec_fn=lambda: os.login_tty(theirs))
        os.close(theirs)
        self.seen, self._open = b"", True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.close()

    def _read(self):
        while self._open:
            if select.select([self._master], [], [], 0.02)[0]:
                try:
                    self.seen += os.read(self._master, 4096)
                except OSError:
                    return

    def see(self, words):
        try:
            until(lambda: words in self.seen, words)
        except AssertionError:
            raise AssertionError(f"{words} is not in {self.seen[-2000:]}") from None

    def type(self, keys):
        os.write(self._master, keys)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        """What closing a terminal's window does."""
        if self._open:
            self._open = False
            self._reader.join()
            os.close(self._master)

    def code(self):
        """The exit code, at its end; then nothing of it may be left."""
        until(lambda: self.process.poll() is not None, "the console's end")
        assert self.left() == []
        return self.process.returncode

    def left(self):
        """Process ids of the console and all that it started, zombies left out."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                pass
        return found

    def replies(self):
        """Replies in the files of conversations."""
        return [m for path in (self.folder / "state").rglob("*.json")
                for m in json.loads(path.read_text())["messages"] if m["role"] == "assistant"]


@pytest.fixture
def start(server, tmp_path):
    """start(...) -> a Console over the canned server and a started engine, both up."""
    consoles = []

    def started(*words, **options):
        consoles.append(Console(tmp_path, "--connect", server.url, "--start", sys.executable,
                                "-c", ENGINE, str(tmp_path), *words, **options))
        if not words:
            until(lambda: server.watching and (tmp_path / "up").exists(), "both")
        return consoles[0]
    yield started
    for console in consoles:
        console.__exit__()


@pytest.fixture
def may_go(tmp_path):
    (tmp_path / "go").touch()


def ask(server, console):
    """Ask for a reply that stops half way."""
    server.say("one two three", hold=2)
    console.type(F3)
    console.see(b"Enter sends")
    console.type(b"x\r")
    console.see(b"two")


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_its_engine(start, may_go, tmp_path, number, code):
    console = start()
    console.see(b"live")
    console.signal(number)
    assert console.code() == code and (tmp_path / "drained").exists()
    console.see(b"\x1b[?1049l")         # the terminal is as before
    assert b"stopping the engine" not in console.seen and b"Traceback" not in console.seen


def test_a_closed_terminal_ends_it_and_its_engine(start, may_go, tmp_path):
    console = start()
    console.see(b"live")
    console.close()
    assert console.code() == 129 and (tmp_path / "drained").exists()


@pytest.mark.parametrize("end", ["signal", "close"])
def test_what_came_of_a_reply_is_kept(server, start, may_go, tmp_path, end):
    console = start()
    ask(server, console)
    if end == "signal":
        console.signal(signal.SIGTERM)
    else:
        console.close()
    assert console.code() == {"signal": 143, "close": 129}[end]
    (reply,) = console.replies()
    assert reply["content"] == "one two " and reply["figures"]["reason"] == "stopped"
    assert (tmp_path / "drained").exists()
    until(lambda: server.left, "the stream's end at the server")


def test_a_second_signal_does_not_cut_the_engines_draining(start, tmp_path):
    console = start()
    console.signal(signal.SIGTERM)
    until((tmp_path / "draining").exists, "draining")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        console.signal(number)
    console.close()
    time.sleep(0.2)
    assert console.process.poll() is None and len(console.left()) == 3
    (tmp_path / "go").touch()
    assert console.code() == 143 and (tmp_path / "drained").exists()


def test_leaving_by_a_key_says_that_the_engine_is_stopped(start, may_go, tmp_path):
    console = start()
    console.see(b"live")
    console.type(b"\x11")               # Ctrl-Q
    console.see(b"l")                   # others use it, so it asks
    console.see(b"Stop it")
    console.type(b"s")
    assert console.code() == 0 and (tmp_path / "drained").exists()
    assert console.seen.rstrip().endswith(b"stopping the engine ...")


def test_a_signal_while_the_console_starts(start, may_go, tmp_path):
    """From its own engine, which is started first."""
    assert start("at once").code() == 143
    assert (tmp_path / "drained").exists()


def test_a_terminal_that_nobody_reads(server, start, may_go, tmp_path):
    """More pictures wait than the app keeps: it cannot go on, nor end."""
    console = start(python=("-c", QUICK))
    ask(server, console)
    until(console.replies, "what came, in its file")
    stopped = os.open(console.terminal, os.O_RDWR | os.O_NOCTTY)
    termios.tcflow(stopped, termios.TCOOFF)
    os.close(stopped)
    for _ in range(60):
        console.type(F2 + F3)
        time.sleep(0.02)
    console.signal(signal.SIGTERM)
    assert console.code() == 143 and (tmp_path / "drained").exists()
    (reply,) = console.replies()
    assert reply["content"] == "one two "


@pytest.mark.parametrize("command, words", [
    ("/no/such/engine", b"tui: the engine is not started: /no/such/engine: No such file"),
    (str(ROOT / "README.md"), b"README.md: Permission denied")])
def test_an_engine_that_cannot_be_started(server, tmp_path, command, words):
    with Console(tmp_path, "--connect", server.url, "--start", command) as console:
        assert console.code() == 2
        console.see(words)
        assert console.seen.count(b"\n") == 1


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "state").touch()
    with Console(tmp_path, "--connect", server.url, "--start", "true") as console:
        assert console.code() == 2
        console.see(str(tmp_path / "state").encode())


# ---- without a terminal ------------------------------------------------------------------------

def test_a_signal_before_the_app_runs_is_not_lost():
    before = signal.getsignal(signal.SIGTERM)
    with Ending() as ending:
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.code == 143 and ending.run(None) == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_the_apps_loop_runs_is_not_lost():
    class Early(App):
        def run(self):
            os.kill(os.getpid(), signal.SIGTERM)
            super().run(headless=True)

        def on_mount(self):
            raise AssertionError("it was started")
    with Ending() as ending:
        assert ending.run(Early()) == 143


def test_an_app_that_ends_by_itself_has_its_own_code():
    class Short(App):
        def run(self):
            super().run(headless=True)

        def on_mount(self):
            self.exit(return_code=3)
    with Ending() as ending:
        assert ending.run(Short()) == 3
