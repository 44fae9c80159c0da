# pytest tests/tui/test_log.py
"""The log: each line once, bounded, wrapped, copied whole; and where its reader is."""

import copy

import pytest
from rich.cells import cell_len

from canned_server import tree
from dashboard_host import Host, show
from tui.dashboard.log import ENTRIES, EventLog

pytestmark = pytest.mark.anyio


async def test_the_log_is_bounded_and_takes_each_line_once():
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        log = app.query_one(EventLog)
        state = tree(log=10_000)
        history = await show(pilot, state)
        assert len(log._entries) == ENTRIES and len(log._lines) <= 4 * ENTRIES
        assert "14,999" in log.as_text().splitlines()[-1]
        for i in range(5):                      # the engine's last 200, one new each time
            state = {**state, "log": [*state["log"][1:], {
                "time": state["time"] + i, "level": "fault", "text": f"new {i}"}][-200:]}
            await show(pilot, state, history)
        history.note("warning", "own line")
        await show(pilot, state, history)
        await show(pilot, copy.deepcopy(state), history)
        last = log.as_text().splitlines()[-6:]
        assert [x.split(" ", 2)[2] for x in last] == [*(f"new {i}" for i in range(5)), "own line"]
        assert len(log._entries) == ENTRIES
        assert len(log._lines) == log.virtual_size.height
        assert log.scroll_offset.y == log.max_scroll_y          # it follows the end


async def test_the_log_stays_where_the_reader_is():
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        log = app.query_one(EventLog)
        state = tree(log=100)
        history = await show(pilot, state)
        log.scroll_to(y=30, animate=False, immediate=True)
        await pilot.pause()
        reading = log._lines[log.scroll_offset.y]
        state = {**state, "log": [*state["log"], {"time": 2e9, "level": "fault", "text": "new"}]}
        await show(pilot, state, history)
        assert log._lines[log.scroll_offset.y] == reading


async def test_long_lines_are_wrapped_and_copied_whole(screen_text):
    app = Host()
    async with app.run_test(size=(80, 24)) as pilot:
        words = " ".join(f"word{i}" for i in range(40))
        await pilot.press("5")
        await show(pilot, {"log": [{"time": 1e9, "level": "fault", "text": words}]})
        text = screen_text(app)
        assert all(f"word{i}" in text for i in range(40)) and "✗ fault" in text
        await pilot.press("y")
        assert app.copied.endswith(words)
        await pilot.resize_terminal(50, 24)
        await pilot.pause()
        assert all(f"word{i}" in screen_text(app) for i in range(40))


@pytest.mark.parametrize("words", ["word " * 60, "日本語 " * 60], ids=["ascii", "wide"])
async def test_a_narrow_log_uses_its_width(words):
    """After the first line the text begins near the edge, and no line is cut by the scrollbar."""
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        state = {"log": [{"time": 1e9 + i, "level": "fault", "text": words} for i in range(9)]}
        await show(pilot, state)
        log = app.query_one(EventLog)
        assert log.max_scroll_y > 0 and not log.show_horizontal_scrollbar
        assert log._lines[0][1].startswith(words[:4]) and log._lines[0][2]
        for _, line, first in log._lines:
            assert cell_len(line) + 20 * first <= log.scrollable_content_region.width
            assert first or line.startswith("  " + words[:3])
        await pilot.resize_terminal(240, 60)
        await pilot.press("5", "z")
        await pilot.pause()
        await pilot.pause()
        assert log._lines[1][1].startswith(" " * 20 + words[:3])
