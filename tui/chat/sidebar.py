"""All conversations, newest first, with keys for what can be done to one."""

import time
from dataclasses import dataclass

from rich.text import Text
from textual.binding import Binding
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.chat.text import count, one_line
from tui.units import span


class Sidebar(OptionList):
    """Entries of the store; the open one and those that are being answered are marked."""

    DEFAULT_CSS = """
    Sidebar { width: 32; height: 1fr; border: round $primary; padding: 0; display: none; }
    Sidebar:focus { border: round $accent; }
    Sidebar.-there { display: block; }
    """
    BINDINGS = [Binding("d,delete", "ask('delete')", "Delete"),
                Binding("r", "ask('rename')", "Rename"),
                Binding("l", "ask('load')", "Load a file")]

    @dataclass
    class Asked(Message):
        """what: "open", "delete", "rename", "load". id: which conversation, None where none is."""

        what: str
        id: str | None

    def __init__(self, **options):
        super().__init__(markup=False, **options)
        self.border_title = "Conversations"
        self.border_subtitle = ", ".join(f"[@click=ask('{what}')]{what[0]} {what}[/]"
                                         for what in ("delete", "rename", "load"))
        self.tooltip = "● open, … being answered; the time since its last message"
        self._ids = []

    def show(self, entries, open_id, busy):
        """entries: store.Entry, newest first. busy: ids that are being answered."""
        at = self._ids[self.highlighted] if self.has_focus and self.highlighted is not None \
            else open_id
        self._ids = [e.id for e in entries]
        self.clear_options()
        self.add_options([Option(self._line(e, open_id, busy)) for e in entries])
        at = at if at in self._ids else open_id
        self.highlighted = self._ids.index(at) if at in self._ids else None

    def _line(self, entry, open_id, busy):
        mark = "…" if entry.id in busy else "●" if entry.id == open_id else " "
        age = span(max(0, time.time() - entry.changed))
        return Text(f"{mark} {one_line(entry.title, 24)}\n"
                    f"  {count(entry.turns, 'message')}, {age} ago")

    def on_option_list_option_selected(self, event):
        event.stop()
        self.post_message(self.Asked("open", self._ids[event.option_index]))

    def action_ask(self, what):
        self.post_message(self.Asked(
            what, None if self.highlighted is None else self._ids[self.highlighted]))
