"""mpirun -np W python tests/mpi/rank_mini.py PLACEMENT all|short: the embedded model's replies."""

import sys

from drive import mini_replies, run_script, world


def body(report, placement, which):
    """Every case of expected.json at once, four of them live at a time."""
    cases, found, waited = mini_replies(which, "--placement", placement)
    if world().rank:
        return
    for case, reply in zip(cases, found, strict=True):
        report.check(f"{placement}, {case['name']}", reply == case["greedy_ids"],
                     f"{reply} is not {case['greedy_ids']}")
    report.check("requests waited", waited == {"seats"}, str(waited))
    report.facts["cases"] = len(cases)


if __name__ == "__main__":
    run_script(body, *sys.argv[1:])
