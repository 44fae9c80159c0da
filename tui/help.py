"""The help screen: every key, by where it works, and what the signs and words mean."""

from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

# What textual's own widgets do that a reader may look for here.
MORE = [
    ("Tab, Shift+Tab", "the next, the last field or table"),
    ("Arrows, PgUp, PgDn, Home, End", "move in what has the focus"),
    ("Mouse", "click what shows a key, scroll, drag to select text"),
    ("Ctrl+C", "copy what is selected (OSC 52; in tmux: set -g set-clipboard on)"),
]
WORDS = [
    ("rank", "one process of the engine and its device; the world is all of them"),
    ("page", "consecutive rows of the KV (a row is a token's), the unit in which they are given"),
    ("free, leased, kept", "pages nobody has; of conversations being computed; of conversations "
                           "that ended and may be continued without computing them again"),
    ("replicated", "pages of the first tokens that every rank has, where the engine keeps such"),
    ("owner class", "the pages whose bytes lie on one rank, with free pages of their own"),
    ("striped", "a conversation's pages lie in turn on all ranks; else it has one owner class"),
    ("prefill, decode", "computing a prompt; computing a reply, token by token"),
    ("round", "one step of all ranks together; an idle engine makes one a second"),
    ("cached", "tokens of a prompt that a kept conversation already had"),
    ("TTFT", "time to first token: from the request to the reply's beginning"),
    ("?", "the engine did not say, or said something that is no such value"),
]


def keys_of(app):
    """[(where, [(keys, what)])]: bindings of the app, of a dialogue that is open, then of each
    class below the two views."""
    found = [("Everywhere", _bindings(app, type(app)))]
    found += [("This dialogue", _bindings(app, type(screen))) for screen in app.screen_stack[1:]
              if screen.id != "help"]
    for view in ("dashboard", "chat"):
        seen = set()
        for node in app.screen_stack[0].query(f"#{view}").results():
            for widget in (node, *node.walk_children()):
                for kind in type(widget).__mro__:
                    if kind in seen or not kind.__module__.startswith("tui."):
                        continue
                    seen.add(kind)
                    lines = _bindings(app, kind)
                    if lines:
                        found.append((_title(view, kind), lines))
    return found


def _title(view, kind):
    """"dashboard", RequestsTable -> "Dashboard, requests table"."""
    name = "".join(f" {c.lower()}" if c.isupper() else c for c in kind.__name__).strip()
    return view.capitalize() + (f", {name}" if name != view else "")


def _bindings(app, kind):
    """[(keys, what)] of the bindings that a class itself has."""
    found = {}
    for binding in Binding.make_bindings(kind.__dict__.get("BINDINGS", [])):
        what = binding.tooltip or binding.description
        if what:
            found.setdefault(what, []).append(app.get_key_display(binding))
    return [(", ".join(keys), what) for what, keys in found.items()]


class Line(Horizontal):
    """Keys and what they do, beside each other."""

    DEFAULT_CSS = """
    Line { height: auto; }
    Line .keys { width: 22; padding: 0 2; text-style: bold; }
    Line .what { width: 1fr; }
    """

    def __init__(self, keys, what):
        super().__init__(Static(keys, classes="keys", markup=False),
                         Static(what, classes="what", markup=False))


class Help(ModalScreen):
    """Closed by Esc, F1, q, or a click beside it."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 90%; max-width: 100; height: 90%; background: $surface;
                            border: round $primary; padding: 0 1; }
    Help .section { margin-top: 1; color: $accent; text-style: bold; }
    """
    BINDINGS = [Binding("escape,f1,q", "dismiss", "Close")]

    def __init__(self):
        super().__init__(id="help")

    def on_click(self, event):
        if event.widget is self:
            self.dismiss()

    def compose(self):
        sections = [*keys_of(self.app), ("Everywhere, too", MORE), ("Words and signs", WORDS)]
        with VerticalScroll() as scroll:
            scroll.border_title = "Help"
            scroll.border_subtitle = "[@click=screen.dismiss]Esc closes[/]"
            for title, lines in sections:
                yield Static(title, classes="section", markup=False)
                for keys, what in lines:
                    yield Line(keys, what)
