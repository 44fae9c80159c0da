"""A plot of one rate over the last minutes: bars in eighths of a row, both axes labelled.

A column is a stretch of time that begins at a whole multiple of its length, so that a bar never
changes once its stretch is over: the picture moves one column at a time. The last is of as long a
stretch that ends now. "_" is zero, a blank is not known. All columns together are the least of
WINDOWS that holds the history, so that a young one is no sliver at the right edge.
"""

import math

from textual.content import Content
from textual.widget import Widget

from tui import units
from tui.state import HISTORY

BARS = "_▁▂▃▄▅▆▇█"
GUTTER = 6              # columns of the labels on the left, with the axis
WINDOWS = 30.0, 60.0, 120.0, HISTORY    # seconds


def ceiling(value):
    """The least of 1, 2, 5 times a power of ten that is not below value; at least 1."""
    if value <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.9999)


def stretches(samples, name, points, over):
    """Rates a second of `points` stretches of the last `over` seconds, the last until now.

    samples: sequence of (seconds, {name: count}), in time. None where no sample is old enough.
    """
    if len(samples) < 2 or points < 1:
        return [None] * max(points, 0)
    samples = list(samples)
    end, width = samples[-1][0], over / points
    first = math.floor(end / width) - points + 1
    edges = [(first + i) * width for i in range(points)]
    counts, i = [], 0
    for edge in (*edges[:-1], end - width, edges[-1], end):     # in time
        while i + 1 < len(samples) and samples[i + 1][0] <= edge:
            i += 1
        counts.append(_between(samples, i, edge, name))
    *over_, recently, before, now = counts
    pairs = [*zip(over_, [*over_[1:], before]), (recently, now)]
    return [None if a is None or b is None else max(0.0, (b - a) / width) for a, b in pairs]


def _between(samples, i, at, name):
    """The counter at a time, straight between samples i and i + 1."""
    t0, before = samples[i]
    a = before.get(name)
    if at < t0 or a is None:
        return None
    if i + 1 == len(samples) or t0 == at:
        return a
    t1, after = samples[i + 1]
    b = after.get(name)
    return None if b is None else a + (b - a) * (at - t0) / (t1 - t0)


def draw(values, height):
    """(rows of bars from the top, value at the top) of a plot `height` rows high."""
    top = ceiling(max((v for v in values if v is not None), default=0))
    eighths = [None if v is None else round(v / top * height * 8) for v in values]
    lines = []
    for row in range(height - 1, -1, -1):
        lines.append("".join(
            " " if n is None or (row and n <= row * 8)
            else BARS[max(0, min(8, n - row * 8))] for n in eighths))
    return lines, top


class Plot(Widget):
    """One rate. name: its counter in the history; unit: of the rate."""

    DEFAULT_CSS = """
    Plot { height: 1fr; width: 1fr; min-height: 4; padding: 0 1 0 0; }
    """

    def __init__(self, name, title, unit, colour):
        super().__init__(id=f"plot-{name}")
        self._counter, self._title, self._unit, self._colour = name, title, unit, colour
        self._history, self._content = None, Content("")

    def update(self, state, history):
        self._history = history
        self.draw()

    def draw(self):
        """Make the picture again in the present size."""
        content = self._picture(self.content_size.width, self.content_size.height)
        if not content.is_same(self._content):
            self._content = content
            self.refresh()

    def _picture(self, width, height):
        if self._history is None or width <= GUTTER + 8 or height < 3:
            return self._content
        points, height = width - GUTTER, height - 2
        window = next((w for w in WINDOWS if self._history.span <= w), HISTORY)
        values = stretches(self._history.samples, self._counter, points, window)
        bars, top = draw(values, height)
        now = units.rate(self._history.rate(self._counter), self._unit)
        parts = [(f"{self._title} ", "bold"), (f"{now:<14}"[:width - len(self._title) - 1], ""),
                 "\n"]
        for i, line in enumerate(bars):
            label = ""
            if i == 0:
                label = units.short(top)
            elif i == height - 1:
                label = "0"
            elif height >= 5 and height % 2 and i == height // 2:
                label = units.short(top / 2)
            parts += [(f"{label:>{GUTTER - 1}}{'┤' if label else '│'}", "$foreground-muted"),
                      (line, self._colour), "\n"]
        parts.append((" " * GUTTER + _time_axis(points, window), "$foreground-muted"))
        return Content.assemble(*parts)

    def render(self):
        return self._content

    def on_resize(self):
        self.draw()

    def on_show(self):
        self.draw()


def _time_axis(points, window):
    """Labels below the columns: how long ago the first is, the middle one, and now."""
    left, right = _ago(window), "now"
    middle = _ago(window / 2) if points >= 30 else ""
    before = max(0, (points - len(middle)) // 2 - len(left))
    return left + " " * before + middle + right.rjust(points - len(left) - before - len(middle))


def _ago(seconds):
    return f"-{seconds:g} s" if seconds < 60 else f"-{seconds / 60:g} min"
