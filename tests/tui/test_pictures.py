# pytest tests/tui/test_pictures.py
"""The console in colours: dashboard, chat and help, dark and light, as SVG in tests/tui/pictures.

The dashboard is that of six real ranks, recorded in six_ranks.jsonl. Every screen in every size is
in test_screens.py, without colours. With SPARKGRID_WRITE_SCREENS=1 in the environment the
pictures are written instead: open them in a browser.
"""

import pathlib
import re
import time

import pytest
from textual.widgets import TextArea

from canned_server import CannedServer
from stored import differs
from tui.chat.conversation import Conversation
from tui.chat.message import Message, file_part
from tui.chat.store import Store
from tui.messages import Telemetry
from tui.record import read
from tui.settings import DARK, LIGHT
from tui.state import merge

pytestmark = pytest.mark.anyio
HERE = pathlib.Path(__file__).parent
PICTURES = HERE / "pictures"
SIZE = 120, 40
UNTIL = 27.6            # seconds of the recording, as in docs/console.svg
REPLY = """## Two ways

1. **Count** the pages: `pages = -(-tokens // 64)`.
2. *Ask* the [engine](http://spark0:8114/metrics).

| tokens | pages |
|---|---|
| 64 | 1 |
| 65 | 2 |

```python
def pages(tokens, rows=64):
    return -(-tokens // rows)       # rounded up
```

> A page is 64 rows.
"""


@pytest.fixture
def talk(own_state):
    """A kept conversation, yesterday's."""
    found = Conversation.new()
    found.ask("How many pages has a text?", [("notes.txt", file_part("notes.txt", "a\nb\n"))])
    found.messages += [
        Message("assistant", REPLY, "The user wants a formula.", figures={
            "reason": "stop", "prompt": 40, "tokens": 96, "cached": 20, "reasoning": 6,
            "seconds": 3.2, "first": 0.21, "rate": 31.8}),
        Message("user", "And of 1M tokens?"),
        Message("assistant", "15,6", figures={"reason": "failed", "error": "rank 2 is lost",
                                              "seconds": 1.1, "first": 0.2})]
    found.changed = time.time() - 90_000
    Store().save(found)


@pytest.fixture
def events():
    """The recording: [(seconds, kind, data)]."""
    return [event for event in read(HERE / "six_ranks.jsonl") if event[0] <= UNTIL]


async def test_pictures(console, until, talk, events, tmp_path):
    changed = []

    async def compare(view):
        for theme, name in ((DARK, "dark"), (LIGHT, "light")):
            app.theme = theme
            changed.extend(changes(await at_rest(app, pilot), f"{view}-{name}.svg", tmp_path))

    with CannedServer(events[0][2]) as server:
        async with console(server, SIZE) as (app, pilot):
            app.client.url = app.bar._where = "http://spark0:8114"
            await until(lambda: app.state and app.up, "the first tree")
            for area in app.query(TextArea):
                area.cursor_blink = False
            state = app.state
            for seconds, _, data in events[1:]:
                state = merge(state, data)
                app.post_message(Telemetry(state, seconds))
                await pilot.pause()             # a tree that waits makes way for the next
            await compare("dashboard")
            await pilot.press("f3")
            await until(lambda: app.query("Reply"), "the conversation")
            await compare("chat")
            await pilot.press("f1")
            await compare("help")
    assert not changed, "\n".join(changed)


async def at_rest(app, pilot):
    """The picture, once it is the same twice in a row."""
    before = None
    for _ in range(100):
        await pilot.pause()
        if before == (shown := app.export_screenshot()):
            return shown
        before = shown
    raise AssertionError("the picture does not come to rest")


def changes(shown, name, folder):
    """What to say where the picture is not the file of that name.

    Left out are times of day, which are those of the clock here, and the names of its styles, which
    are a sum over all of it: with them a difference would be everywhere.
    """
    shown = re.sub(r"\bterminal-\d+", "t", shown).replace("<text", "\n<text")
    shown = re.sub(r"\b\d\d:\d\d:\d\d\b", "hh:mm:ss", shown)
    shown = "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"
    fault = differs(PICTURES / name, shown)
    if not fault:
        return []
    (folder / name).write_text(shown, encoding="utf-8")
    return [f"{fault}; it is {folder / name} now, and was {PICTURES / name}"]
