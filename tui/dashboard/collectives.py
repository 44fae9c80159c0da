"""The table of collectives: how long each rank waits in exchanges, by stage, now and in all."""

import collections

from textual.content import Content

from tui import units
from tui.dashboard.panel import Panel, clean
from tui.state import number, rows, table

OVER = 5.0              # seconds that "now" is an average of
ORDER = ("plan", "history", "queries", "candidates", "partials", "sum", "logits", "other", "idle")
MOST_STAGES, MOST_RANKS = 16, 16
NAME, COLUMN, TOTAL = 12, 8, 13


class Collectives(Panel):
    """A line a stage. Ranks side by side where they fit, else the least, mean and most of them.
    """

    BORDER_TITLE = "Collectives: ms waited in each second, by stage"
    HELP = ("Milliseconds that a rank waits for the others in each second of the last 5, by the"
            " stage of the round (idle: between rounds); total: seconds of all ranks since the"
            " start. A rank that waits little holds up the others.")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._samples = collections.deque()     # (engine's clock, [{stage: seconds} a rank])

    def update(self, state, history):
        self._remember(state)
        super().update(state, history)

    def _remember(self, state):
        at = number(state, "time")
        if at is None:
            return
        now = [table(rank, "collectives") for rank in rows(state, "ranks")[:MOST_RANKS]]
        if self._samples:
            before, old = self._samples[-1]
            if at == before:
                self._samples.pop()
            elif at < before or len(old) != len(now) or any(
                    new.get(k, v) < v for was, new in zip(old, now) for k, v in was.items()):
                self._samples.clear()
        self._samples.append((at, now))
        while len(self._samples) > 2 and self._samples[1][0] <= at - OVER:
            self._samples.popleft()

    def picture(self, state, history, width):
        now = [table(rank, "collectives") for rank in rows(state, "ranks")[:MOST_RANKS]]
        stages = sorted({k for rank in now for k in rank}, key=lambda k: (
            ORDER.index(k) if k in ORDER else len(ORDER), k))[:MOST_STAGES]
        if not stages:
            return Content.styled("no exchanges yet", "$foreground-muted")
        wide = NAME + COLUMN * len(now) + TOTAL <= width
        names = [f"rank {i}" for i in range(len(now))] if wide else [
            "least", "rank", "mean", "most", "rank"]
        head = " " * NAME + "".join(n.rjust(COLUMN) for n in names) + "total".rjust(TOTAL)
        parts = [(head, "$foreground-muted")]
        for stage in stages:
            waits = self._waits(stage, now)
            cells = [_milliseconds(w) for w in waits] if wide else _extremes(waits)
            total = sum(rank.get(stage, 0.0) for rank in now)
            parts.append("\n" + f"{clean(stage, NAME - 2):<{NAME}}"
                         + "".join(cell.rjust(COLUMN) for cell in cells)
                         + units.span(total).rjust(TOTAL))
        return Content.assemble(*parts)

    def _waits(self, stage, now):
        """For each rank seconds waited a second; None: not known, "-": it has no such stage.

        Not above 1: a rank's word and the tree's clock are up to half a second apart.
        """
        (t0, old), (t1, new) = ((self._samples[0], self._samples[-1]) if self._samples
                                else ((0, []), (0, [])))
        if t1 <= t0 or len(new) != len(now):
            old, new = [{}] * len(now), [{}] * len(now)
        return ["-" if stage not in rank else
                min(1.0, (b[stage] - a.get(stage, 0.0)) / (t1 - t0)) if stage in b else None
                for rank, a, b in zip(now, old, new)]


def _milliseconds(seconds):
    if seconds is None or seconds == "-":
        return seconds or units.UNKNOWN
    return f"{seconds * 1000:.1f}"


def _extremes(waits):
    """Least and its rank, mean, most and its rank, as text; of ranks that are known."""
    known = [(wait, rank) for rank, wait in enumerate(waits) if isinstance(wait, float)]
    if not known:
        return [units.UNKNOWN] * 5
    (least, where), (most, there) = min(known), max(known)
    mean = sum(wait for wait, _ in known) / len(known)
    return [_milliseconds(least), str(where), _milliseconds(mean), _milliseconds(most), str(there)]
