"""The dashboard: five groups of panels, all at once where there is room, one at a time where not.

Small (under 112 columns or 32 lines): a page each, chosen by 1 to 5. Medium: two columns. Large
(180 columns and 45 lines): three. The panels are the same widgets throughout; only classes change.
"""

from textual import on
from textual.binding import Binding
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.widget import Widget

from tui.dashboard.classes import Classes
from tui.dashboard.collectives import Collectives
from tui.dashboard.engine import Engine
from tui.dashboard.extra import TITLES, Extra
from tui.dashboard.hint import Hint
from tui.dashboard.kept import Kept
from tui.dashboard.log import EventLog
from tui.dashboard.rank import Ranks
from tui.dashboard.rates import Rates
from tui.dashboard.requests import Requests
from tui.dashboard.pagestrip import PageStrip

PAGES = {"now": "Engine", "work": "Requests", "ranks": "Ranks", "pool": "Pool", "log": "Log"}
MEDIUM, LARGE = (112, 32), (180, 45)        # columns, lines from which


class Group(Container):
    """Panels that are shown or hidden together; those inside have the keyboard and scroll."""


class Scroll(VerticalScroll):
    """A group of text panels, which has the keyboard and scrolls as a whole."""

    def __init__(self, help_, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.HELP = help_


class Dashboard(Widget):
    """What the engine holds and does. update(): a new tree."""

    DEFAULT_CSS = """
    Dashboard { height: 1fr; width: 1fr; layout: vertical; }
    Dashboard #groups { height: 1fr; }
    Dashboard .group { height: 1fr; scrollbar-size-vertical: 1; }
    Dashboard .titled { border-top: solid $panel; border-title-color: $text; }
    Dashboard .titled:focus, Scroll:focus > .first { border-top: heavy $primary; }
    Dashboard Scroll { scrollbar-gutter: stable; }
    Dashboard.small .group { display: none; }
    Dashboard.small .group.chosen { display: block; }
    Dashboard.medium #strip, Dashboard.large #strip { display: none; }
    Dashboard.medium #groups { layout: grid; grid-size: 2 3; grid-columns: 75 1fr;
                               grid-rows: 12 1fr 1fr; grid-gutter: 0 1; }
    Dashboard.large #groups { layout: grid; grid-size: 3 3; grid-columns: 78 1fr 1fr;
                              grid-rows: 14 3fr 2fr; grid-gutter: 0 1; }
    Dashboard.medium #now, Dashboard.large #now { layout: horizontal; }
    Dashboard.medium #now { column-span: 2; }
    Dashboard.large #now { column-span: 3; }
    Dashboard.medium Engine { width: 63; }
    Dashboard.large Engine { width: 80; }
    Dashboard.medium Rates, Dashboard.large Rates { height: 100%; margin-left: 1; }
    Dashboard.large #ranks, Dashboard.large #pool { row-span: 2; }
    """
    BINDINGS = [
        *(Binding(str(i), f"page('{page}')", f"Page: {name}", show=False)
          for i, (page, name) in enumerate(PAGES.items(), 1)),
        Binding("left_square_bracket", "turn(-1)", "Page before", show=False),
        Binding("right_square_bracket", "turn(1)", "Page after", show=False),
        Binding("z", "zoom", "One or all", tooltip="One page alone, or all that fit"),
        Binding("h", "explain", "What is this", tooltip="What the figures mean"),
    ]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._seen, self._page, self._zoomed = None, "now", False
        self._panels = []           # everything that takes a tree

    def compose(self):
        yield PageStrip(PAGES, id="strip")
        with Container(id="groups"):
            with Scroll(Engine.HELP, id="now", classes="group"):
                yield Engine(classes="first")
                yield Rates()
            with Group(id="work", classes="group"):
                yield Requests()
                yield Kept()
            with Group(id="ranks", classes="group"):
                yield Ranks(classes="titled")
            with Scroll(Classes.HELP, id="pool", classes="group"):
                yield Classes(classes="first")
                yield Collectives()
                for name in TITLES:
                    yield Extra(name)
            with Group(id="log", classes="group"):
                yield EventLog()
        yield Hint()

    def update(self, state, history):
        """Draw a new tree (docs/telemetry.md) and the rates of a tui.state.History."""
        self._seen = state, history
        for panel in self._panels:
            panel.update(state, history)

    def on_mount(self):
        kinds = (Engine, Rates, Requests, Kept, Ranks, Classes, Collectives, Extra, EventLog)
        self._panels = [w for w in self.query("*") if isinstance(w, kinds)]
        self.query_one(Ranks).border_title = Content("3 Ranks")
        self._lay_out()

    def on_resize(self):
        self._lay_out()

    # ---- pages -----------------------------------------------------------------------------------

    def _lay_out(self):
        """Choose the layout that the size allows."""
        columns, lines = self.size
        name = "small"
        for wider, least in (("medium", MEDIUM), ("large", LARGE)):
            if columns >= least[0] and lines >= least[1] and not self._zoomed:
                name = wider
        for each in ("small", "medium", "large"):
            self.set_class(each == name, each)
        for group in self.query(".group"):
            group.set_class(group.id == self._page, "chosen")
            group.disabled = name == "small" and group.id != self._page
        self.query_one(PageStrip).show(self._page)
        if self._seen:
            self.update(*self._seen)

    def action_page(self, page):
        """Show a page, and give it the keyboard."""
        self._page = page
        self._lay_out()
        group = self.query_one(f"#{page}")
        next(w for w in (group, *group.query("*")) if w.focusable).focus()

    def action_turn(self, by):
        """Show the page before or after."""
        pages = list(PAGES)
        self.action_page(pages[(pages.index(self._page) + by) % len(pages)])

    def action_zoom(self):
        """One page alone, or all again."""
        self._zoomed = not self._zoomed
        self._lay_out()

    @on(PageStrip.Chosen)
    def _chosen(self, event):
        event.stop()
        self.action_page(event.page)

    # ---- help ------------------------------------------------------------------------------------

    def on_descendant_focus(self, event):
        self.query_one(Hint).show(getattr(event.widget, "HELP", ""))

    def action_explain(self):
        """Say what the panel with the keyboard shows."""
        if line := self.query_one(Hint).line:
            self.notify(line, title="What is this", markup=False)
