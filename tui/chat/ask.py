"""A small form over the screen: one line of text, or yes and no."""

import os

from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, Static


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
            yield Static("Enter: do it   Esc: leave it", classes="help")

    def on_input_submitted(self, event):
        event.stop()
        fault = self._check(event.value)
        if not fault:
            self.dismiss(event.value)
            return
        line = self.query_one(".fault", Static)
        line.display = True
        line.update(f"✗ {fault}")

    def action_leave(self):
        self.dismiss(None)


class Confirm(ModalScreen):
    """Gives True for y."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Static { width: 60; max-width: 96%; height: auto; border: round $warning;
                       padding: 0 1; background: $surface; }
    """
    BINDINGS = [Binding("y", "answer(True)", "Yes"), Binding("n,escape", "answer(False)", "No")]

    def __init__(self, question):
        super().__init__()
        self._question = question

    def compose(self):
        yield Static(f"{self._question}\n\ny: yes   n, Esc: no", markup=False)

    def action_answer(self, yes):
        self.dismiss(yes)
