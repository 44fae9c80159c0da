"""Start ranks from a test, and leave none behind."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
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
    args = [args] if isinstance(args, (str, os.PathLike)) else args
    command = [find_mpirun(), "-np", str(world), sys.executable, *map(str, args)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **OPEN_MPI, **(env or {})}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True)
    try:
        out, err = process.communicate(stdin or "", timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        raise subprocess.TimeoutExpired(command, timeout, out, err) from None
    except BaseException:
        _end(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


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
