"""The question before a console ends that has started its engine, where others still use it."""

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from tui.state import number, rows

STOP, LEAVE = "stop", "leave"


def others(state):
    """Who uses the engine of a tree besides this console, in words; "" for nobody."""
    watchers = (number(state, "watchers") or 1) - 1
    running = len(rows(state, "requests"))
    return " and ".join(
        [f"{watchers:.0f} other watcher{'s' * (watchers > 1)}"] * (watchers > 0)
        + [f"{running} request{'s' * (running > 1)}"] * (running > 0))


class Leave(ModalScreen):
    """Dismissed with STOP, LEAVE, or None to stay. users: who uses the engine, in words."""

    DEFAULT_CSS = """
    Leave { align: center middle; }
    Leave Vertical { width: 60; max-width: 95%; height: auto; padding: 1 2;
                     background: $surface; border: round $primary; }
    Leave Horizontal { height: auto; margin-top: 1; }
    Leave Button { margin-right: 1; min-width: 0; }
    """
    BINDINGS = [Binding("s", f"choose('{STOP}')", "Stop the engine"),
                Binding("l", f"choose('{LEAVE}')", "Leave it running"),
                Binding("escape", "choose('')", "Stay")]

    def __init__(self, users):
        super().__init__()
        self._users = users

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(f"This console started the engine, and {self._users} would lose it.",
                         markup=False)
            with Horizontal():
                yield Button("Stop it (s)", variant="error", id=STOP)
                yield Button("Leave it running (l)", id=LEAVE)
                yield Button("Stay (esc)", variant="primary", id="stay")

    def on_mount(self):
        self.query_one("#stay").focus()

    def on_button_pressed(self, event):
        self.action_choose("" if event.button.id == "stay" else event.button.id)

    def action_choose(self, choice):
        """End the question."""
        self.dismiss(choice or None)
