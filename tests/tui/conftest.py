"""What the console's tests share: a canned server, a console on it, the screen as text."""

import asyncio
import contextlib
import pathlib
import time

import pytest

from canned_server import CannedServer, tree
from tui.app import Console
from tui.client import Client

PATIENCE = 30.0         # seconds for what must happen soon


@pytest.fixture
def anyio_backend():
    """Async tests (`pytestmark = pytest.mark.anyio`) run on asyncio, which Textual needs."""
    return "asyncio"


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """No test reads or writes the user's conversations, or takes a key from the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SPARKGRID_API_KEY", raising=False)
    return pathlib.Path(tmp_path / "state")


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
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in lines[:height])


async def wait_until(condition, what="it", seconds=PATIENCE):
    """The first true value of condition(), asked again and again."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.01)
    return found
