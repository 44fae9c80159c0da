"""The table of requests: what each is doing, how far it is, and a key that ends one.

Ending a request asks twice: the first press says what the second will do.
"""

import time

from textual.binding import Binding
from textual.content import Content

from tui import units
from tui.dashboard.livetable import LiveTable, clock
from tui.dashboard.panel import clean
from tui.messages import CancelRequest
from tui.state import number, rows, text

MOST = 1000             # requests that are listed
PATIENCE = 5.0          # seconds within which the second press must follow
ENDING = 10.0           # seconds after which one that is still there is no longer called ending
SIGNS = {"queued": "… queued", "prefill": "» prefill", "decode": "▶ decode"}


class Requests(LiveTable):
    """One row a request, in the order they came."""

    BORDER_TITLE = "2 Requests"
    HELP = ("Tokens of each request: of its prompt, of these taken from a kept conversation"
            " (cached), generated of at most limit; tokens a second; age; owner class (all:"
            " striped). x ends the selected one.")
    COLUMNS = (("id", "id", 6, "left"), ("state", "state", 10, "left"),
               ("prompt", "prompt", 8, "right"), ("cached", "cached", 8, "right"),
               ("generated", "generated", 10, "right"), ("limit", "limit", 8, "right"),
               ("rate", "tok/s", 6, "right"), ("age", "age", 10, "right"),
               ("owner", "owner", 6, "right"))
    BINDINGS = [Binding("x", "cancel", "End request", tooltip="End the selected request (twice)"),
                Binding("escape", "disarm", show=False)]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._armed = None          # (key, time of the first press)
        self._ending = {}           # {key: when it was asked to end}
        self._ids = {}              # {key: the request's id}
        self._total, self._said = 0, None

    def lines(self, state):
        requests = rows(state, "requests")
        self._ids = {}
        for i, request in enumerate(requests[:MOST]):
            id_ = request.get("id")
            key = clean(str(id_), 12)
            self._ids[key] = id_
            state_ = clean(text(request, "state") or "?", 10)
            owner = number(request, "owner")
            if owner is None:
                owner_ = "all" if number(request, "seat") is not None else ""
            else:
                owner_ = f"{owner:.0f}"
            yield {"id": key,
                   "state": "✗ ending" if key in self._ending else SIGNS.get(state_, state_),
                   "owner": owner_,
                   "rate": "" if request.get("rate") is None else _short(request, "rate"),
                   "age": clock(number(request, "age")),
                   **{k: _short(request, k) for k in ("prompt", "cached", "generated", "limit")}}

    def _fill(self, state):
        super()._fill(state)
        now = time.monotonic()
        self._ending = {k: at for k, at in self._ending.items()
                        if k in self._ids and now - at < ENDING}
        self._total = len(rows(state, "requests"))
        if self._armed and (self._armed[0] not in self._ids
                            or now - self._armed[1] > PATIENCE):
            self._armed = None
        self._say()

    def _say(self):
        """The title: how many there are, and what a second press will do."""
        line, again = f"{self.BORDER_TITLE}  {self._total:,}", ""
        if self._total > MOST:
            line += f", the first {MOST:,} shown"
        if self._armed:
            again = f"! x again ends request {self._armed[0]}"
        if (line, again) != self._said:
            self._said = line, again
            self.border_title = Content.from_markup(
                "$line  [@click=cancel]$again[/]" if again else "$line", line=line, again=again)

    def action_cancel(self):
        """Ask, then end the selected request."""
        key, now = self.selected, time.monotonic()
        if not isinstance(self._ids.get(key), int) or key in self._ending:
            return
        if self._armed and self._armed[0] == key and now - self._armed[1] <= PATIENCE:
            self._armed = None
            self._ending[key] = now
            self.post_message(CancelRequest(self._ids[key]))
            self._fill(self._seen[0])
        else:
            self._armed = key, now
            self._say()

    def action_disarm(self):
        """Forget the first press."""
        self._armed = None
        self._say()


def _short(request, key):
    value = number(request, key)
    if value is not None and key != "rate" and 0 <= value < 1e6:
        return f"{value:,.0f}"
    return units.short(value)
