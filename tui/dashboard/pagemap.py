"""The page map: a rank's pages as cells, a shape each state, from 32 pages to millions.

The engine sends up to 256 cells for the split pages; the replicated region is known by its counts
only and follows as cells of the same scale. Where there is less room than cells, a cell here is
what most of its cells are, and of equals the busier.
"""

from textual.content import Content, Span

from tui import units
from tui.dashboard.panel import Panel, flow
from tui.state import number, rows, text

# in the tree -> (shape here, colour, what it is)
SPLIT = {
    ".": ("·", "$foreground-muted", "free"),
    "#": ("■", "$text-primary", "leased"),
    "k": ("□", "$text-warning", "kept"),
}
REPLICATED = {
    "R": ("◆", "$text-success", "replicated, in use"),
    "r": ("◇", "$foreground-muted", "replicated, free"),
}
KINDS = SPLIT | REPLICATED
STRANGE = ("?", "$text-error", "unknown")
BUSIEST = "#kR.r"       # of two states as frequent in a cell the earlier is shown
MOST_REPLICATED = 64    # cells


def cells_of(rank):
    """(cells of split pages, cells of replicated pages, pages a cell or None) of a rank's part."""
    split = text(rank, "map") or ""
    total = number(rank, "pages", "total")
    scale = max(1.0, total / len(split)) if split and total else None
    region = {k: number(rank, "replicated", k) or 0 for k in ("leased", "kept", "total")}
    if region["total"] < 1:
        return split, "", scale
    cells = min(MOST_REPLICATED, max(1, round(region["total"] / (scale or 1))))
    used = min(1.0, max(0.0, (region["leased"] + region["kept"]) / region["total"]))
    busy = min(cells, -int(-used * cells // 1))
    return split, "R" * busy + "r" * (cells - busy), scale


def resample(cells, room):
    """At most `room` cells of a string of them."""
    if len(cells) <= room:
        return cells
    found, kinds = [], sorted(set(cells), key=lambda k: (BUSIEST + k).index(k))
    for i in range(room):
        part = cells[i * len(cells) // room:(i + 1) * len(cells) // room]
        found.append(max(kinds, key=part.count))
    return "".join(found)


def picture(rank, width, lines):
    """The map in `width` columns and at most `lines` lines, the replicated region below.

    A line has 128 cells, or 64, or where there is less room what fits: the same in every width of
    terminal that shows the whole map. Content.
    """
    split, region, _ = cells_of(rank)
    if not split and not region:
        return Content.styled("no map", "$foreground-muted")
    row = next((n for n in (128, 64) if n <= width), max(1, width))
    split = resample(split, row * max(1, lines))
    region = resample(region, row)
    found = [_line(split[i:i + row]) for i in range(0, len(split), row)]
    return Content("\n").join([*found, _line(region)] if region else found)


def _line(cells):
    """A line of cells as shapes, equal neighbours in one span."""
    plain, spans, begin = [], [], 0
    for i in range(1, len(cells) + 1):
        if i == len(cells) or cells[i] != cells[begin]:
            shape, colour, _ = KINDS.get(cells[begin], STRANGE)
            plain.append(shape * (i - begin))
            spans.append(Span(begin, i, colour))
            begin = i
    return Content("".join(plain), spans)


class Legend(Panel):
    """What the shapes of the map mean, of the replicated ones only where there is such a region;
    and how many pages a cell is."""

    DEFAULT_CSS = "Legend { border-top: none; }"
    HELP = "Shapes of the page map. A cell is what most of its pages are."

    def picture(self, state, history, width):
        replicated = any((number(r, "replicated", "total") or 0) > 0 for r in rows(state, "ranks"))
        kinds = KINDS if replicated else SPLIT
        facts = [(Content.assemble((shape, colour), " ", what), len(what) + 2)
                 for shape, colour, what in kinds.values()]
        scales = {cells_of(r)[2] for r in rows(state, "ranks")} - {None}
        if scales:
            ends = sorted({min(scales), max(scales)})
            pages = " to ".join(units.short(round(n, 2)) for n in ends)
            line = f"a cell is {pages} page{'s' * (pages != '1')}"
            facts.append((line, len(line)))
        return flow(facts, width)
