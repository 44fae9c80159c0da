# pytest tests/tui/test_screens.py
"""What every screen looks like at three sizes, as text, in tests/tui/screens.

With SPARKGRID_WRITE_SCREENS=1 in the environment they are written instead: read the difference.
"""

import os
import pathlib
import re

import pytest

pytestmark = pytest.mark.anyio
SIZES = [(80, 24), (120, 40), (240, 60)]
SCREENS = pathlib.Path(__file__).parent / "screens"
WRITE = "SPARKGRID_WRITE_SCREENS"
SAME = 4                # pictures in a row, a tenth of a second apart, that count as rest


async def settled(app, pilot, screen_text):
    """The picture, once some in a row are the same."""
    seen = []
    for _ in range(100):
        await pilot.pause(0.1)
        seen = [*seen, screen_text(app)][-SAME:]
        if len(seen) == SAME and len(set(seen)) == 1:
            return seen[0]
    raise AssertionError("the picture does not come to rest")


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name, keys, sign", [
    ("dashboard", [], "Engine"), ("requests", ["2"], "decode"), ("ranks", ["3"], "rank 0"),
    ("pool", ["4"], "class"), ("log", ["5"], "refusal"),
    ("chat", ["f3"], "Enter sends"), ("help", ["f1"], "Everywhere"),
    ("palette", ["ctrl+p"], "Search for commands")])
async def test_screens(console, server, until, screen_text, size, name, keys, sign):
    async with console(server, size) as (app, pilot):
        app.client.url = app.query_one("Bar")._where = "http://spark0:8114"
        await until(lambda: app.state and "live" in screen_text(app), "the first tree")
        await pilot.press(*keys)
        await until(lambda: sign in screen_text(app), sign)
        shown = await settled(app, pilot, screen_text)
        assert all(len(line) <= size[0] for line in shown.splitlines())
        assert len(shown.splitlines()) <= size[1]
        compare(shown, f"{name}-{size[0]}x{size[1]}.txt")


def compare(shown, name):
    """The picture and the file of that name, times of day and what varies left out."""
    shown = re.sub(r"\b\d\d:\d\d:\d\d\b", "hh:mm:ss", shown) + "\n"
    path = SCREENS / name
    if os.environ.get(WRITE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), (
        f"{name} has changed; {WRITE}=1 writes it anew:\n{shown}")
