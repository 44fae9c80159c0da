# python -m pytest tests/test_mpi_run.py
"""The helper that starts ranks: outputs, input, exit codes, and nothing left after a timeout."""

import os
import pathlib
import subprocess

import pytest

pytestmark = pytest.mark.mpi

RANK = "from mpi4py import MPI; w = MPI.COMM_WORLD; "


def test_ranks_input_environment_and_exit_code(mpirun):
    code = RANK + ("import os, sys; t = w.bcast(sys.stdin.read() if w.rank == 0 else None); "
                   "n = w.reduce(w.rank + 1); "
                   "w.rank or print(w.size, n, t, os.environ['SPARK_TEST']); sys.exit(3)")
    done = mpirun(3, ["-c", code], 60, stdin="a line", env={"SPARK_TEST": "here"})
    assert done.stdout.split() == ["3", "6", "a", "line", "here"], done.stderr
    assert done.returncode == 3


def test_a_timeout_ends_every_rank(mpirun, tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        "print('waiting', flush=True)\n"
        "time.sleep(60)\n")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        mpirun(2, script, 4)
    assert caught.value.output.count("waiting") == 2
    pids = [int(p.stem) for p in tmp_path.glob("*.pid")]
    assert len(pids) == 2 and os.getpid() not in pids
    for pid in pids:
        stat = pathlib.Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
