"""What a reply of 100,000 tokens costs the console, at 120x40: `python bench/console.py --chat`.

It comes at 2,000 tokens a second, in windows of 20,000, or as fast as it is taken; as prose with
lists and code, and as a list, a table, code, a paragraph and a word without an end. Then it is
scrolled, asked for what is earlier, copied, and its conversation opened anew. Each line: CPU time
of the loop's longest turn, for which a key waits ("turn"), and of a layout ("frame"); how much
later than asked a sleep of 5 ms came back ("late", which others on the machine make longer);
widgets; resident memory. The times must not grow from window to window; memory may, by the text.
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
from tui.chat.more import More
from tui.chat.reply import Reply
from tui.chat.store import Store

TOKENS, WINDOW, RATE = 100_000, 20_000, 2000
LIMIT = 240                     # seconds a case may take
PROSE = ("\n\n## A heading\n\n", *["word "] * 60, "**bold** ", *["word "] * 60, "\n\n",
         *["\n- item ", *["word "] * 8] * 6, "\n\n```python\n",
         *[*["value = f(1) "] * 4, "\n"] * 12, "```\n\n")
SHAPES = {                      # name: (what comes once, what comes again and again)
    "prose": ((), PROSE),
    "list": ((), ("- item ", *["word "] * 8, "\n")),
    "table": (("| a | b |\n|---|---|\n",), ("| ", "word ", "word ", "| ", "word ", "|\n")),
    "code": (("```python\n",), (*["value = f(1) "] * 4, "\n")),
    "paragraph": ((), ("word ",)),
    "one word": ((), ("wordword",)),
}


class Bench(App):
    """The chat over a client that says `tokens`, `pace` of them a second (0: no pause)."""

    def __init__(self, store, shape, pace):
        super().__init__()
        self.client, self.said, self._store, self._shape, self._pace = self, 0, store, shape, pace

    def compose(self):
        yield Chat(self._store)

    async def chat(self, body):
        started = time.monotonic()
        once, again = SHAPES[self._shape]
        for text in itertools.islice(itertools.chain(once, itertools.cycle(again)), TOKENS):
            self.said += 1
            yield {"choices": [{"delta": {"content": text}, "finish_reason": None}]}
            ahead = self.said / self._pace - (time.monotonic() - started) if self._pace else 0
            if ahead > 0.01:
                await asyncio.sleep(ahead)
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}


class Watch:
    """`with Watch(app) as watch`: watches the loop; `line(what)` prints what it saw since the last.
    """

    def __init__(self, app):
        self._app = app
        self._layout, self._turn = Screen._refresh_layout, asyncio.events.Handle._run

    def __enter__(self):
        layout, turn = self._layout, self._turn
        self._forget()

        def laid_out(screen, *args, **options):
            before = time.thread_time()
            layout(screen, *args, **options)
            self._frames.append(1000 * (time.thread_time() - before))

        def ran(handle):
            before = time.thread_time()
            turn(handle)
            self._most = max(self._most, 1000 * (time.thread_time() - before))
        Screen._refresh_layout, asyncio.events.Handle._run = laid_out, ran
        self._task = asyncio.ensure_future(self._sleep())
        return self

    def __exit__(self, *_):
        self._task.cancel()
        Screen._refresh_layout, asyncio.events.Handle._run = self._layout, self._turn

    def _forget(self):
        self._frames, self._late, self._most = [], [], 0.0
        self._start, self._cpu = time.perf_counter(), time.process_time()

    async def _sleep(self):
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            self._late.append(1000 * (time.perf_counter() - before) - 5)

    def line(self, what):
        seconds = time.perf_counter() - self._start
        print(f"{what:<28}{self._most:8.0f}{two(self._frames)}{two(self._late)}"
              f"{len(self._app.query('*')):>9}{resident():>7.0f}{seconds:>7.1f}"
              f"{100 * (time.process_time() - self._cpu) / seconds:>7.0f}", flush=True)
        self._forget()


def two(values):
    """Median and largest."""
    return f"{statistics.median(values):8.1f}{max(values):8.0f}" if values else " " * 16


def resident():
    """MiB of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2 ** 20


async def measure(shape, pace):
    """Prints a line for each window of tokens, and for what is done with the reply then."""
    with tempfile.TemporaryDirectory() as folder:
        app = Bench(Store(folder), shape, pace)
        async with app.run_test(size=(120, 40)) as pilot:
            chat = app.query_one(Chat)
            app.query_one(Composer).put("Go on.")
            app.query_one(Composer).focus()
            await pilot.pause()
            with Watch(app) as watch:
                started, shown = time.perf_counter(), 0
                await pilot.press("enter")
                while chat.runs and time.perf_counter() - started < LIMIT:
                    await asyncio.sleep(0.1)
                    if shown + WINDOW <= app.said < TOKENS:
                        shown += WINDOW
                        watch.line(f"{shape}, {app.said:,}")
                await pilot.pause()
                watch.line(f"{shape}, {app.said:,}, {pace or 'at once'}")
                await pilot.press(*["pageup"] * 10)
                watch.line("  ten pages up")
                for _ in range(5):
                    app.query(".text More").first(More).focus()
                    await pilot.press("enter")
                watch.line("  what is earlier, 5 times")
                app.query(Reply).last().focus()
                await pilot.press("c")
                watch.line("  copied")
                await chat.open(chat.current.id)
                await pilot.pause()
                watch.line("  opened anew")


def chat():
    print(f"{'':<28}{'turn,':>8}{'frame, CPU ms':>16}{'late, ms':>16}"
          f"{'widgets':>9}{'MiB':>7}{'s':>7}{'CPU %':>7}")
    print(f"{'':<28}{'CPU ms':>8}{'median':>8}{'most':>8}{'median':>8}{'most':>8}")
    asyncio.run(measure("prose", RATE))
    for shape in SHAPES:
        asyncio.run(measure(shape, 0))
