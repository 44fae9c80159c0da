"""The loop that keeps the console in touch with its engine, and the one that replays a recording.

Both post messages: `Telemetry` for each new tree, `Link` when the engine answers or stops to,
`Restarted` when another engine does. An engine that does not answer is tried again after 1, 2, 4,
then every 8 seconds, for ever.
"""

import asyncio
import time

from tui.answer import ClientError
from tui.messages import Link, Restarted, Telemetry
from tui.state import merge, number

BACKOFF = (1.0, 2.0, 4.0, 8.0)      # seconds before the next try
GENTLE = 0.1                        # seconds between two Telemetry messages, at least


async def run(client, post, record=None, hurry=None):
    """Watch an engine until cancelled.

    post(message). record(kind, data): called with every event as it came. hurry: asyncio.Event; one
    that is set ends a wait.
    """
    hurry = hurry or asyncio.Event()
    tries, started = 0, None
    while True:
        post_tree = _Gentle(post)
        try:
            tree = None
            async for kind, data in client.telemetry():
                if kind == "snapshot":
                    tree, tries = data, 0
                    began = number(tree, "started")
                    if started is not None and began is not None and began != started:
                        post(Restarted(began))
                    started = began if began is not None else started
                    post(Link(True))
                elif tree is None:
                    raise ClientError(f"{client.url} sent a patch before a snapshot")
                else:
                    tree = merge(tree, data)
                if record:
                    record(kind, data)
                post_tree(tree)
            reason = f"{client.url} ended its telemetry"
        except ClientError as e:
            reason = e.message
        finally:
            post_tree.stop()
        wait = BACKOFF[min(tries, len(BACKOFF) - 1)]
        tries += 1
        post(Link(False, reason, wait))
        try:
            await asyncio.wait_for(hurry.wait(), wait)
        except TimeoutError:
            pass
        hurry.clear()
        post(Link(False, reason, 0.0))


async def replay(events, post, speed=1.0):
    """Post a recording's trees at the pace they were recorded. events: (seconds, kind, data)."""
    start, tree = time.monotonic(), None
    for at, kind, data in events:
        await asyncio.sleep(max(0.0, start + at / speed - time.monotonic()))
        if kind == "snapshot":
            post(Link(True))
            tree = data
        else:
            tree = merge(tree or {}, data)
        post(Telemetry(tree, at))
    post(Link(False, "the recording has ended", 0.0))


class _Gentle:
    """Posts the newest tree, GENTLE seconds after the one before at the earliest."""

    def __init__(self, post):
        self._post, self._timer, self._newest, self._last = post, None, None, 0.0

    def __call__(self, tree):
        self._newest = tree
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self._last + GENTLE - time.monotonic()),
                                          self._go)

    def _go(self):
        self._timer, self._last = None, time.monotonic()
        self._post(Telemetry(self._newest, self._last))

    def stop(self):
        """Post what waits, and nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._go()
