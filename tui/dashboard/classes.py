"""The table of owner classes: pages by state, conversations, and what still fits."""

from textual.content import Content

from tui import units
from tui.dashboard.panel import Panel, figure
from tui.dashboard.window import class_windows, largest_window
from tui.state import number, rows, text

MOST = 16               # classes that are shown
STATES = ("free", "leased", "kept", "total")
COLUMN = 9              # columns of a count


class Classes(Panel):
    """One line a class, one for the replicated region where there is one, one for all."""

    BORDER_TITLE = "4 Owner classes"
    HELP = ("Pages by state of each owner class (those whose bytes lie on one rank); conv.:"
            " conversations leased from it alone; fits: the largest new conversation that it has"
            " room for once what is kept makes way.")

    def picture(self, state, history, width):
        found = rows(state, "classes")
        head = f"{'class':<6}{'rank':<6}" + "".join(k.rjust(COLUMN) for k in STATES)
        parts = [(head + f"{'conv.':>7}{'fits tokens':>13}", "$foreground-muted")]
        windows = class_windows(state)
        for row in found[:MOST]:
            c = number(row, "class")
            rank = c if len(found) > 1 else None
            where = "every" if rank is None else f"{rank:.0f}"
            parts.append("\n" + _line(units.count(c), where, row, number(row, "conversations"),
                                      windows.get(c)))
        if (number(state, "pool", "replicated", "total") or 0) > 0:
            parts.append("\n" + _line("repl.", "every", state["pool"]["replicated"], "", ""))
        all_ = {k: sum(number(r, k) or 0 for r in found) for k in STATES}
        owned = sum(number(r, "conversations") or 0 for r in found)
        if text(state, "placement") == "striped":
            owned = sum(1 for r in rows(state, "requests") if number(r, "seat") is not None)
        parts += ["\n", (_line("all", "", all_, owned, largest_window(state)), "bold")]
        return Content.assemble(*parts)


def _line(name, rank, pages, owned, fits):
    counts = "".join(figure(number(pages, k), COLUMN) for k in STATES)
    return (f"{name:<6}{rank:<6}{counts}{_blank(owned, 7)}{_blank(fits, 13)}")


def _blank(value, width):
    return " " * width if value == "" else figure(value, width)
