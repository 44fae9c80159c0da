"""A small form over the screen: one line of text, or yes and no."""

import os

from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Button, Input, Static


class Paths(Suggester):
    """Completes a path: Right takes the suggestion."""

    def __init__(self):
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value):
        folder, beginning = os.path.split(value)
        if not beginning:
            return None
        try:
            with os.scandir(os.path.expanduser(folder) or ".") as found:
                names = sorted(e.name + "/" * e.is_dir() for _, e in zip(range(5000), found)
                               if e.name.startswith(beginning))
        except OSError:
            return None
        return os.path.join(folder, names[0]) if names else None


class Ask(ModalScreen):
    """Gives the line, or None. check: takes the line; its words where the line will not do."""

    DEFAULT_CSS = """
    Ask { align: center middle; }
    Ask > Vertical { width: 72; max-width: 96%; height: auto; border: round $accent; padding: 0 1;
                     background: $surface; }
    Ask .help { color: $text-muted; height: auto; }
    Ask Horizontal { height: auto; }
    Ask Button { margin: 0 2 0 0; }
    Ask .fault { color: $text-error; height: auto; display: none; }
    """
    BINDINGS = [Binding("escape", "leave", "Cancel")]

    def __init__(self, title, help, value="", check=lambda line: "", path=False):
        super().__init__()
        self._title, self._help, self._value, self._check = title, help, value, check
        self._suggester = Paths() if path else None

    def compose(self):
        with Vertical() as box:
            box.border_title = self._title
            yield Static(self._help, markup=False, classes="help")
            yield Input(self._value, suggester=self._suggester, select_on_focus=False)
            yield Static("", markup=False, classes="fault")
            with Horizontal():
                yield Button("Do it (Enter)", id="do", variant="primary", compact=True)
                yield Button("Leave it (Esc)", id="leave", compact=True)

    def on_button_pressed(self, event):
        event.stop()
        self._do(self.query_one(Input).value) if event.button.id == "do" else self.action_leave()

    def on_input_submitted(self, event):
        event.stop()
        self._do(event.value)

    def _do(self, line):
        fault = self._check(line)
        if not fault:
            self.dismiss(line)
            return
        said = self.query_one(".fault", Static)
        said.display = True
        said.update(f"✗ {fault}")

    def action_leave(self):
        self.dismiss(None)


class Confirm(ModalScreen):
    """Gives True for yes."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 60; max-width: 96%; height: auto; border: round $warning;
                         padding: 0 1; background: $surface; }
    Confirm Horizontal { height: auto; margin: 1 0 0 0; }
    Confirm Button { margin: 0 2 0 0; }
    """
    BINDINGS = [Binding("y", "answer(True)", "Yes"), Binding("n,escape", "answer(False)", "No")]

    def __init__(self, question):
        super().__init__()
        self._question = question

    def compose(self):
        with Vertical():
            yield Static(self._question, markup=False)
            with Horizontal():
                yield Button("Yes (y)", id="yes", variant="warning", compact=True)
                yield Button("No (n, Esc)", id="no", compact=True)

    def on_mount(self):
        self.query_one("#no").focus()

    def on_button_pressed(self, event):
        event.stop()
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes):
        self.dismiss(yes)
