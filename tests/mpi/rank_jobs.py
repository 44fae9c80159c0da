"""mpirun -np W python tests/mpi/rank_jobs.py: scripts of this folder, one after another.

Each line of rank 0's standard input is a JSON list: a script's name without .py, and what its body
takes. The answer is the script's report. An empty line ends it.
"""

import gc
import importlib
import json
import sys

from drive import run_script, world


def main():
    """Serve lines until an empty one."""
    while True:
        line = sys.stdin.readline() if world().rank == 0 else ""
        words = world().broadcast(line.strip().encode())
        if not words:
            return
        name, *args = json.loads(words)
        run_script(importlib.import_module(name).body, *args)
        gc.collect()        # the script's engines


if __name__ == "__main__":
    main()
