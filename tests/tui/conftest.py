"""What the console's tests share: a canned server, a console on it, the screen as text."""

import asyncio
import contextlib
import gc
import math
import pathlib
import time

import pytest
from textual import app as textual_app
from textual import pilot as textual_pilot
from textual._context import active_app, visible_screen_stack

from canned_server import CannedServer, tree
from tui.app import Console
from tui.client import Client

PATIENCE = 30.0         # seconds for what must happen soon
SOON = 1 / 50           # seconds; the next picture is drawn within them
BUSY = 1.0              # seconds after which an app that is never at rest is not waited for


@pytest.fixture
def anyio_backend():
    """Async tests (`pytestmark = pytest.mark.anyio`) run on asyncio, which Textual needs."""
    return "asyncio"


@pytest.fixture(autouse=True, scope="module")
def few_collections():
    """An app is many objects that live: to look through them all the time is a fifth of a test."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """No test reads or writes the user's conversations, or takes a key from the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SPARKGRID_API_KEY", raising=False)
    return pathlib.Path(tmp_path / "state")


@pytest.fixture(autouse=True)
def rests(monkeypatch):
    """Keys and pauses of a pilot end when the app has nothing left to do.

    Textual's own wait ends when the process uses little of a processor. One that is given little of
    it seems at rest then, and one with a server in a thread never does.
    """
    at_work = []
    plain = asyncio.to_thread

    async def to_thread(*call, **options):
        at_work.append(call)
        try:
            return await plain(*call, **options)
        finally:
            at_work.remove(call)

    async def at_rest(*_):
        await wait_for_rest(at_work)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    for module in (textual_app, textual_pilot):
        monkeypatch.setattr(module, "wait_for_idle", at_rest)


@pytest.fixture
def server():
    """An engine of two ranks, canned."""
    with CannedServer(tree()) as served:
        yield served


@pytest.fixture
def console():
    """async with console(server, size) as (app, pilot): the console, connected to a server."""
    return running


@pytest.fixture
def screen_text():
    """screen_text(app) -> what the terminal shows, a line a row."""
    return text_of


@pytest.fixture
def until():
    """await until(condition, "what"): wait until condition() is true."""
    return wait_until


@contextlib.asynccontextmanager
async def running(server, size=(120, 40), key=None, **options):
    """(app, pilot) of a console without a terminal. options: of Console."""
    app = Console(Client(server.url, key), **options)
    app.animation_level = "none"
    async with app.run_test(size=size, notifications=True) as pilot:
        yield app, pilot


def text_of(app):
    """The picture of an app as text: what a terminal would show, without colours."""
    width, height = app.size
    # what is under a dialog is drawn with it, and kept: without this, kept as nothing
    visible_screen_stack.set(app._background_screens)
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in lines[:height])


async def wait_for_rest(at_work):
    """Until the loop has nothing to do, now or soon, and no thread works for it."""
    loop, app = asyncio.get_running_loop(), active_app.get()
    give_up = loop.time() + BUSY
    while loop.time() < give_up:
        await asyncio.sleep(0)
        if loop._ready:
            continue
        timers = [t.when() for t in loop._scheduled if not t.cancelled()]
        due = min(timers, default=math.inf) - loop.time()
        if due < SOON and not app._exit:        # after its end, the picture's timer runs idle
            await asyncio.sleep(max(0.0, due))
        elif at_work:
            await asyncio.sleep(0.001)
        else:
            return


async def wait_until(condition, what="it", seconds=PATIENCE):
    """The first true value of condition(), asked again and again."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.01)
    return found
