# python -m pytest tests/test_imports.py
"""The direction of imports and the size of files: in this tree, and in trees that break a rule."""

import pathlib

import pytest

from import_rules import MAX_LINES, cycles, faults, read_modules, read_sources

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "tui", "tests", "bench")


def test_this_tree():
    sources = read_sources(ROOT, FOLDERS)
    assert {"engine/shape.py", "engine/pool/lease.py", "tests/test_imports.py"} <= set(sources)
    found = faults(sources)
    assert not found, "\n" + "\n".join(found)


def test_the_reference_data_and_the_models_are_left_out(tmp_path):
    for name in ("tests/oracle/make.py", "models/mini/train.py", "engine/a.py", "tests/pool/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert sorted(read_sources(tmp_path, FOLDERS)) == ["engine/a.py", "tests/pool/b.py"]


def broken(path, source, **others):
    """Faults of a tree with `source` at `path` beside small modules of every kind."""
    tree = {f"engine/{name}.py": "" for name in (
        "__init__", "shape", "errors", "host", "device", "config", "world", "step", "sample",
        "pool/__init__", "pool/lease", "pool/owner", "linear", "model/norm", "model/kda",
        "stages/score", "stages/merge", "scheduler", "sequence")}
    tree["tui/__init__.py"] = tree["tui/app.py"] = ""
    assert faults(tree) == []
    return faults({**tree, **others, path: source})


@pytest.mark.parametrize("path, source", [
    ("engine/stages/score.py", "import os"),
    ("engine/stages/score.py", "from engine.stages import merge"),
    ("engine/stages/score.py", "from .merge import merge_host"),
    ("engine/stages/score.py", "from engine.pool.lease import Pool"),
    ("engine/stages/score.py", "from engine.shapes import x"),
    ("engine/stages/score.py", "import scipy"),
    ("engine/model/kda.py", "from engine.model.moe import moe"),
    ("engine/model/kda.py", "import engine.errors"),
    ("engine/model/kda.py", "from engine import world"),
    ("engine/model/kda.py", "import torch"),
    ("engine/pool/lease.py", "from engine.scheduler import Scheduler"),
    ("engine/pool/lease.py", "import engine.stages.score"),
    ("engine/pool/lease.py", "from .. import world"),
    ("engine/pool/lease.py", "import numba"),
    ("engine/shape.py", "import engine.errors"),
    ("engine/errors.py", "from engine.config import Config"),
    ("engine/config.py", "from engine import host"),
    ("engine/world.py", "from engine.pool.table import PageTable"),
    ("engine/scheduler.py", "import engine.stages.score"),
    ("engine/scheduler.py", "import engine.world"),
    ("engine/step.py", "import mpi4py"),
    ("engine/step.py", "from starlette.responses import Response"),
    ("engine/step.py", "import socket"),
    ("engine/step.py", "from mpi4py import MPI"),
    ("engine/step.py", "import mpi4py.util.dtlib"),
    ("engine/step.py", "def f():\n    from mpi4py import MPI"),
    ("engine/step.py", "import tui.app"),
    ("tui/app.py", "from engine.shape import Shape"),
    ("tui/app.py", "class A:\n    import engine"),
])
def test_a_forbidden_edge_is_found(path, source):
    found = broken(path, source)
    assert len(found) == 1 and found[0].startswith(f"{path}:{source.count(chr(10)) + 1}: imports")


@pytest.mark.parametrize("path, source", [
    ("engine/stages/score.py", "import math\nimport numpy as np\nfrom numba import cuda, njit\n"
                               "from engine.shape import Shape\nfrom engine import device, host"),
    ("engine/model/kda.py", "import functools\nfrom engine.model.norm import rms_norm\n"
                            "from ..linear import linear\nimport numba.extending"),
    ("engine/pool/lease.py", "import dataclasses\nfrom engine.pool import owner\n"
                             "from engine.errors import FaultError\nimport numpy"),
    ("engine/world.py", "from mpi4py import MPI"),
    ("engine/config.py", "import os\nos.environ['A'] = ''"),
    ("engine/step.py", "def f():\n    import json"),
    ("engine/__main__.py", "from engine.config import Config\ndef f():\n    import engine.step"),
    ("tui/app.py", "import httpx\nfrom tui import app_parts\nimport os\nos.environ['A']"),
])
def test_an_allowed_edge_is_not(path, source):
    assert broken(path, source) == []


@pytest.mark.parametrize("source", [
    "def f():\n    from engine.errors import FaultError",
    "class A:\n  def f(self):\n    import engine.errors",
    "async def f():\n  if True:\n    from . import errors",
    "def f():\n    importlib.import_module('engine.errors')",
    "f = lambda: __import__('engine.errors')",
])
def test_an_import_inside_a_function_is_found(source):
    found = broken("engine/step.py", source)
    assert len(found) == 1 and "hides an edge" in found[0]


@pytest.mark.parametrize("source", [
    "import os\nos.environ['A']", "import os\nx = os.getenv('A')", "from os import environ"])
def test_the_environment_elsewhere_is_found(source):
    found = broken("engine/step.py", source)
    assert found and all("the environment belongs to engine.config" in line for line in found)


def test_a_cycle_is_found_once_and_named():
    tree = {"engine/a.py": "import engine.b", "engine/b.py": "from engine import c",
            "engine/c.py": "try:\n    from .a import x\nexcept ImportError:\n    pass",
            "engine/d.py": "import engine.a"}
    assert faults(tree) == ["import cycle: engine.a -> engine.b -> engine.c -> engine.a"]
    tree["engine/c.py"] = "def f():\n    import engine.a"
    assert cycles(read_modules(tree)) == []
    tree["engine/d.py"] = "import engine.d"
    assert cycles(read_modules(tree)) == [["engine.d"]]


@pytest.mark.parametrize("late", ["import numba", "from numpy import zeros", "import mpi4py.MPI"])
def test_the_start_must_import_the_compiler_late(late):
    start = "from engine.step import step"
    others = {"engine/step.py": "import engine.late", "engine/late.py": late}
    found = [f for f in broken("engine/__main__.py", start, **others) if "late, and" in f]
    assert len(found) == 1 and found[0].endswith("and engine.late imports it at once")
    start = "def main():\n    from engine.step import step"
    assert not [f for f in broken("engine/__main__.py", start, **others) if "late, and" in f]


@pytest.mark.parametrize("path", ["engine/a.py", "tui/a.py", "tests/pool/a.py", "bench/a.py"])
def test_a_file_over_the_limit_is_found(path):
    assert faults({path: "x = 1\n" * MAX_LINES}) == []
    assert faults({path: "x = 1\n" * (MAX_LINES + 1)}) == [f"{path}: 401 lines, at most 400"]
