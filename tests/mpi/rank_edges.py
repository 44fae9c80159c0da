"""mpirun -np W python tests/mpi/rank_edges.py: prompts that end at edges, and the last page."""

from drive import close_seat, make, open_seat, ORACLE, prefill, random_ids, run_script, trace, world

MODEL = ("--model", ORACLE / "tiny-bf16", "--context", 512, "--parallel", 1)
R, STEPS = 128, 2       # two decode steps: at R - 1 the second one lies beyond R
PROMPTS = (1, 3, 4, 63, 64, 65, R - 1, R, R + 1)
PLACEMENTS = {"striped": (), "owner": ("--placement", "owner"), "R = 128": ("--replicate", R)}
LAST = 6                # pages of a pool that one conversation takes whole


def prompts(report, ids):
    """Each prompt under each placement, against the same with nothing split."""
    unsplit = make(*MODEL, "--split", "off")
    engines = {name: make(*MODEL, *options, "--poison", "--shuffle-pages")
               for name, options in PLACEMENTS.items()}
    for n in PROMPTS:
        text = ids[:n + STEPS]
        alone = trace(unsplit, text, n)
        for name, engine in engines.items():
            report.same(f"{name}, prompt of {n}", trace(engine, text, n), alone)
            report.same(f"{name}, prompt of {n} in chunks of 1",
                        trace(engine, text, n, chunk=1) if n < 5 else trace(engine, text, n, 63),
                        alone)


def last_page(report, ids):
    """A pool that is full to its last page and row, then once more with every page taken before."""
    classes = world().size
    for name, options in PLACEMENTS.items():
        pages = LAST // classes if name == "owner" else LAST
        total = pages * 64
        engine = make(*MODEL, *options, "--pages", LAST, "--poison", "--shuffle-pages")
        below = 2 if name == "R = 128" else 0
        leases = [engine.pool.grant(pages) for _ in range(classes if name == "owner" else 1)]
        free = sum(engine.pool.available())
        report.check(f"{name}: the pool is empty", free == below, f"{free} pages are free")
        report.check(f"{name}: no such lease again", engine.pool.grant(pages) is None)
        for lease in leases:
            engine.pool.release(lease)
        alone = trace(make(*MODEL, "--split", "off"), ids[:total], total - 3)
        for again in range(2):
            report.same(f"{name}, the last page, time {again}",
                        trace(engine, ids[:total], total - 3, chunk=100), alone)


def refilled(report, ids):
    """The same pages for another conversation: nothing of the first is read."""
    engine = make(*MODEL, "--pages", LAST)      # no poison: the old rows are still there
    lease = open_seat(engine, 0, LAST * 64)
    prefill(engine, 0, ids[::-1][:LAST * 64].copy())
    close_seat(engine, 0, lease)
    alone = trace(make(*MODEL, "--split", "off"), ids[:200], 190)
    report.same("pages used before", trace(engine, ids[:200], 190), alone)


def body(report):
    """All edges of one world size."""
    ids = random_ids(LAST * 64, seed=5)
    prompts(report, ids)
    last_page(report, ids)
    refilled(report, ids)


if __name__ == "__main__":
    run_script(body)
