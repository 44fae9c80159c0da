"""A text as Markdown, however long: only a window of its parts is there as widgets.

The text grows at its end; `show` gives it all each time and only what is new is rendered, in the
last part. Parts that were cut off (tui/chat/cutter.py) do not change any more. At most WINDOW of
them stand on the screen, twice as many while the reader has scrolled away from the end; lines above
and below say how much is not shown, and bring it. So a frame costs the same after a hundred
thousand tokens as after a thousand.

Fragments are appended one after another, each awaited: MarkdownStream's own batching may start an
append before the last one's end, which then shows lines twice.
"""

import asyncio

from textual.containers import Vertical
from textual.widgets import Markdown

from tui.chat.cutter import Cutter
from tui.chat.more import More
from tui.chat.text import printable
from tui.units import count

WINDOW = 6      # parts that are widgets
STEP = 3        # parts that a line brings


class Part(Markdown):
    """One part. Links are not followed: a click copies the address."""

    DEFAULT_CSS = """
    Part { padding: 0; }
    """

    def __init__(self, text):
        super().__init__(text, open_links=False)

    def on_markdown_link_clicked(self, event):
        event.stop()
        self.app.copy_to_clipboard(event.href)
        self.app.notify(printable(event.href[:200]), title="Address copied", markup=False)


class Parts(Vertical):
    """A growing Markdown text."""

    DEFAULT_CSS = """
    Parts { height: auto; }
    """

    def __init__(self, following=lambda: True, **options):
        """following: whether the reader is at the end of the text."""
        super().__init__(**options)
        self._following = following
        self._cutter, self._taken = Cutter(), 0
        self._one = asyncio.Lock()  # of what changes the widgets: it comes from several tasks
        self._first = 0             # index of the first part that is a widget
        self._shown = []            # widgets of parts, in order
        self._above, self._below = More("earlier"), More("later")

    def compose(self):
        yield self._above
        yield self._below

    @property
    def widgets(self):
        """How many parts are widgets now."""
        return len(self._shown)

    async def show(self, text):
        """The text so far; what was given before is its beginning."""
        async with self._one:
            new, self._taken = text[self._taken:], len(text)
            if new:
                await self._add(printable(new))

    async def _add(self, text):
        parts = self._cutter.parts
        at_end = self._first + len(self._shown) == len(parts) and bool(self._shown)
        more, *fresh = self._cutter.feed(text)
        if at_end and more:
            await self._shown[-1].append(more)
        last, needed = len(parts), len(self._shown) + len(fresh)
        if self._following() and not (at_end and needed <= WINDOW):
            await self._window(last - WINDOW, last)
        elif not self._shown or at_end and needed <= 2 * WINDOW:
            await self._window(self._first, last)
        else:
            self._below.say(_size(parts[self._first + len(self._shown):]))

    async def end(self):
        """Show the end of the text."""
        async with self._one:
            parts = len(self._cutter.parts)
            await self._window(parts - WINDOW, parts)

    async def _window(self, first, last):
        """Make parts first..last-1 the ones that are widgets."""
        first, parts = max(0, first), self._cutter.parts
        last = min(last, len(parts))
        first = max(first, last - 2 * WINDOW)
        had = range(self._first, self._first + len(self._shown))
        for i in had:
            if not first <= i < last:
                await self._shown[i - self._first].remove()
        kept = {i: self._shown[i - self._first] for i in had if first <= i < last}
        made = {i: Part(parts[i]) for i in range(first, last) if i not in kept}
        before = [made[i] for i in sorted(made) if kept and i < min(kept)]
        after = [made[i] for i in sorted(made) if not kept or i > min(kept)]
        if before:
            await self.mount_all(before, after=self._above)
        if after:
            await self.mount_all(after, before=self._below)
        self._first, self._shown = first, [{**kept, **made}[i] for i in range(first, last)]
        self._above.say(_size(parts[:first]))
        self._below.say(_size(parts[last:]))

    async def on_more_wanted(self, event):
        event.stop()
        async with self._one:
            if not self._shown:
                return
            top, last = self._shown[0], self._first + len(self._shown)
            if event.which == "earlier":
                first = max(0, self._first - STEP)
                await self._window(first, min(last, first + WINDOW))
                self.call_after_refresh(top.scroll_visible, animate=False, top=True)
            else:
                last = min(len(self._cutter.parts), last + STEP)
                await self._window(max(self._first, last - WINDOW), last)


def _size(parts):
    """What is not shown, in words; "" for nothing."""
    return f"{count(sum(map(len, parts)))} characters" if parts else ""
