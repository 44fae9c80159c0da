"""A panel: a titled box of text, drawn from the newest tree, and drawn again only where it differs.

A panel says what its figures mean in `HELP`: a tooltip for the mouse, the dashboard's last line for
the keyboard. What weighs less is "$foreground-muted": "$text-muted", as in stylesheets, is as
strong as any other text inside a Content.
"""

from textual.content import Content
from textual.widget import Widget

from tui import units

WIDTH = 76              # columns assumed before the first layout
GAP = "   "             # between facts that share a line


def clean(text, most=200):
    """A server's text made harmless for a cell: printable, on one line, cut at `most`."""
    shown = text[:most] + ("…" if len(text) > most else "")
    return shown if shown.isprintable() else "".join(
        c if c.isprintable() else " " for c in shown)


def shown(widget):
    """Whether neither the widget nor a container of it is hidden."""
    return all(node.display for node in widget.ancestors_with_self if isinstance(node, Widget))


def figure(value, width):
    """A count in `width` columns, right-justified: whole where it fits, else three digits."""
    whole = units.count(value)
    return (whole if len(whole) < width else units.short(value)).rjust(width)


def flow(facts, width):
    """(text, columns) facts put on as few lines as hold them; where a fact lies does not depend
    on its text. Returns Content."""
    lines, used = [[]], 0
    for text, columns in facts:
        if lines[-1] and used + len(GAP) + columns > width:
            lines.append([])
            used = 0
        used += columns + (len(GAP) if lines[-1] else 0)
        lines[-1].append(text if isinstance(text, Content) else Content(text))
        lines[-1][-1] = lines[-1][-1].pad_right(max(0, columns - lines[-1][-1].cell_length))
    return Content("\n").join(Content(GAP).join(line) for line in lines)


class Panel(Widget):
    """Text of its own making: a subclass has `picture(state, history, width) -> Content`."""

    DEFAULT_CSS = """
    Panel { height: auto; padding: 0 1; border-top: solid $panel; border-title-color: $text; }
    """
    HELP = ""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._seen = {}, None
        self._content = Content("")
        if self.HELP:
            self.tooltip = self.HELP

    def update(self, state, history):
        """Draw a new tree where it differs."""
        self._seen = state, history
        self.draw()

    def draw(self):
        """Make the picture again, of the newest tree in the present width."""
        if not self.is_attached or not shown(self):
            return
        width, height = self.content_size
        content = self.picture(*self._seen, width or WIDTH)
        if not content.is_same(self._content):
            self._content = content
            self.refresh(layout=content.get_height(self.styles, width or WIDTH) != height)

    def get_content_height(self, container, viewport, width):
        """As high as the picture of this width, whatever width the last one was drawn for."""
        return self.picture(*self._seen, width).get_height(self.styles, width) if width else 0

    def picture(self, state, history, width):
        raise NotImplementedError

    def render(self):
        return self._content

    def on_mount(self):
        self.draw()

    def on_resize(self):
        self.draw()

    def on_show(self):
        self.draw()
