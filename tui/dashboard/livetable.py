"""A table whose rows come and go by key and whose cells change in place."""

from rich.text import Text
from textual.widgets import DataTable

from tui import units
from tui.dashboard.panel import shown


def clock(seconds):
    """Time in at most nine columns: "12 s", "40:05 min", "12:05 h", "3 d 4 h"."""
    if seconds is None or seconds < 100:
        return units.UNKNOWN if seconds is None else f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 60:
        return f"{int(minutes)}:{int(seconds) % 60:02d} min"
    if hours < 24:
        return f"{int(hours)}:{int(minutes) % 60:02d} h"
    return f"{int(hours / 24):,} d {int(hours) % 24} h"


class LiveTable(DataTable):
    """A DataTable of fixed columns. COLUMNS: (key, title, width, left or right), the first of
    which is the row's key; a subclass has `lines(state)`: yields {column key: text} in order.

    A new row goes to the end and the cursor stays with its row, so nothing moves under the reader
    but by rows that are gone.
    """

    DEFAULT_CSS = """
    LiveTable { height: 1fr; padding: 0 1; border-top: solid $panel; border-title-color: $text;
                background: transparent; scrollbar-size-vertical: 1;
                scrollbar-size-horizontal: 1; }
    LiveTable:focus { border-top: heavy $primary; }
    LiveTable > .datatable--header { background: transparent; color: $text-muted;
                                     text-style: none; }
    LiveTable:blur > .datatable--cursor { background: $boost; color: $text; text-style: none; }
    """
    COLUMNS, HELP = (), ""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, cursor_type="row", cell_padding=0, **kwargs)
        self._seen, self._shown = None, {}       # {row key: {column key: text}}
        for key, title, width, side in self.COLUMNS:
            self.add_column(Text(title, justify=side), key=key, width=width)
        self.tooltip = self.HELP

    def lines(self, state):
        raise NotImplementedError

    def update(self, state, history):
        """Change the cells that differ; add and remove rows."""
        self._seen = state, history
        if self.is_attached and shown(self):
            self._fill(state)

    def _fill(self, state):
        wanted = {}
        for line in self.lines(state):
            wanted.setdefault(line[self.COLUMNS[0][0]], line)
        gone = [key for key in self._shown if key not in wanted]
        cursor = self.selected
        if gone and len(gone) == len(self._shown):
            self.clear()
        else:
            for key in gone:
                self.remove_row(key)
        for key in gone:
            del self._shown[key]
        for key, line in wanted.items():
            old = self._shown.get(key)
            if old is None:
                self.add_row(*(self._cell(line, *column) for column in self.COLUMNS), key=key)
            elif old != line:
                for column in self.COLUMNS:
                    if old[column[0]] != line[column[0]]:
                        self.update_cell(key, column[0], self._cell(line, *column))
            self._shown[key] = line
        if gone and cursor in self._shown:
            self.move_cursor(row=self.get_row_index(cursor), animate=False, scroll=False)

    @staticmethod
    def _cell(line, key, title, width, side):
        return Text(line[key], justify=side, no_wrap=True, overflow="ellipsis", end="")

    @property
    def selected(self):
        """Key of the row with the cursor, None where there is none."""
        if not self.is_valid_row_index(self.cursor_row):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def on_show(self):
        if self._seen:
            self._fill(self._seen[0])
