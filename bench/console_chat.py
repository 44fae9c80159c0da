"""What a reply of 100,000 tokens costs the console, at 120x40: `python bench/console.py --chat`.

The reply is prose, lists and code, and comes at 2,000 tokens a second or as fast as it is taken.
In windows of 20,000 tokens: milliseconds of CPU time that a layout takes ("frame"), how long other
work waits for its turn ("wait", a sleep of 5 ms that comes back late), widgets, resident memory.
The times must not grow from window to window; memory may, by the text itself.
"""

import asyncio
import itertools
import statistics
import tempfile
import time

from textual.app import App
from textual.screen import Screen

from tui.chat.chat import Chat
from tui.chat.composer import Composer
from tui.chat.store import Store

TOKENS, WINDOW, RATE = 100_000, 20_000, 2000
LIMIT = 240                     # seconds a case may take
BLOCK = ("\n\n## A heading\n\n", *["word "] * 60, "**bold** ", *["word "] * 60, "\n\n",
         *["\n- item ", *["word "] * 8] * 6, "\n\n```python\n",
         *[*["value = f(1) "] * 4, "\n"] * 12, "```\n\n")


class Bench(App):
    """The chat over a client that says `tokens`, `pace` of them a second (0: no pause)."""

    def __init__(self, store, pace):
        super().__init__()
        self.client, self._store, self._pace, self.said = self, store, pace, 0

    def compose(self):
        yield Chat(self._store)

    async def chat(self, body):
        started = time.monotonic()
        for text in itertools.islice(itertools.cycle(BLOCK), TOKENS):
            self.said += 1
            yield {"choices": [{"delta": {"content": text}, "finish_reason": None}]}
            ahead = self.said / self._pace - (time.monotonic() - started) if self._pace else 0
            if ahead > 0.01:
                await asyncio.sleep(ahead)
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def resident():
    """MiB of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2 ** 20


async def measure(pace):
    """Prints a line for each window of tokens."""
    frames, waits = [], []
    layout = Screen._refresh_layout

    def timed(self, *args, **options):
        before = time.process_time()
        layout(self, *args, **options)
        frames.append(1000 * (time.process_time() - before))

    async def wait():
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            waits.append(1000 * (time.perf_counter() - before) - 5)

    with tempfile.TemporaryDirectory() as folder:
        app = Bench(Store(folder), pace)
        async with app.run_test(size=(120, 40)) as pilot:
            app.query_one(Composer).put("Go on.")
            app.query_one(Composer).focus()
            Screen._refresh_layout = timed
            try:
                chat, waiting = app.query_one(Chat), asyncio.create_task(wait())
                started, cpu, shown = time.perf_counter(), time.process_time(), 0

                def say():
                    line(f"{pace or 'no limit'}", app.said, frames, waits, len(app.query("*")),
                         time.perf_counter() - started, time.process_time() - cpu)

                await pilot.press("enter")
                while chat.runs and time.perf_counter() - started < LIMIT:
                    await asyncio.sleep(0.1)
                    if shown + WINDOW <= app.said < TOKENS:
                        shown += WINDOW
                        say()
                await pilot.pause()
                say()
                waiting.cancel()
            finally:
                Screen._refresh_layout = layout


def line(pace, said, frames, waits, widgets, seconds, cpu):
    """Figures of a window; forgets them."""
    def two(values):
        return (f"{statistics.median(values):8.1f}{max(values):8.0f}" if values else " " * 16)
    print(f"{pace:>10}{said:>10,}{two(frames)}{two(waits)}{widgets:>9}{resident():>9.0f}"
          f"{seconds:>9.1f}{100 * cpu / seconds:>7.0f}", flush=True)
    frames.clear()
    waits.clear()


def chat():
    print(f"{'tokens/s':>10}{'so far':>10}{'frame, CPU ms':>16}{'wait, ms':>16}"
          f"{'widgets':>9}{'MiB':>9}{'seconds':>9}{'CPU %':>7}")
    print(f"{'':>20}{'median':>8}{'most':>8}{'median':>8}{'most':>8}")
    for pace in (RATE, 0):
        asyncio.run(measure(pace))
