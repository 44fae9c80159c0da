# pytest tests/tui/test_screens.py
"""What every screen looks like at three sizes, as text, in tests/tui/screens.

With SPARKGRID_WRITE_SCREENS=1 in the environment they are written instead: read the difference.
"""

import pathlib
import re

import pytest

from stored import differs

pytestmark = pytest.mark.anyio
SIZES = [(80, 24), (120, 40), (240, 60)]
SCREENS = pathlib.Path(__file__).parent / "screens"
SIGNS = "● live", "mini", "2 ranks", "Engine", "context 4,096 tokens", "^q Quit"
PICTURES = [            # name, keys, what shows it is there, keys back to the first page
    ("dashboard", [], "Engine", []), ("requests", ["2"], "decode", ["1"]),
    ("ranks", ["3"], "rank 0", ["1"]), ("pool", ["4"], "class", ["1"]),
    ("log", ["5"], "refusal", ["1"]), ("chat", ["f3"], "Enter sends", ["f2"]),
    ("help", ["f1"], "Everywhere", ["f1"]),
    ("palette", ["ctrl+p"], "Search for commands", ["escape"])]


async def settled(pilot, until, screen_text, *signs):
    """The picture, once it has all the signs and is the same twice in a row."""
    await until(lambda: all(sign in screen_text(pilot.app) for sign in signs), signs)
    before = None
    for _ in range(100):
        await pilot.pause()
        if before == (shown := screen_text(pilot.app)):
            return shown
        before = shown
    raise AssertionError("the picture does not come to rest")


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
async def test_screens(console, server, until, screen_text, size):
    """Each picture is over the first page or in its place, and that is at rest before."""
    changed = []
    async with console(server, size) as (app, pilot):
        app.client.url = app.query_one("Bar")._where = "http://spark0:8114"
        first = await settled(pilot, until, screen_text, *SIGNS)
        for name, keys, sign, back in PICTURES:
            await pilot.press(*keys)
            shown = await settled(pilot, until, screen_text, sign)
            assert all(len(line) <= size[0] for line in shown.splitlines())
            assert len(shown.splitlines()) <= size[1]
            changed += compare(shown, f"{name}-{size[0]}x{size[1]}.txt")
            await pilot.press(*back)
            assert await settled(pilot, until, screen_text, *SIGNS) == first, name
    assert not changed, "\n".join(changed)


def compare(shown, name):
    """What to say where the picture is not the file of that name, times of day left out."""
    shown = re.sub(r"\b\d\d:\d\d:\d\d\b", "hh:mm:ss", shown) + "\n"
    fault = differs(SCREENS / name, shown)
    return [f"{fault}\n{shown}"] if fault else []
