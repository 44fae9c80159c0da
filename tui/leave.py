"""The question before a console ends that has started its engine, where others still use it."""

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

STOP, LEAVE = "stop", "leave"


class Leave(ModalScreen):
    """Dismissed with STOP, LEAVE, or None to stay. why: who uses the engine, in words."""

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

    def __init__(self, why):
        super().__init__()
        self._why = why

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(f"This console started the engine, and {self._why}.", markup=False)
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
