# python -m pytest tests/test_start.py
"""The start of a process: the progress line, terminals, and what is refused at once."""

import io
import os
import pty
import subprocess
import sys
import time

import pytest

from engine.progress import Progress, _Line

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# --- progress -----------------------------------------------------------------------------------


def test_the_progress_line_appears_late_and_is_wiped(monkeypatch):
    monkeypatch.setattr("engine.progress.PATIENCE", 0.05)
    monkeypatch.setattr("engine.progress.REDRAW", 0.01)
    out = io.StringIO()
    with Progress(True, out).phase("loading") as line:
        assert out.getvalue() == ""
        line.update(30, 120)
        time.sleep(0.2)
    assert "\rloading 25 %, 0 s\x1b[K" in out.getvalue() and out.getvalue().endswith("\r\x1b[K")
    assert "\n" not in out.getvalue()
    before = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == before


def test_bytes_are_shown_with_their_rate():
    line = _Line("loading weights", True, None)
    line._started = time.perf_counter() - 10
    assert line._text() == "loading weights, 10 s"
    line.update(12_300_000_000, 41_000_000_000)
    assert line._text() == "loading weights 12.3 of 41.0 GB, 30 %, 1.2 GB/s, 23 s left"


def test_nothing_is_drawn_for_what_is_quick_or_unseen(monkeypatch):
    out = io.StringIO()
    with Progress(True, out).phase("quick"):
        pass
    monkeypatch.setattr("engine.progress.PATIENCE", 0.0)
    with Progress(False, out).phase("unseen"):
        time.sleep(0.05)
    assert out.getvalue() == ""


TERMINAL = [sys.executable, "-c", "from engine.progress import on_terminal; "
            "import sys; sys.stdout.write(str([on_terminal(i) for i in range(3)]))"]


def through_terminal(command):
    """What a command writes to a pseudo terminal that is its stdin, stdout and stderr."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvp(command[0], command)
    data = b""
    while True:
        try:
            piece = os.read(fd, 4096)
        except OSError:     # Linux: the other side is closed
            piece = b""
        if not piece:
            break
        data += piece
    os.close(fd)
    os.waitpid(pid, 0)
    return data.decode()


def test_a_terminal_is_seen_directly():
    assert "[True, True, True]" in through_terminal(TERMINAL)
    quoted = " ".join(f"'{word}'" for word in TERMINAL)
    assert "[False, True, True]" in through_terminal(["sh", "-c", f"true | {quoted}"])
    assert "[False, True, False]" in through_terminal(
        ["sh", "-c", f"{quoted} </dev/null 2>/dev/null"])


@pytest.mark.mpi
def test_a_terminal_is_seen_through_mpirun(monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    command = ["mpirun", "-np", "1", *TERMINAL]
    assert "[True, True, True]" in through_terminal(command)
    quoted = " ".join(f"'{word}'" for word in command)
    assert "[False, True, False]" in through_terminal(
        ["sh", "-c", f"echo | {quoted} 2>/dev/null"])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)
    assert done.stdout == "[False, False, False]"


# --- starts that are refused, as a process ------------------------------------------------------


def start(*args, world=1, stdin=None):
    command = [sys.executable, "-m", "engine", *args]
    if world > 1:
        mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
        command = [mpirun if os.path.exists(mpirun) else "mpirun", "-np", str(world), *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60,
                          input=stdin, **({} if stdin is not None else
                                          {"stdin": subprocess.DEVNULL}))


def refused(done, code, *words):
    error = done.stderr.decode()
    assert done.returncode == code, error
    assert done.stdout == b"" and "Traceback" not in error
    assert error.startswith("sparkgrid: ") and len(error.splitlines()) == 2
    for word in words:
        assert word in error


@pytest.mark.parametrize("args, code, words", [
    (["--no-such-option"], 2, ["--no-such-option", "-h"]),
    (["--model", "no/such/folder", "--prompt", "x"], 3, ["no/such/folder"]),
    (["--model", "engine"], 3, ["config.json"]),
    (["--prompt", ""], 5, ["empty"]),
    (["--prompt", os.fsdecode(b"a\xff")], 2, ["UTF-8"]),
    (["--prompt-ids", "4096"], 5, ["4096"]),
    (["--prompt-ids", "@no/such/file"], 2, ["no/such/file"]),
    (["--context", "40000"], 2, ["40000", "32768"]),
    (["--prompt", "hello " * 50, "--context", "20"], 5, ["20"]),
])
def test_a_wrong_start_is_refused_before_anything_is_compiled(args, code, words):
    refused(start(*args), code, *words)


def test_an_empty_standard_input_as_the_prompt_is_refused():
    refused(start("--prompt", "-", stdin=b"\n"), 5, "standard input", "empty")


def test_help_goes_to_standard_output():
    done = start("-h")
    assert done.returncode == 0 and b"--prompt-ids" in done.stdout and done.stderr == b""


@pytest.mark.mpi
@pytest.mark.parametrize("world, args, code, words", [
    (3, ["--no-such-option"], 2, ["--no-such-option"]),
    (3, ["--model", "no/such/folder"], 3, ["no/such/folder"]),
    (2, ["--prompt", " "], 5, ["empty"]),
    (2, ["--prompt-ids", "@no/such/file"], 2, ["no/such/file"]),
    (9, ["--prompt", "x"], 4, ["9 ranks", "-np 8"]),
    (2, ["--context", "32768", "--parallel", "40000", "--prompt", "x"], 4,
     ["ranks 0, 1 share a memory and need", "KV latents", "free"]),
])
def test_all_ranks_leave_together_and_rank_0_speaks(world, args, code, words):
    refused(start(*args, world=world), code, *words)


@pytest.mark.mpi
def test_help_is_printed_once():
    done = start("-h", world=3)
    assert done.returncode == 0 and done.stdout.count(b"usage:") == 1 and done.stderr == b""
