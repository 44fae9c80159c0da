"""Start ranks from a test, and leave none behind."""

import contextlib
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Open MPI refuses root, and more ranks than cores, without these; 4 reads OMPI_*, 5 reads PRTE_*.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def find_mpirun():
    """The mpirun that belongs to this Python: beside it, else on PATH."""
    beside = pathlib.Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this Python or on PATH: pip install -e '.[mpi]'"
    return found


def run_mpi(world, args, timeout, stdin=None, env=None):
    """Run `mpirun -np world python args` in the tree's root and wait for it.

    args: a script's path, or a list of Python's arguments (["-m", "engine", ...], ["-c", code]).
    stdin: text for rank 0; none is an empty input. env: variables added to this process's own.
    Returns a CompletedProcess (text). After `timeout` seconds, ends every process that it started
    and raises subprocess.TimeoutExpired with the output so far.
    """
    process = _start(world, args, env, subprocess.PIPE)
    try:
        out, err = process.communicate(stdin or "", timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        raise subprocess.TimeoutExpired(process.args, timeout, out, err) from None
    except BaseException:
        _end(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Ranks:
    """Ranks that answer a line of standard input with a line, again and again: they start once.

    args, env: as run_mpi's. The program must end at an empty line.
    """

    def __init__(self, world, args, env=None):
        self._errors = tempfile.TemporaryFile()
        self._process = _start(world, args, env, self._errors)

    def ask(self, line, timeout):
        """The answer, the last line where there are several at once.

        AssertionError with all output where there is none in time, or the ranks have ended.
        """
        process, said, give_up = self._process, "", time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):      # they have ended: told below
            process.stdin.write(line + "\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not said.endswith("\n"):
                if not selector.select(max(0.0, give_up - time.monotonic())):
                    self.end(at_once=True)
                    raise AssertionError(f"no answer in {timeout:g} s\n{said}\n{self.errors()}")
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    process.wait(60)
                    code = process.returncode
                    raise AssertionError(f"exit code {code}\n{said}\n{self.errors()}")
                said += piece.decode()
        return said.splitlines()[-1]

    def errors(self):
        """What the ranks have written to standard error."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    @property
    def ended(self):
        """Whether they are gone."""
        return self._process.poll() is not None

    def end(self, at_once=False):
        """Let them end, or end them; the exit code."""
        process = self._process
        try:
            if not at_once and not self.ended:
                process.stdin.write("\n")
                process.stdin.flush()
                process.wait(60)
        finally:
            if not self.ended:
                _end(process)
        return process.returncode


def _start(world, args, env, stderr):
    """The process of `mpirun -np world python args` in the tree's root."""
    args = [args] if isinstance(args, (str, os.PathLike)) else args
    command = [find_mpirun(), "-np", str(world), sys.executable, *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **OPEN_MPI, **(env or {})}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)


def _end(process):
    """Kill mpirun and its ranks. MPICH gives each rank a session of its own: so go by parents."""
    started = _descendants(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up and not all(_ended(pid) for pid in started):
        time.sleep(0.01)


def _ended(pid):
    """Whether a process is gone, or a zombie that its parent has not asked about yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _descendants(pid):
    """Process ids of a process's children and theirs, from Linux's /proc (elsewhere: none)."""
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]
