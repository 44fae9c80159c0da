"""mpirun -np W python tests/mpi/rank_oracle.py: the small models' greedy replies, float32 KV."""

from drive import (greedy, LENGTHS, make, ORACLE, reference, replies, run_script, unequal_replies,
                   world)

PLACEMENTS = {"striped": (), "owner": ("--placement", "owner"), "R = 128": ("--replicate", 128)}


def body(report):
    """All prompts at once, under each placement."""
    for model in ("tiny-bf16", "tiny-fp8"):
        data = reference(model)
        for name, options in PLACEMENTS.items():
            engine = make("--model", ORACLE / model, "--kv-dtype", "float32", "--context", 1024,
                          *options)
            found, _ = replies(engine, [(data[f"ids_{n}"], greedy(24)) for n in LENGTHS])
            if world().rank == 0:
                unequal = unequal_replies(data, found)
                report.check(f"{model}, {name}", not unequal, f"replies to n = {unequal} differ")


if __name__ == "__main__":
    run_script(body)
