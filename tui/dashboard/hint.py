"""The last line: what the figures of the panel mean that has the keyboard."""

from textual.content import Content
from textual.widget import Widget


class Hint(Widget):
    """One line; what does not fit is cut, and `h` says it whole."""

    DEFAULT_CSS = "Hint { height: 1; padding: 0 1; color: $text-muted; text-wrap: nowrap; " \
                  "text-overflow: ellipsis; }"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.line = ""

    def show(self, line):
        """Show another line."""
        if line != self.line:
            self.line = line
            self.tooltip = line or None
            self.refresh()

    def render(self):
        return Content(self.line)
