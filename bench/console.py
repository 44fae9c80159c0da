"""How the dashboard bears load: the pauses between two turns of its loop, and its memory.

    python bench/console.py [--seconds 10] [--lines 10000] [--chat]

Over the tests' canned engine, without a terminal, at 120x40: eight ranks of 125,000 pages that all
change four times a second; 10,000 lines of log, 40 new ones twenty times a second. A pause is the
time by which a sleep of 10 ms took longer: what a key waits for at worst. --chat measures the chat
instead (console_chat.py); bench/dashboard.py has the cost of a single tree.
"""

import argparse
import asyncio
import os
import pathlib
import resource
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import console_chat  # noqa: E402
from canned_server import CannedServer, tree  # noqa: E402
from tui.app import Console  # noqa: E402
from tui.client import Client  # noqa: E402

SIZE = 120, 40
EVERY = 0.25            # seconds between two trees
SLEEP = 0.01


class Pauses:
    """`with Pauses() as pauses`: measures while inside."""

    async def __aenter__(self):
        self.found, self.cpu, self.start = [], time.process_time(), time.monotonic()
        self._task = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        self.cpu = time.process_time() - self.cpu
        self.seconds = time.monotonic() - self.start

    async def _watch(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(SLEEP)
            self.found.append(time.monotonic() - before - SLEEP)

    def line(self, what):
        found = sorted(self.found)
        half, most = found[len(found) // 2], found[int(len(found) * 0.99)]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return (f"{what:<34} half {1000 * half:6.1f} ms   99 % {1000 * most:6.1f} ms   longest "
                f"{1000 * found[-1]:6.1f} ms   CPU {self.cpu / self.seconds:4.0%}   "
                f"{self.seconds:5.1f} s   at most {memory:4.0f} MiB")


async def ranks(server, app, seconds):
    """All figures of eight large ranks change."""
    base = server.tree
    for i in range(int(seconds / EVERY)):
        n = i * 997 % 100_000
        pages = {"free": 125_000 - n, "leased": n, "kept": 0, "total": 125_000}
        cells = "#" * (n * 256 // 125_000)
        server.change({
            "time": base["time"] + i * EVERY, "rounds": 1000 + i,
            "tokens": {"decode": 5000 + 30 * i, "prefill": 20_000 + 512 * i},
            "ranks": [{**r, "round": 1000 + i, "pages": pages, "map": cells.ljust(256, ".")}
                      for r in base["ranks"]],
            "classes": [{**c, **pages} for c in base["classes"]],
            "requests": [{**r, "generated": i, "age": i * EVERY} for r in base["requests"]]})
        await asyncio.sleep(EVERY)


async def log(server, app, lines):
    """New lines all the time; the tree has the last 200, the console's own come on top."""
    now = server.tree["time"]
    for i in range(0, lines, 40):
        server.change({"time": now + i, "log": [
            {"time": now + n, "level": "refusal", "text": f"line {n} of many, " + "word " * 12}
            for n in range(max(0, i - 160), i + 40)]})
        app.note("info", f"line {i} of the console's own")
        await asyncio.sleep(EVERY / 5)


async def dashboard(seconds, lines):
    """Print a line for each kind of load."""
    with CannedServer(tree(8, 125_000, requests=32)) as server:
        app = Console(Client(server.url))
        async with app.run_test(size=SIZE):
            while not app.state:
                await asyncio.sleep(0.05)
            async with Pauses() as pauses:
                await asyncio.sleep(seconds / 3)
            print(pauses.line("nothing changes"), flush=True)
            async with Pauses() as pauses:
                await ranks(server, app, seconds)
            print(pauses.line("8 ranks of 125,000 pages, 4 Hz"), flush=True)
            async with Pauses() as pauses:
                await log(server, app, lines)
            print(pauses.line(f"a log of {lines:,} lines"), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the ranks' load")
    parser.add_argument("--lines", type=int, default=10_000, help="of the log")
    parser.add_argument("--chat", action="store_true", help="the chat instead of the dashboard")
    args = parser.parse_args()
    if args.chat:
        console_chat.chat()
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder       # not among the user's conversations
        asyncio.run(dashboard(args.seconds, args.lines))


if __name__ == "__main__":
    main()
