"""Runs one command and leaves no process of it behind: `python -m engine.keeper COMMAND...`.

mpirun's ranks are in sessions of their own, a stopped one takes no signal but SIGKILL, and when
mpirun is killed nobody ends them. So the keeper makes itself the parent of whatever loses its own
(a "subreaper", Linux), and at the command's end kills every process that is left.

| the keeper gets | the command gets |
|---|---|
| SIGTERM, SIGHUP | SIGTERM |
| SIGINT from a terminal | nothing: the terminal has sent it SIGINT already |
| SIGINT from a process | SIGTERM: it may have got SIGINT already, and mpirun takes two for "now" |
| SIGKILL | SIGTERM, from the system |

It leaves with the command's exit code, 128 + N where signal N ended it.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FROM_KERNEL = 0x80          # si_code of a signal that a terminal made
SWEEP_SECONDS = 5.0         # for killed processes to go
NOT_FOUND = 127             # exit code, as shells give it
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main(command):
    """Run a command (list of words) with this process's input and output; its exit code."""
    become_reaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watched = [n for n in WATCHED if signal.getsignal(n) is not signal.SIG_IGN]     # nohup
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        child = subprocess.Popen(command, preexec_fn=prepare_child)
    except OSError as e:
        return cannot_start(command, e)
    while child.poll() is None:
        told = signal.sigwaitinfo(watched)
        terminal = told.si_signo == signal.SIGINT and told.si_code == FROM_KERNEL
        if told.si_signo != signal.SIGCHLD and not terminal:
            child.terminate()
    give_up = time.monotonic() + SWEEP_SECONDS
    while sweep() and time.monotonic() < give_up:
        time.sleep(0.01)
    return exit_code(child.returncode)


def become_reaper():
    """From now on, descendants that lose their parent become children of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def prepare_child():
    """In the child, before it becomes the command: all signals let through, ended with us."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def cannot_start(command, error):
    """Say that there is no such command; the exit code."""
    print(f"sparkgrid: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
    return NOT_FOUND


def exit_code(returncode):
    """A shell's exit code of a subprocess returncode."""
    return 128 - returncode if returncode < 0 else returncode


def sweep():
    """Kill every descendant and take leave of those that have ended; how many there were.

    Not while a child is waited for elsewhere: its exit code would be lost.
    """
    found = descendants(os.getpid())
    kill(found)
    for pid in found:
        with contextlib.suppress(ChildProcessError):    # not ours: its parent takes leave of it
            os.waitpid(pid, os.WNOHANG)
    return len(found)


def kill(pids):
    """SIGKILL, which stopped processes obey too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid):
    """Process ids of a process's children and theirs, from Linux's /proc (elsewhere: none)."""
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:                                 # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def _prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
