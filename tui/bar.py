"""The top line: which engine, whether it is live, and the two views to click on."""

import time

from textual.containers import Horizontal
from textual.reactive import reactive
from textual.widgets import Static

from tui.once import plain
from tui.state import number, text
from tui.units import count, span

LIVE = {None: "… connecting", True: "● live", False: "✗ lost"}
REPLAY = {None: "▶ replay", True: "▶ replay", False: "■ replay ended"}


class Bar(Horizontal):
    """where: the address, or what a recording is called. shown: the view that is shown. The app
    calls engine(tree) and link(up)."""

    DEFAULT_CSS = """
    Bar { height: 1; background: $panel; }
    Bar .view { width: auto; padding: 0 1; color: $text-muted; }
    Bar .view.shown { background: $primary; color: $text; text-style: bold; }
    Bar .view:hover { text-style: underline; }
    Bar #engine { width: 1fr; padding: 0 1; text-align: right; text-wrap: nowrap;
                  text-overflow: ellipsis; }
    """

    shown = reactive("dashboard")

    def __init__(self, where, replay=False, **more):
        super().__init__(**more)
        self._where, self._tree, self._up = where, {}, None
        self._states = REPLAY if replay else LIVE

    def compose(self):
        for view, key in (("dashboard", "F2"), ("chat", "F3")):
            label = Static(f"[@click=app.view('{view}')]{key} {view.capitalize()}[/]",
                           classes="view", id=f"to-{view}")
            label.tooltip = f"Show the {view} ({key})"
            yield label
        engine = Static(self._where, id="engine", markup=False)
        engine.tooltip = ("Model, ranks, address, time since the engine started. ● live: it "
                          "answers; ✗ lost: it does not, and all figures are old; ▶ a recording")
        yield engine

    def watch_shown(self):
        for view in ("dashboard", "chat"):
            for label in self.query(f"#to-{view}"):
                label.set_class(view == self.shown, "shown")

    def on_mount(self):
        self.watch_shown()

    def engine(self, tree):
        """A new tree."""
        self._tree = tree
        self._show()

    def link(self, up):
        """Whether it answers."""
        self._up = up
        self._show()

    def _show(self):
        tree, world = self._tree, number(self._tree, "world")
        parts = []
        if tree:
            now, started = number(tree, "time") or time.time(), number(tree, "started")
            parts = [plain(text(tree, "model")), f"{count(world)} rank{'s' * (world != 1)}",
                     f"up {span(None if started is None else now - started)}"]
        for engine in self.query("#engine").results(Static):
            engine.update("  ".join([self._states[self._up], *parts, self._where]))
