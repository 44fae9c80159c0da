"""The chat alone in an app, for tests: its keys, its screen, what the server was asked."""

import re

from textual.app import App
from textual.widgets import Footer, Input, Static

from tui.chat.chat import Chat
from tui.chat.composer import Composer
from tui.client import Client


class Host(App):
    """The chat alone. notes: what it said in passing."""

    def __init__(self, url):
        super().__init__()
        self.client, self.notes = Client(url), []

    def compose(self):
        yield Chat()
        yield Footer()

    def notify(self, message, **options):
        self.notes.append(f"{options.get('title', '')}: {message}")
        super().notify(message, **options)

    async def on_unmount(self):
        await self.client.close()


class Driver:
    """A running Host and short ways to it."""

    def __init__(self, app, pilot, server, text_of, until):
        self.app, self.pilot, self.server = app, pilot, server
        self.press, self._text, self._until = pilot.press, text_of, until

    @property
    def chat(self):
        return self.app.query_one(Chat)

    @property
    def screen(self):
        return self._text(self.app)

    @property
    def flat(self):
        """The screen's text without frames, in one line."""
        return " ".join(re.sub("[│█▌]", " ", self.screen).split())

    @property
    def fault(self):
        """What a form says is wrong."""
        return str(self.app.screen.query_one(".fault", Static).content)

    async def write(self, text):
        """Type into the message."""
        self.chat.query_one(Composer).focus()
        for key in text:
            await self.press({" ": "space", "\n": "ctrl+j"}.get(key, key))

    async def say(self, text):
        await self.write(text)
        await self.press("enter")

    async def idle(self):
        """Until no reply is on its way and all is drawn."""
        await self.pilot.pause()
        await self._until(lambda: not self.chat.runs, "the reply's end")
        await self.pilot.pause()

    async def ask(self, text):
        await self.say(text)
        await self.idle()

    async def shows(self, text):
        """Until the screen shows this."""
        try:
            await self._until(lambda: text in self.screen)
        except AssertionError:
            raise AssertionError(f"{text!r} is not on the screen:\n{self.screen}") from None

    async def until(self, condition, what):
        await self._until(condition, what)
        await self.pilot.pause()

    async def form(self, line):
        """Fill the form of one line that is on the screen, and enter it."""
        await self.until(lambda: isinstance(self.app.focused, Input), "the form")
        self.app.screen.query_one(Input).value = line
        await self.press("enter")
        await self.pilot.pause()


def runner(server, text_of, until):
    """run(steps, size): a Host, and `await steps(Driver)` in it."""
    async def run(steps, size=(80, 24)):
        app = Host(server.url)
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot, server, text_of, until)
            await pilot.pause()
            await steps(driver)
    return run


def asked(server, index=-1):
    return server.asked[index]["messages"]
