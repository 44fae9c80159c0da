"""Start a serving engine from a test, ask it, hurt it, and leave no process of it behind."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid

from mpi_run import OPEN_MPI, ROOT, find_mpirun

PATIENCE = 60.0         # seconds for what must happen soon, on a machine that does other things too
MARK = "SPARKGRID_TEST_RUN"     # in the environment of all that a Serve starts


def until(condition, what, seconds=PATIENCE):
    """The first true value of condition(), asked again and again."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return found


def launched(world, *options):
    """The command that `./mpi_launch.sh -n world options` runs, with this Python for .venv's."""
    done = subprocess.run([str(ROOT / "mpi_launch.sh"), "--dry-run", "-n", str(world), *options],
                          capture_output=True, text=True, check=True,
                          env={k: v for k, v in os.environ.items() if k != "SPARKGRID_MPI"})
    ours = {f"{ROOT}/.venv/bin/mpirun": find_mpirun(), f"{ROOT}/.venv/bin/python": sys.executable}
    words = [ours.get(word, word) for word in shlex.split(done.stdout)]
    # .venv has MPICH, and this Python perhaps another: it has no such switch
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
    return [w for w in words if w != "-disable-auto-cleanup" or "HYDRA" in version]


def bare(world, *options):
    """The command without the script: mpirun alone."""
    return [find_mpirun(), "-np", str(world), sys.executable, "-m", "engine", *options]


class Serve:
    """`with Serve(world, *options) as engine:` a serving engine, on a port of its own.

    launcher(world, *options) -> command: `launched` or `bare`. ready: wait until it answers. Its
    output is in `log`. What is left of it at the end is killed.
    """

    def __init__(self, world, *options, launcher=launched, ready=True, env=None):
        if not any(o.startswith("--port") for o in options):
            options += ("--port", "0")
        self.command = launcher(world, *options)
        self._world, self._ready = world, ready
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.env = {**os.environ, **OPEN_MPI, **(env or {}), name: value}
        self.out = None
        self.url = None

    def __enter__(self):
        self.out = tempfile.TemporaryFile()
        self.process = self.start()
        try:
            if self._ready:
                self.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        """The process, with `env`, writing to `out`."""
        return subprocess.Popen(self.command, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL,
                                stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True)

    def __exit__(self, *_):
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up and (left := self.left()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait(10)
        self.out.close()

    # --- the processes --------------------------------------------------------------------------

    @property
    def log(self):
        """What it has written so far, both streams."""
        return os.pread(self.out.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    def ready(self):
        """Wait for the address it says, and for its health."""
        def found():
            assert self.process.poll() is None, f"it ended:\n{self.log}"
            return re.search(r"(?:serving .* on|supervising on) (http://\S+?),?\s", self.log)
        self.url = until(found, "an address")[1]
        until(lambda: self.process.poll() is not None or self.health()[0] == 200, "health 200")
        assert self.process.poll() is None, f"it ended:\n{self.log}"

    def left(self):
        """Process ids of what it started and is still there, zombies left out."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def wait(self, seconds=PATIENCE):
        """Wait for its end: the exit code. Then nothing of it may be left."""
        until(lambda: self.process.poll() is not None, f"its end; so far:\n{self.log}\n", seconds)
        assert self.left() == [], self.log
        return self.process.returncode

    def telemetry(self):
        """The newest tree of /telemetry."""
        with self._answer("GET", "/telemetry") as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    return json.loads(line[6:])

    @property
    def pids(self):
        """{rank: process id}, once every rank has been heard."""
        def known():
            found = {r["rank"]: r.get("pid") for r in self.telemetry().get("ranks", ())}
            return len(found) == self._world and all(found.values()) and found
        return until(known, "every rank's process")

    def shared(self):
        """Files in /dev/shm that its ranks have mapped, or had."""
        found = set()
        for pid in self.pids.values():
            maps = pathlib.Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found |= set(re.findall(r"/dev/shm/\S+", maps))
        return found

    # --- requests -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answer(self, method, path, body=None, timeout=PATIENCE):
        parts = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def ask(self, method, path, body=None, timeout=PATIENCE):
        """(status, headers, JSON) of a request; (0, {}, None) where nobody answers."""
        try:
            with self._answer(method, path, body, timeout) as answer:
                return answer.status, answer.headers, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, {}, None

    def health(self):
        """(status, JSON) of /health; (0, None) where nobody answers."""
        status, _, found = self.ask("GET", "/health", timeout=5)
        return status, found

    def stream(self, prompt, max_tokens):
        """A Stream of a completion that has begun; prompt: text, or token ids."""
        return Stream(self, {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                             "stream": True})


class Stream(threading.Thread):
    """A streamed completion, read by a thread. status: HTTP, None before an answer.

    events: the JSON values so far. end: None, then "done" ([DONE]), "closed" (the answer ended
    well, as HTTP goes) or "broken".
    """

    def __init__(self, engine, body):
        super().__init__(daemon=True)
        self._engine, self._body = engine, body
        self.status, self.events, self.end = None, [], None
        self.start()

    def run(self):
        end = "closed"
        try:
            with self._engine._answer("POST", "/v1/completions", self._body) as answer:
                self.status = answer.status
                if self.status != 200:
                    self.events.append(json.loads(answer.read()))
                data = b""
                while piece := answer.read1():      # unlike readline, it tells a broken end
                    *lines, data = (data + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: [DONE]"):
                            end = "done"
                        elif line.startswith(b"data: "):
                            self.events.append(json.loads(line[6:]))
        except (OSError, http.client.HTTPException):
            end = "broken"
        self.end = end

    def begun(self):
        """Wait for some tokens."""
        until(lambda: len(self.events) > 2 or self.end, "tokens")
        assert self.end is None and self.error is None, self.events[-1:]
        return self

    def ended(self):
        """Wait for the end: (how, the error's message or None)."""
        until(lambda: self.end, "a stream's end")
        return self.end, self.error

    @property
    def error(self):
        """The message of an error event, None where there is none."""
        return next((e["error"]["message"] for e in self.events if "error" in e), None)
