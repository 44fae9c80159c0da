"""mpirun -np 2 python tests/mpi/rank_disagree.py WHAT: rank 1 differs from rank 0, and stops.

WHAT is "tokens" or "tables".
"""

import sys

from drive import greedy, make, ORACLE, random_ids, world

from engine.errors import WorldError

if __name__ == "__main__":
    engine = make("--model", ORACLE / "tiny-bf16", "--context", 256, "--parallel", 2)
    if world().rank == 0:
        engine.submit(random_ids(20), greedy(50))
        while engine.busy:
            engine.step()
        print("rank 0 went on", flush=True)
    else:
        if sys.argv[1] == "tokens":
            engine.ledger._tokens = b"another "
        else:
            engine.ledger._rows[1] = b"another "
        try:
            engine.follow()
        except WorldError as error:
            print(error.report(), file=sys.stderr, flush=True)
            world().abort(error.exit_code)
