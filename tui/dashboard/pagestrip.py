"""One line that names the dashboard's pages, for a terminal that cannot show all at once."""

from textual.content import Content
from textual.message import Message
from textual.widget import Widget


class PageStrip(Widget):
    """The pages' names; the one that is shown stands in brackets. names: {page: title}."""

    DEFAULT_CSS = "PageStrip { height: 1; padding: 0 1; }"
    HELP = "Keys 1 to 5 show a page, [ and ] the one before and after, z all at once or one alone."

    class Chosen(Message):
        """A page was clicked."""

        def __init__(self, page):
            super().__init__()
            self.page = page

    def __init__(self, names, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._names, self._page = names, next(iter(names))
        self.tooltip = Content(self.HELP)

    def show(self, page):
        """Mark a page as shown."""
        self._page = page
        self.refresh()

    def _labels(self):
        for i, (page, name) in enumerate(self._names.items(), 1):
            yield page, f"[{i} {name}]" if page == self._page else f" {i} {name} "

    def render(self):
        return Content.assemble(*(
            (label, "bold $text-primary" if page == self._page else "$foreground-muted")
            for page, label in self._labels()))

    def on_click(self, event):
        at = event.get_content_offset(self)
        x = -1 if at is None else at.x
        for page, label in self._labels():
            if 0 <= x < len(label):
                self.post_message(self.Chosen(page))
                return
            x -= len(label)
