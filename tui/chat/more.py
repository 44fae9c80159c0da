"""A line that stands for what is not shown, and asks for it."""

from dataclasses import dataclass

from textual.binding import Binding
from textual.message import Message
from textual.widgets import Static

SIGNS = {"earlier": "▲", "later": "▼"}


class More(Static, can_focus=True):
    """which: "earlier" or "later". Not there while there is nothing to ask for."""

    DEFAULT_CSS = """
    More { height: 1; width: 1fr; color: $text-accent; display: none; text-style: underline; }
    More:focus { background: $accent 30%; text-style: bold underline; }
    """
    BINDINGS = [Binding("enter", "ask", "Show more")]

    @dataclass
    class Wanted(Message):
        """The line was clicked or entered."""

        which: str

    def __init__(self, which):
        super().__init__("", markup=False)
        self.which = which
        self.tooltip = f"Only a part of a long text is on the screen; Enter shows what is {which}"

    def say(self, what):
        """what: how much is not shown, "" for nothing."""
        self.display = bool(what)
        self.update(f"{SIGNS[self.which]} {what} {self.which}: Enter" if what else "")

    def action_ask(self):
        self.post_message(self.Wanted(self.which))

    def on_click(self):
        self.action_ask()
