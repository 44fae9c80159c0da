"""The panels of the ranks: who each is, its memory, its round, its pages and their map."""

from textual.containers import VerticalScroll
from textual.content import Content

from tui import units
from tui.dashboard import pagemap
from tui.dashboard.panel import Panel, clean, figure, flow
from tui.state import number, rows, table, text

MOST = 16               # ranks that are shown
LATE = 3.0              # seconds of rounds that a rank may lack before the panel says so
NARROW = 60             # columns below which a rank's facts are fewer
COUNTS = 71             # columns that all counts of pages need on one line
LINES = 2               # of a map where the ranks do not all fit


class Rank(Panel):
    """One rank. lines: how high its map may be."""

    DEFAULT_CSS = "Rank { padding: 0 1; }"
    HELP = ("A rank: its machine and process, memory in use (device: on its GPU), the last round it"
            " computed, and its pages by state. A page is a fixed number of tokens' KV.")

    def __init__(self, index):
        super().__init__()
        self.index, self.lines, self._title = index, LINES, None

    def picture(self, state, history, width):
        ranks = rows(state, "ranks")
        rank = ranks[self.index] if self.index < len(ranks) else {}
        rate = None if history is None else history.rate("rounds")
        self._call(rank, max((number(r, "round") or 0 for r in ranks), default=0), rate or 0)
        return Content("\n").join(
            [*(flow(facts, width) for facts in _facts(rank, width)),
             pagemap.picture(rank, width, self.lines)])

    def _call(self, rank, lead, rate):
        """The title: who it is, and whether it lags. lead: the latest round of any rank; rate:
        rounds a second, of which some pass before a rank's word is here."""
        number_, round_ = number(rank, "rank"), number(rank, "round")
        parts = [f"rank {self.index if number_ is None else int(number_)}",
                 *(clean(text(rank, key), 24) for key in ("host", "backend") if text(rank, key))]
        if (pid := number(rank, "pid")) is not None:
            parts.append(f"process {pid:.0f}")
        if round_ is not None and lead - round_ > max(2, LATE * rate):
            parts.append(f"! {lead - round_:,.0f} rounds behind")
        title = "  ".join(parts)
        if title != self._title:
            self._title = title
            self.border_title = Content(title)


def _facts(rank, width):
    """(text, columns) of the figures above the map: of the process, and of its pages."""
    memory = table(rank, "memory")
    kinds = [kind for kind in ("device", "resident") if kind in memory]
    process = [(f"round {figure(number(rank, 'round'), 9)}", 15)]
    process += [(f"{kind} {units.size(memory[kind]):>8}", 9 + len(kind))
                for kind in (kinds if width >= NARROW else kinds[:1])] or [("memory ?", 17)]
    pages = [(f"{k} {figure(number(rank, 'pages', k), 7).strip():>6}", len(k) + 7)
             for k in ("free", "leased", "kept")]
    if total := number(rank, "replicated", "total"):
        used = total - (number(rank, "replicated", "free") or 0)
        pages.append((f"replicated {units.short(used)} of {units.short(total)}", 24))
    return process, pages


class Ranks(VerticalScroll):
    """All ranks, one below the other, and the legend."""

    DEFAULT_CSS = "Ranks { height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }"
    HELP = Rank.HELP

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._seen = {}, None

    def compose(self):
        yield pagemap.Legend()

    def update(self, state, history):
        """Draw a new tree; ranks that came or went with another engine come and go."""
        self._seen = state, history
        wanted = min(MOST, len(rows(state, "ranks")))
        panels = self.panels()
        for panel in panels[wanted:]:
            panel.remove()
        new = [Rank(i) for i in range(len(panels), wanted)]
        if new:
            self.mount(*new, before=self.query_one(pagemap.Legend))
        panels = panels[:wanted] + new
        self._share(panels)
        for panel in panels:
            panel.update(state, history)
        self.query_one(pagemap.Legend).update(state, history)

    def panels(self):
        """The panels of the ranks, in order."""
        return sorted((p for p in self.children if isinstance(p, Rank) and not p._pruning),
                      key=lambda p: p.index)

    def _share(self, panels):
        """Give each map an equal part of the height: where all ranks fit, so that they do."""
        if not panels:
            return
        replicated = any(number(r, "replicated", "total") for r in rows(self._seen[0], "ranks"))
        # lines of a panel besides its map
        other = 3 + (1 + (self.size.width < COUNTS)) * replicated
        lines = (self.size.height - 2) // len(panels) - other
        for panel in panels:
            panel.lines = lines if lines > 0 else LINES

    def on_resize(self):
        self._share(self.panels())
        for panel in self.panels():
            panel.draw()
