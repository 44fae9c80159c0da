# pytest tests/tui/test_app.py
"""The console over a canned engine at three sizes: its views, help, themes, and what it does when
the engine is gone, back, another one, unwell, or lies."""

import asyncio
import re

import pytest

from textual.binding import Binding

from canned_server import CannedServer, tree, wrong
from tui import app as app_file
from tui import link
from tui.app import Console
from tui.banner import Banner
from tui.dashboard.rank import Ranks
from tui.help import Help
from tui.messages import CancelRequest, Telemetry
from tui.once import report
from tui.settings import DARK, LIGHT

pytestmark = pytest.mark.anyio
SIZES = [(80, 24), (120, 40), (240, 60)]


@pytest.fixture
def quick(monkeypatch):
    """Tries and looks at /health that do not take seconds."""
    monkeypatch.setattr(link, "BACKOFF", (0.1,))
    monkeypatch.setattr(app_file, "HEALTH", 0.1)


def notes(app):
    return [note["text"] for note in app.history.notes]


def line_of(app):
    """What the banner says, where it is shown if it says something; else None, for now."""
    banner = app.query_one(Banner)
    return banner.line if banner.display == bool(banner.line) else None


def says(app, words):
    """Whether the banner does."""
    return words in (line_of(app) or "")


def countdown(app):
    """Seconds to the next try, as the banner has them; None where it does not."""
    found = re.search(r"next try in (\d+) s", line_of(app) or "")
    return int(found[1]) if found else None


# ---- sizes ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [(20, 5), (40, 10), (300, 100)], ids=str)
async def test_odd_sizes_do_no_harm(console, server, until, screen_text, size):
    async with console(server, size) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        for key in ("f3", "f1", "f1", "f2"):
            await pilot.press(key)
            await pilot.pause()
            assert len(screen_text(app).splitlines()) <= size[1]


