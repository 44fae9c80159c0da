"""A tool call of a reply: its name, and its arguments as they come."""

import json

from textual.containers import Vertical
from textual.widgets import Static

from tui.chat.checks import complete
from tui.chat.text import cut, printable
from tui.units import count

CHARACTERS, LINES = 2000, 30    # of the arguments that are shown


class Call(Vertical):
    """One call, an object of a message's tool_calls."""

    DEFAULT_CSS = """
    Call { height: auto; margin: 1 0 0 0; padding: 0 1; border-left: thick $secondary; }
    Call > .name { text-style: bold; color: $text-secondary; }
    """

    def __init__(self, call):
        super().__init__()
        self._call, self._length = call, -1
        self._name = Static("", markup=False, classes="name")
        self._arguments = Static("", markup=False)

    def compose(self):
        yield self._name
        yield self._arguments

    def on_mount(self):
        self.show()

    def show(self):
        """Show the call as it is now."""
        name, arguments = self._call["function"]["name"], self._call["function"]["arguments"]
        length = len(name) + len(arguments)
        if length == self._length:
            return
        self._length = length
        if complete(self._call):
            arguments = json.dumps(json.loads(arguments or "{}"), indent=2, ensure_ascii=False)
        shown, left = cut(printable(arguments), CHARACTERS, LINES)
        self._name.update(f"⚙ calls {printable(name)[:200] or '…'}")
        self._arguments.update(shown + (f"\n… {count(left)} characters more" if left else ""))
