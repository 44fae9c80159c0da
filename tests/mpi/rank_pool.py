"""mpirun -np W python tests/mpi/rank_pool.py: a small pool filled, emptied and filled again."""

from drive import greedy, make, ORACLE, random_ids, replies, run_script, world

MODEL = ("--model", ORACLE / "tiny-bf16", "--context", 256, "--parallel", 4, "--chunk", 50)
PROMPTS = (5, 64, 120, 180, 200, 30, 128, 90)   # 22 pages in all, replies included
TOKENS = 8
PLACEMENTS = {"striped": (), "owner": ("--placement", "owner"), "R = 128": ("--replicate", 128)}
ROUNDS = 3


def pages(name):
    """A pool of two windows or fewer, so that requests wait for pages."""
    if world().size > 1 and name == "owner":
        return 4 * world().size     # a class must hold the longest alone
    if world().size > 1 and name == "R = 128":
        return 2 * world().size     # the pages below R lie apart
    return 8


def body(report):
    """Three rounds of more requests than fit, under each placement."""
    requests = [(random_ids(n, seed=n), greedy(TOKENS)) for n in PROMPTS]
    one_by_one = make(*MODEL, "--split", "off")
    alone = [said for request in requests for said in replies(one_by_one, [request])[0] or ()]
    for name, options in PLACEMENTS.items():
        engine = make(*MODEL, *options, "--pages", pages(name), "--poison", "--shuffle-pages")
        for number in range(ROUNDS):
            found, waited = replies(engine, requests)
            if world().rank:
                continue
            unequal = [n for n, a, b in zip(PROMPTS, alone, found, strict=True) if a != b]
            report.check(f"{name}, round {number}: replies as alone", not unequal, str(unequal))
            report.check(f"{name}, round {number}: requests waited for pages", "pages" in waited)
            counts, replicated = engine.pool.counts()
            report.check(f"{name}, round {number}: all pages are free",
                         all(c.free + c.kept == c.total for c in (*counts, replicated)))
    if world().rank == 0:
        report.check("replies differ", len({tuple(said) for said in alone}) > len(PROMPTS) // 2)


if __name__ == "__main__":
    run_script(body)
