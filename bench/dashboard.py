"""What the dashboard costs: milliseconds of CPU time for each new tree.

    python bench/dashboard.py

For each size of terminal and of engine: the time of Dashboard.update itself, and of update with
the drawing that follows until the screen is whole ("frame"), medians and 95th percentiles of 60
trees that differ as those of a busy engine do. At 4 trees a second a frame may take 250 ms.
"""

import asyncio
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from canned_server import tree  # noqa: E402
from textual.app import App  # noqa: E402

from tui.dashboard import Dashboard  # noqa: E402
from tui.state import History  # noqa: E402

SIZES = ((80, 24), (120, 40), (240, 60))
TREES = 60
CASES = {
    "2 ranks, 3 requests": {},
    "8 ranks of 1,000,000 pages, 64 requests": {"world": 8, "pages": 1_000_000, "requests": 64},
    "2 ranks, 1,000 requests, 1,000 kept": {"requests": 1000},
    "2 ranks, 10,000 log lines, all new in each tree": {"log": 10_000},
}


class Bench(App):
    def compose(self):
        yield Dashboard()


def busier(state, i):
    """The tree of a busy engine i quarters of a second later."""
    rounds = state["rounds"] + 2 * i
    return {
        **state, "time": state["time"] + i / 4, "rounds": rounds,
        "tokens": {"prefill": 100 * i, "decode": 8 * i, "hit": 0},
        "ranks": [{**rank, "round": rounds, "map": rank["map"][i:] + rank["map"][:i],
                   "memory": {"resident": 10**9 + 10**7 * i},
                   "collectives": {k: v + i / 100 for k, v in rank["collectives"].items()}}
                  for rank in state["ranks"]],
        "requests": [{**r, "age": r["age"] + i / 4, "generated": r["generated"] + i,
                      "rate": r["rate"] and r["rate"] + i % 7} for r in state["requests"]],
        "kept": [{**state["kept"][0], "seat": seat, "idle": seat + i}
                 for seat in range(len(state["requests"]))],
        "log": [{**line, "time": line["time"] + 10**5 * i} for line in state["log"]],
    }


async def measure(size, options):
    """[(seconds of update, seconds of a frame)] of each tree."""
    app, found, history, first = Bench(), [], History(), tree(**options)
    for i in range(-1200, 0):
        history.add({"time": first["time"] + i / 4, "rounds": first["rounds"] + 2 * i,
                     "tokens": {"prefill": 100 * i, "decode": 8 * i}}, 0.0)
    async with app.run_test(size=size) as pilot:
        dashboard = app.query_one(Dashboard)
        for n, page in enumerate("12345" if size == SIZES[0] else "1"):
            await pilot.press(page)
            for i in range(TREES + 1):
                state = busier(first, n * TREES + i)
                history.add(state, 0.0)
                started = time.process_time()
                dashboard.update(state, history)
                updated = time.process_time()
                await pilot.pause(0)
                app.screen._on_timer_update()
                if i:       # the first fills empty tables
                    found.append((updated - started, time.process_time() - started))
    return found


def main():
    print(f"{'':<50}{'terminal':>10}{'update, ms':>16}{'frame, ms':>16}")
    print(f"{'':<60}{'median':>8}{'95 %':>8}{'median':>8}{'95 %':>8}")
    for name, options in CASES.items():
        for size in SIZES:
            found = asyncio.run(measure(size, options))
            print(f"{name:<50}{'{}x{}'.format(*size):>10}" + "".join(
                f"{1000 * f(times):8.1f}" for times in zip(*found)
                for f in (statistics.median, lambda t: statistics.quantiles(t, n=20)[-1])))


if __name__ == "__main__":
    main()
