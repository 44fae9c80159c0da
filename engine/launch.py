"""Starts this very command under mpirun, once for each of several world sizes."""

import os
import pathlib
import shutil
import subprocess
import sys

from engine.errors import WorldError


def run_worlds(argv, sizes):
    """`mpirun -np W python -m engine argv...` for each W of sizes in turn; the exit code."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise WorldError("mpirun is not on PATH", "pip install mpich, or start through "
                         "./mpi_launch.sh")
    code = 0
    for size in sizes:
        command = [mpirun, "-np", str(size), sys.executable, "-m", "engine", *argv]
        code = subprocess.run(command, cwd=os.getcwd(), stdin=subprocess.DEVNULL).returncode
        if code:
            break
    return code
