"""The table of kept conversations: those that ended and may be continued where they stopped."""

from textual.content import Content

from tui import units
from tui.dashboard.livetable import LiveTable, clock
from tui.dashboard.panel import clean
from tui.state import number, rows

MOST = 1000             # conversations that are listed


class Kept(LiveTable):
    """One row a kept conversation."""

    DEFAULT_CSS = "Kept { height: 40%; min-height: 4; }"
    BORDER_TITLE = "Kept conversations"
    HELP = ("Conversations that ended and stay in the pool: one that is continued does not compute"
            " its past again. Owner: class, or all: striped. The longest idle make room first.")
    COLUMNS = (("seat", "seat", 7, "left"), ("tokens", "tokens", 12, "right"),
               ("pages", "pages", 9, "right"), ("idle", "idle", 11, "right"),
               ("owner", "owner", 7, "right"))

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._total = None

    def lines(self, state):
        for kept in rows(state, "kept")[:MOST]:
            owner = number(kept, "owner")
            yield {"seat": clean(str(kept.get("seat", "?")), 7),
                   "owner": "all" if owner is None else f"{owner:.0f}",
                   "idle": clock(number(kept, "idle")),
                   **{k: units.count(number(kept, k)) for k in ("tokens", "pages")}}

    def _fill(self, state):
        super()._fill(state)
        total = len(rows(state, "kept"))
        if total != self._total:
            self._total = total
            self.border_title = Content(f"{self.BORDER_TITLE}  {total:,}")
