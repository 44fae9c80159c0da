# python -m pytest tests/test_simulator.py
"""The kernels of tests/simulated.py in Numba's simulator: without numba-cuda, without a GPU."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("simulated.py")
CASES = re.findall(r"^def case_(\w+)", SCRIPT.read_text(), re.M)


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_simulated_kernel_agrees_with_the_host(found, case):
    assert found[case] == "", found[case]


def test_every_case_was_run(found):
    assert sorted(found) == sorted(CASES) and len(CASES) >= 10
