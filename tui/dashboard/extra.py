"""Panels for what an engine may report besides: drafting, images, carries; else not there."""

from textual.content import Content

from tui import units
from tui.dashboard.panel import Panel, clean, flow
from tui.state import number, text

TITLES = {"draft": "Drafting", "drafting": "Drafting", "images": "Images", "carries": "Carries"}
MOST = 24               # figures that are shown of each


class Extra(Panel):
    """One member of the tree as name and value."""

    DEFAULT_CSS = "Extra { display: none; }"
    HELP = "What the engine reports of this besides; counts are since it started."

    def __init__(self, name):
        super().__init__(id=f"extra-{name}")
        self._member = name
        self.border_title = Content(TITLES[name])

    def update(self, state, history):
        self.display = bool(_figures(state.get(self._member), ""))
        super().update(state, history)

    def picture(self, state, history, width):
        found = [f"{name} {value}" for name, value in _figures(state.get(self._member), "")]
        return flow([(line, len(line) if len(line) > 26 else 26) for line in found], width)


def _figures(value, name, depth=0):
    """(name, text) of the numbers and strings inside a value, at most MOST."""
    if isinstance(value, dict) and depth < 4:
        return [line for k in list(value)[:MOST]
                for line in _figures(value[k], f"{name} {clean(str(k), 24)}".strip(), depth + 1)
                ][:MOST]
    if isinstance(value, list):
        return [(f"{name} items".strip(), units.count(len(value)))]
    tree = {"": value}
    if (n := number(tree, "")) is not None:
        return [(name or "count", units.count(n) if n == int(n) else units.short(n))]
    return [(name, clean(value, 40))] if text(tree, "") else []