async def test_a_resize_is_followed(console, server, until, screen_text):
    async with console(server, (240, 60)) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        for size in ((80, 24), (120, 40), (60, 15), (240, 60)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            lines = screen_text(app).splitlines()
            assert len(lines) == size[1] and "Dashboard" in lines[0]


# ---- views, help, themes -------------------------------------------------------------------------

async def test_keys_and_clicks_change_the_view(console, server, until, screen_text):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        views = app.query_one("#views")
        assert views.current == "dashboard" and app.focused in app.query("#dashboard *")
        await pilot.press("f3")
        await until(lambda: app.focused in app.query("#chat *"), "the chat's focus")
        assert views.current == "chat"
        await pilot.press("h", "i")
        await pilot.press("f2")
        assert views.current == "dashboard" and app.focused in app.query("#dashboard *")
        await pilot.click("#to-chat", offset=(4, 0))
        assert views.current == "chat"
        await pilot.pause()
        assert "hi" in screen_text(app)
        await pilot.click("#to-dashboard", offset=(4, 0))
        assert views.current == "dashboard"


async def test_help_names_every_key(console, server, until):
    async with console(server, (120, 40)) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        for view in ("f2", "f3"):
            await pilot.press(view, "f1")
            await pilot.pause()
            assert isinstance(app.screen, Help)
            told = " ".join(str(w.render()) for w in app.screen.query(".keys, .what"))
            main = app.screen_stack[0]
            for node in (app, *main.walk_children()):
                if not type(node).__module__.startswith("tui."):
                    continue
                for binding in Binding.make_bindings(type(node).__dict__.get("BINDINGS", [])):
                    assert app.get_key_display(binding) in told, binding
            for word in ("owner class", "leased", "TTFT", "striped"):
                assert word in told
            await pilot.press("escape")
            assert not isinstance(app.screen, Help)
        await pilot.press("f1", "f1")
        assert len(app.screen_stack) == 1


async def test_light_and_dark(console, server, until):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        dark = app.screen.styles.background.brightness
        await pilot.press("f9")
        await pilot.pause()
        assert app.theme == LIGHT and app.screen.styles.background.brightness > dark + 0.5
        await pilot.press("f9")
        assert app.theme == DARK


async def test_the_snapshot_is_copied(console, server, until):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        commands = {c.title: c.callback for c in app.get_system_commands(app.screen)}
        commands["Copy snapshot"]()
        assert app.clipboard == report(app.state, server.url)
        assert {"Dashboard", "Chat", "Help", "Light or dark", "Reconnect"} <= set(commands)


# ---- what the engine does ------------------------------------------------------------------------

async def test_figures_follow_the_engine(console, server, until, screen_text):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        for i in range(1, 9):
            server.change({"time": tree()["time"] + i / 4, "refused": 700 + i,
                           "tokens": {"decode": 5000 + 10 * i}})
            await pilot.pause()
        await until(lambda: "refused 708" in screen_text(app), "the newest count")
        assert app.history.rate("decode") == pytest.approx(40) and "40 tok/s" in screen_text(app)


async def test_an_engine_that_is_gone_and_back(console, server, until, screen_text, quick):
    async with console(server) as (app, pilot):
        await until(lambda: app.up, "the engine")
        assert line_of(app) == ""
        server.stop()
        await until(lambda: app.up is False, "its end")
        await until(lambda: says(app, "no engine answers"), "the reason")
        assert re.search(r"✗ no engine answers at http://127.0.0.1:\d+: Connection refused\. Lost "
                         r"for \d+\.\d s; (next try in 1 s \(F5: now\)|trying now)", line_of(app))
        await until(lambda: "Connection refused" in screen_text(app), "the banner")
        assert "✗ lost" in screen_text(app) and app.dashboard.has_class("old")
        server.start()
        await until(lambda: app.up, "the engine again")
        await pilot.pause()
        assert line_of(app) == "" and "● live" in screen_text(app)
        assert not app.dashboard.has_class("old")
        told = notes(app)
        assert told[0] == told[-1] == "the engine answers" and len(told) == 3


async def test_before_there_is_an_engine(console, server, until, screen_text, quick):
    server.stop()
    async with console(server) as (app, pilot):
        await until(lambda: "Connection refused" in screen_text(app), "the banner")
        server.start()
        await until(lambda: app.state and line_of(app) == "", "the engine")


async def test_f5_ends_the_countdown(console, server, until, monkeypatch):
    monkeypatch.setattr(link, "BACKOFF", (60.0,))
    server.mode = "500"
    async with console(server) as (app, pilot):
        first = await until(lambda: countdown(app), "the countdown")
        assert says(app, "rank 1 is lost")
        await until(lambda: countdown(app) < first, "the countdown")
        server.mode = "ok"
        await pilot.press("f5")
        await until(lambda: app.up, "the engine")


async def test_a_tree_that_comes_while_the_console_closes(console, server, until):
    for passes in range(6, 22):     # of the loop: its panels close one by one, before the app does
        async with console(server, (120, 40)) as (app, _):
            await until(app.query_one(Ranks).panels, "the first tree")

            async def late():
                while app.is_running:
                    await asyncio.sleep(0)
                for _ in range(passes):
                    await asyncio.sleep(0)
                app.post_message(Telemetry(app.state, 0.0))
            posting = asyncio.create_task(late())
        await posting


async def test_an_engine_started_again_is_noticed(console, server, until, quick):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        server.stop()
        await until(lambda: app.up is False, "its end")
        server.tree = {**tree(), "started": 1_800_000_500.0, "tokens": {"decode": 1}}
        server.start()
        await until(lambda: app.up, "the engine")
        await until(lambda: any("started again" in note for note in notes(app)), "the note")
        await until(lambda: app.state["tokens"] == {"decode": 1}, "its tree")
        assert len(app.history.samples) == 1


async def test_a_fault_and_an_engine_that_is_not_well(console, server, until, screen_text, quick):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        server.health = 503, {"status": "late", "reason": "rank 1 has not answered for 4.0 s"}
        await until(lambda: line_of(app), "the banner")
        assert line_of(app) == "! not well: late: rank 1 has not answered for 4.0 s"
        server.change({"fault": "rank 1 is lost"})
        await until(lambda: line_of(app) == "✗ fault: rank 1 is lost", "the fault")
        server.change({"fault": None})
        server.health = 200, {"status": "ok"}
        await until(lambda: line_of(app) == "", "its end")
        assert "the engine is well" in notes(app)
        assert len([n for n in notes(app) if "4.0 s" in n]) == 1


async def test_a_key_that_is_wrong(console, server, until, quick):
    server.key = "secret"
    async with console(server, key="wrong") as (app, pilot):
        await until(lambda: says(app, "the API key is missing or wrong"), "the reason")
        assert says(app, "--api-key")


@pytest.mark.parametrize("mode", ["html", "json", "cut", "types", "stall"])
@pytest.mark.parametrize("size", SIZES[:2], ids=str)
async def test_lies_are_survived(console, server, until, screen_text, quick, mode, size):
    server.mode = mode
    async with console(server, size) as (app, pilot):
        if mode in ("types", "stall"):
            await until(lambda: app.up or server.watching, "the stream")
        else:
            await until(lambda: app.up is False and line_of(app), "the reason")
        for key in ("1", "2", "3", "4", "5", "f3", "f2"):
            await pilot.press(key)
            await pilot.pause()
        if mode == "types":
            await until(lambda: "the engine's world is not a number" in notes(app), "the note")
            assert len(set(notes(app))) == len(notes(app))
        server.mode = "dead"
        await until(lambda: server.watching == 0, "the end of the lies")
        server.mode = "ok"
        if mode == "stall":
            server.stop()
            server.start()
        await until(lambda: app.state == tree() and app.up, "the truth")
        await until(lambda: line_of(app) == "", "the banner's end")


async def test_lies_in_patches_are_survived(console, server, until, screen_text):
    async with console(server, (240, 60)) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        lie = wrong(tree())
        for name in tree():
            for value in (lie[name], None, 0, -1, 1e308, "\x1b[2J[red]x[/]", [], {}, [[]],
                          [{}, {}], {"tokens": {"a": 1}}):
                app.post_message(Telemetry({**tree(), name: value}, 0.0))
            await pilot.pause()
        app.post_message(Telemetry(tree(), 0.0))
        await pilot.pause()
        assert "\x1b" not in screen_text(app) and app.is_running


async def test_a_request_is_cancelled(console, server, until):
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        app.query_one("#dashboard").post_message(CancelRequest(41))
        await until(lambda: server.cancelled == [41], "the request's end")
        await until(lambda: "request 41 was cancelled" in notes(app), "the note")
        app.query_one("#dashboard").post_message(CancelRequest(41))
        await until(lambda: "request 41 had ended already" in notes(app), "the note")
        server.mode = "500"
        app.query_one("#dashboard").post_message(CancelRequest(40))
        await until(lambda: any("rank 1 is lost" in n for n in notes(app)), "the reason")


async def test_a_chat(console, server, until, screen_text):
    server.say("The **answer** is 42.", reasoning="Let me think.")
    async with console(server) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        await pilot.press("f3")
        await pilot.pause()
        await pilot.press(*"What?", "enter")
        await until(lambda: "42." in screen_text(app), "the reply")
        assert server.asked[0]["messages"] == [{"role": "user", "content": "What?"}]
        await pilot.press("f2", "f3")
        assert app.is_running


# ---- recordings ----------------------------------------------------------------------------------

async def test_a_replay(until, screen_text):
    events = [(0.0, "snapshot", tree(3)), (0.3, "patch", {"refused": 432})]
    app = Console(None, replay=events)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: "refused 432" in screen_text(app), "the patch")
        await until(lambda: line_of(app) == "! the recording has ended", "its end")
        assert "a recording" in screen_text(app)
        await pilot.press("f3")
        assert "A recording has no engine to talk to." in screen_text(app)
        app.query_one("#dashboard").post_message(CancelRequest(1))
        await pilot.pause()
        assert app.is_running


async def test_a_console_that_records(console, server, until):
    events = []

    def record(kind, data):
        events.append((kind, data))
        record.failed = "the disk is full" if len(events) == 2 else None
    record.failed = None
    async with console(server, record=record) as (app, pilot):
        await until(lambda: app.state, "the first tree")
        server.change({"rounds": 7})
        await until(lambda: "the disk is full" in notes(app), "the note")
        server.change({"rounds": 8})
        await until(lambda: app.state["rounds"] == 8, "the tree")
    assert events == [("snapshot", tree()), ("patch", {"rounds": 7})]       # and no third


async def test_many_engines_do_not_pile_up(console, until, quick):
    with CannedServer(tree()) as server:
        async with console(server) as (app, pilot):
            for i in range(5):
                await until(lambda: app.up, "the engine")
                server.mode = "dead"
                await until(lambda: app.up is False, "its end")
                server.mode = "ok"
            await until(lambda: app.up, "the engine")
            await until(lambda: server.watching == 1, "the other streams' end")
        await until(lambda: server.watching == 0, "its end")
