"""The log: refusals and faults that the engine reports, and what the console has to say itself.

Lines are wrapped once, when they come or the width changes, and the oldest go when there are many.
"""

import collections
import textwrap
import time

from rich.cells import cell_len
from rich.segment import Segment
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.dashboard.panel import clean
from tui.state import number, rows, text

ENTRIES = 1000          # that are remembered
LONGEST = 2000          # characters of an entry
SIGNS = {"fault": "✗", "refusal": "○", "warning": "!", "info": "·"}
INDENT = 20             # columns of time and level
WIDE = 80               # columns from which the rest of an entry stands below its beginning
HANG = 2                # columns before the rest elsewhere


class EventLog(ScrollView):
    """Newest last; follows the end while it is shown, else stays where it is."""

    DEFAULT_CSS = """
    EventLog { height: 1fr; min-height: 3; padding: 0 1; border-top: solid $panel;
          border-title-color: $text; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
          overflow-x: hidden; }
    EventLog:focus { border-top: heavy $primary; }
    EventLog > .log--time { color: $text-muted; }
    EventLog > .log--fault { color: $text-error; text-style: bold; }
    EventLog > .log--refusal, EventLog > .log--warning { color: $text-warning; }
    EventLog > .log--info { color: $text-muted; }
    """
    COMPONENT_CLASSES = {"log--time", "log--fault", "log--refusal", "log--warning", "log--info"}
    BORDER_TITLE = "5 Log"
    HELP = ("Refused requests (○) and faults (✗) of the engine, and notes of the console (! ·)."
            " y copies all of it.")
    BINDINGS = [Binding("y", "copy", "Copy log")]
    can_focus = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._entries = collections.deque(maxlen=ENTRIES)   # (seconds, level, text)
        self._lines = collections.deque()                   # (entry, text of this line, first?)
        self._width = 0
        self._sources = {}                                  # {source: newest entry as it came}
        self._engine = None                                 # the engine's list, as it came
        self._follow = True                                 # whether the end is what is read
        self.tooltip = self.HELP

    def update(self, state, history):
        """Take what is new of the engine's log and of the console's notes."""
        new = []
        log = state.get("log")
        if log is not self._engine:
            self._engine = log
            new += self._unseen("engine", rows(state, "log"))
        if history is not None and history.notes:
            new += self._unseen("console", history.notes)
        if new:
            self._add(sorted(new, key=lambda entry: number(entry, "time") or 0))

    def _unseen(self, source, entries):
        """Entries after the one that was the newest before."""
        entries = list(entries)
        last = self._sources.get(source)
        if not entries or entries[-1] == last:
            return []
        self._sources[source] = entries[-1]
        for i in range(len(entries) - 1, -1, -1):
            if entries[i] == last:
                return entries[i + 1:]
        since = number(last, "time")
        return [e for e in entries
                if since is None or (number(e, "time") or since + 1) > since][-ENTRIES:]

    def _add(self, entries):
        dropped = 0
        for entry in entries:
            if len(self._entries) == ENTRIES:
                dropped += self._drop()
            shown = (number(entry, "time"), clean(text(entry, "level") or "?", 8),
                     clean(text(entry, "text") or "?", LONGEST))
            self._entries.append(shown)
            self._lines += self._wrap(shown)
        self._resized()
        if self._follow:
            self.scroll_end(animate=False)
        elif dropped:
            self.scroll_to(y=max(0, self.scroll_offset.y - dropped), animate=False)
        self.refresh()

    def _drop(self):
        """Forget the oldest entry. Returns how many lines it had."""
        self._entries.popleft()
        n = 0
        while self._lines and (n == 0 or not self._lines[0][2]):
            self._lines.popleft()
            n += 1
        return n

    def _wrap(self, entry):
        """[(entry, text, whether it is the first)] in the present width. After the first the text
        has its indent."""
        width, rest = max(INDENT + 10, self._width), INDENT if self._width >= WIDE else HANG
        if cell_len(entry[2]) == len(entry[2]):
            lines = textwrap.wrap(entry[2], width, initial_indent=" " * INDENT,
                                  subsequent_indent=" " * rest)
            lines[:1] = [line[INDENT:] for line in lines[:1]]
        else:
            lines = [line.plain.rstrip() for line in Content(entry[2]).wrap(width - INDENT)]
            lines[1:] = [" " * rest + line for line in lines[1:]]
        return [(entry, line, i == 0) for i, line in enumerate(lines or [""])]

    def _resized(self):
        self.virtual_size = Size(self._width, len(self._lines))

    def on_resize(self):
        width = self.scrollable_content_region.width
        if width != self._width:
            self._width = width
            self._lines = collections.deque(
                line for entry in self._entries for line in self._wrap(entry))
            self._resized()
            self.refresh()
        if self._follow:
            self.scroll_end(animate=False)

    def watch_scroll_y(self, old, new):
        super().watch_scroll_y(old, new)
        self._follow = round(new) >= self.max_scroll_y

    def render_line(self, y):
        i, width = y + self.scroll_offset.y, self.scrollable_content_region.width
        base = self.visual_style.rich_style
        if i >= len(self._lines):
            return Strip.blank(width, base)
        (at, level, _), line, first = self._lines[i]
        if not first:
            segments = [Segment(line, base)]
        else:
            name = f"log--{level}"
            known = name in self.COMPONENT_CLASSES
            style = self.get_visual_style(name).rich_style if known else base
            segments = [Segment(f"{_clock(at)}  ", self.get_visual_style("log--time").rich_style),
                        Segment(f"{SIGNS.get(level, '?')} {level:<8}", style), Segment(line, base)]
        return Strip(segments).adjust_cell_length(width, base)

    def as_text(self):
        """All that is remembered, a line an entry."""
        return "\n".join(f"{_clock(at)} {level} {line}" for at, level, line in self._entries)

    def action_copy(self):
        """Copy the log."""
        self.app.copy_to_clipboard(self.as_text())
        self.notify(f"{len(self._entries):,} lines copied")


def _clock(at):
    """HH:MM:SS here, of seconds since 1970."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at)) if at is not None else "--:--:--"
    except (OverflowError, ValueError, OSError):
        return "--:--:--"
