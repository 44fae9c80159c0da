"""What all tests share: the environment of a rank, the embedded model, the reference data."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # before setup.cfg's pythonpath is known, too

import engine.config  # noqa: E402

engine.config.prepare_environment()  # before anything imports numpy or numba

import pytest  # noqa: E402

from mpi_run import run_mpi  # noqa: E402


@pytest.fixture(scope="session")
def mini():
    """Folder of the embedded model."""
    return ROOT / "models" / "mini"


@pytest.fixture(scope="session")
def oracle():
    """Folder of the reference data: tiny-bf16, tiny-fp8 and what they must compute (its README)."""
    return ROOT / "tests" / "oracle"


@pytest.fixture(scope="session")
def mpirun():
    """`run_mpi` of tests/mpi_run.py: mpirun(world, args, timeout) -> CompletedProcess."""
    return run_mpi
