"""What was asked: a question with its files, or the result of a tool call."""

from textual.containers import Vertical
from textual.widgets import Static

from tui.chat.text import cut, printable
from tui.units import count

CHARACTERS, LINES = 2000, 30    # of a question that are shown


class Question(Vertical):
    """One message of the user's side. It is sent whole, however much of it is shown."""

    DEFAULT_CSS = """
    Question { height: auto; margin: 1 0 0 0; padding: 0 1; border-left: thick $primary; }
    Question > .name { color: $text-primary; text-style: bold; }
    Question > .rest { color: $text-muted; }
    """

    def __init__(self, message, name="You"):
        super().__init__()
        self.message, self._name = message, name

    def compose(self):
        yield Static(self._name, markup=False, classes="name")
        shown, left = cut(printable(self.message.typed), CHARACTERS, LINES)
        if shown:
            yield Static(shown, markup=False)
        if left > 0:
            yield Static(f"… {count(left)} characters more, all of them sent", markup=False,
                         classes="rest")
        for name, text in self.message.files:
            yield Static(f"+ {printable(name)}: {count(len(text))} characters", markup=False,
                         classes="rest")
