"""One line over everything while something is wrong: what, since when, and when it is tried again.

Three things may be wrong, the worst is shown: the engine does not answer; it answers and reports a
fault; it answers and is not well (/health). Nothing is said by colour alone: a line begins with "✗"
or "!".
"""

import math
import time

from textual.widgets import Static

from tui.once import plain
from tui.units import span


class Banner(Static):
    """Hidden while all is well. The app tells it what it hears with link, fault and health. A click
    tries the engine now, like F5."""

    DEFAULT_CSS = """
    Banner { height: auto; max-height: 3; padding: 0 1; display: none; }
    Banner.lost { display: block; background: $error; color: $text; text-style: bold; }
    Banner.unwell { display: block; background: $warning; color: $text; }
    """

    def __init__(self, **more):
        super().__init__("", markup=False, **more)
        self._up, self._reason, self._since, self._next = True, "", 0.0, None
        self._fault, self._unwell = None, None

    def on_mount(self):
        self.set_interval(0.5, self._tick, name="countdown")

    def on_click(self):
        self.app.action_hurry()

    def link(self, up, reason, retry_in):
        """The engine answers, or does not: why, and seconds to the next try (0: right now)."""
        if self._up and not up:
            self._since = time.monotonic()
        self._up, self._reason = up, reason
        self._next = time.monotonic() + retry_in if retry_in else None
        self._tick()

    def fault(self, told):
        """The tree's `fault`, or None."""
        self._fault = told
        self._tick()

    def health(self, status, reason):
        """What /health says."""
        self._unwell = None if status == "ok" else f"{status}: {reason}" if reason else status
        self._tick()

    @property
    def line(self):
        """What is shown; "" while all is well."""
        if not self._up:
            wait = None if self._next is None else math.ceil(self._next - time.monotonic())
            after = "trying now" if not wait or wait < 0 else f"next try in {wait} s (F5: now)"
            if not self._retries:
                return f"! {plain(self._reason)}"
            lost = span(time.monotonic() - self._since)
            return f"✗ {plain(self._reason)}. Lost for {lost}; {after}"
        if self._fault is not None:
            return f"✗ fault: {plain(self._fault)}"
        return f"! not well: {plain(self._unwell)}" if self._unwell else ""

    @property
    def _retries(self):
        """A recording that has ended is not tried again."""
        return self.app.client is not None

    def _tick(self):
        if not self.is_attached:        # the console ends
            return
        line = self.line
        self.set_class(line.startswith("✗"), "lost")
        self.set_class(line.startswith("!"), "unwell")
        self.update(line)
