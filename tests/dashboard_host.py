"""A dashboard alone in an app, and trees with a past for it: what its tests share."""

from textual.app import App

from tui.dashboard import Dashboard
from tui.messages import CancelRequest
from tui.state import History

SIZES = [(80, 24), (120, 40), (240, 60)]
SIZE_NAMES = [f"{w}x{h}" for w, h in SIZES]
PAGES = {"1": "Engine", "2": "Requests", "3": "Ranks", "4": "Pool", "5": "Log"}


class Host(App):
    """Nothing but a dashboard. cancelled: ids of the requests it wanted to end."""

    def __init__(self):
        super().__init__()
        self.cancelled, self.copied = [], None

    def compose(self):
        yield Dashboard()

    def on_cancel_request(self, message: CancelRequest):
        self.cancelled.append(message.id)

    def copy_to_clipboard(self, text):
        self.copied = text


def past(state, seconds=300, rate=8.0):
    """A history of steady rates that ends at the tree's time."""
    found = History()
    for i in range(int(seconds * 4) + 1):
        at = i / 4
        found.add({"time": state.get("time", 0) - seconds + at, "rounds": round(2 * at),
                   "tokens": {"decode": rate * at, "prefill": 100 * at}}, 0.0)
    return found


async def show(pilot, state, history=None):
    """Hand a tree to the dashboard and let it be drawn."""
    history = past(state) if history is None else history
    pilot.app.query_one(Dashboard).update(state, history)
    await pilot.pause()
    await pilot.pause()
    return history


def rows_of(table):
    """The rows of a table as lists of text."""
    return [[cell.plain for cell in table.get_row_at(i)] for i in range(table.row_count)]
