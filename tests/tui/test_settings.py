# python -m pytest tests/tui/test_settings.py
"""The theme that was chosen is there again after a restart; its file is not trusted."""

import pytest

from tui.settings import DARK, LIGHT

pytestmark = pytest.mark.anyio


@pytest.fixture
def file(own_state):
    return own_state / "sparkgrid" / "console.json"


def notes(app):
    return [note["text"] for note in app.history.notes]


async def test_the_theme_is_remembered(console, server):
    async with console(server) as (app, pilot):
        await pilot.press("f9")
        assert app.theme == LIGHT
    async with console(server) as (app, pilot):
        assert app.theme == LIGHT
        app.theme = "nord"              # by the command palette
        await pilot.pause()
    async with console(server) as (app, pilot):
        assert app.theme == "nord" and notes(app) in ([], ["the engine answers"])
        await pilot.press("f9")
        assert app.theme == LIGHT       # nord is dark


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"theme": 3}', b'{"theme": "no such"}',
                                    b"\xff", b"[" * 100_000])
async def test_a_damaged_choice_is_none(console, server, file, damage):
    file.parent.mkdir(parents=True)
    file.write_bytes(damage)
    async with console(server) as (app, pilot):
        assert app.theme == DARK and file.read_bytes() == damage
        await pilot.press("f9")
    assert file.read_text() == '{"theme": "textual-light"}\n'


async def test_a_theme_that_cannot_be_kept_is_a_note(console, server, file, until):
    file.mkdir(parents=True)
    async with console(server) as (app, pilot):
        await pilot.press("f9")
        assert app.theme == LIGHT
        line = f"the theme is not remembered: Is a directory: {file}"
        await until(lambda: line in notes(app), "the note")
