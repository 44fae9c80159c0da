"""The console's application: two views of one engine, kept in touch with it by tui.link.

The newest tree is in `state`, what happened to it over time in `history`. Messages of the link
arrive here and go to the parts that show them; nothing below this file knows where a tree comes
from, so a recording is shown by the same code.
"""

import asyncio

from textual import on, work
from textual.app import App
from textual.binding import Binding
from textual.widgets import ContentSwitcher, Footer, Static

from tui import link, once, settings
from tui.actions import Actions
from tui.answer import ClientError
from tui.banner import Banner
from tui.bar import Bar
from tui.chat.chat import Chat
from tui.dashboard import Dashboard
from tui.messages import CancelRequest, Health, Link, Note, Restarted, Telemetry
from tui.state import History, faults, text

HEALTH = 3.0                    # seconds between two looks at /health


class Console(Actions, App):
    """client: tui.client.Client, or None with replay, a list of (seconds, kind, data).

    record: None, or what to call with every event of the engine's (tui.record.Recorder).
    """

    TITLE = "sparkgrid"
    CSS_PATH = "styles.tcss"
    BINDINGS = [
        Binding("f1", "help", "Help", priority=True, tooltip="This help"),
        Binding("f2", "view('dashboard')", "Dashboard", show=False, priority=True,
                tooltip="Show the dashboard"),
        Binding("f3", "view('chat')", "Chat", show=False, priority=True,
                tooltip="Show the chat"),
        Binding("f5", "hurry", "Reconnect", show=False, priority=True,
                tooltip="Try the engine now instead of at the end of the countdown"),
        Binding("f9", "light", "Light/dark", show=False, priority=True,
                tooltip="Light or dark; the command palette has more themes"),
        Binding("ctrl+p", "command_palette", "Commands", show=False, priority=True,
                tooltip="All commands by name (command palette)"),
        Binding("ctrl+q", "quit", "Quit", priority=True, tooltip="Leave the console; the engine "
                "and requests of others go on"),
    ]

    def __init__(self, client, replay=None, record=None, engine=None):
        super().__init__()
        self.client, self.replay, self.record = client, replay, record
        self.engine = engine                # tui.starter.Started, where this console started it
        self.state, self.history = {}, History()
        self.up = None                      # whether the engine answers, None before it is known
        self._told = set()                  # faults of the tree that have been noted
        self._hurry = asyncio.Event()
        self._status = "ok"
        self.bar = Bar(client.url if client else "a recording", replay=client is None)
        self.banner, self.dashboard = Banner(), Dashboard(id="dashboard")

    def compose(self):
        yield self.bar
        yield self.banner
        with ContentSwitcher(initial="dashboard", id="views"):
            yield self.dashboard
            yield (Chat(id="chat") if self.client else
                   Static("A recording has no engine to talk to.", id="chat"))
        yield Footer()

    def on_mount(self):
        self.theme = settings.theme(self.available_themes)
        self.watch(self, "theme", self.keep_theme, init=False)
        self.watch_engine()
        if self.client:
            self.watch_health()
        if self.engine:
            self._watch = self.set_interval(0.5, self._watch_started)

    async def on_unmount(self):
        if self.client:
            await self.client.close()

    # --- from the engine ------------------------------------------------------------------------

    @work(group="link")
    async def watch_engine(self):
        """The loop of tui.link, as long as the app runs."""
        if self.client:
            await link.run(self.client, self.post_message, self._record, self._hurry)
        else:
            await link.replay(self.replay, self.post_message)

    def _record(self, kind, data):
        if self.record and not self.record.failed:
            self.record(kind, data)
            if self.record.failed:
                self.note("fault", self.record.failed)

    @work(group="link")
    async def watch_health(self):
        """Ask /health while the engine answers: its telemetry does not say that a rank is late."""
        while True:
            await asyncio.sleep(HEALTH)
            if not self.up:
                continue
            try:
                _, found = await self.client.health()
            except ClientError:
                continue                    # the link says so, and better
            self.post_message(Health(text(found, "status") or "?", text(found, "reason") or ""))

    @on(Telemetry)
    def _telemetry(self, message):
        self.state = message.state
        self.history.add(self.state, message.seconds)
        for line in faults(self.state):
            if line not in self._told:
                self._told.add(line)
                self.history.note("warning", line)
        self.banner.fault(text(self.state, "fault"))
        self.bar.engine(self.state)
        self._show()

    @on(Link)
    def _link(self, message):
        if message.up != self.up:
            self.note("fault" if self.client and not message.up else "info",
                      message.reason if not message.up else
                      "the engine answers" if self.client else "the recording begins")
        self.up = message.up
        self.banner.link(message.up, message.reason, message.retry_in)
        self.bar.link(message.up)
        self.dashboard.set_class(bool(self.client) and not message.up, "old")

    @on(Health)
    def _health(self, message):
        if message.status != self._status:
            self.note("info" if message.status == "ok" else "fault",
                      "the engine is well" if message.status == "ok"
                      else f"the engine is {message.status}: {message.reason}")
        self._status = message.status
        self.banner.health(message.status, message.reason)

    @on(Restarted)
    def _restarted(self, message):
        self.history.clear()
        self._told.clear()
        self.note("warning", "the engine was started again: its conversations and counts are new")

    def _watch_started(self):
        """Say so, once, when the engine that was started here has ended by itself."""
        if self.engine.code is not None:
            self._watch.stop()
            line = self.engine.ended()
            self.note("fault", line)
            self.notify(once.plain(line), title="the engine", severity="error", timeout=60,
                        markup=False)

    # --- from the views -------------------------------------------------------------------------

    @on(Note)
    def _note(self, message):
        self.note(message.level, message.text)

    def note(self, level, line):
        """A line of the console's own in the log."""
        self.history.note(level, once.plain(line))
        self._show()

    @on(CancelRequest)
    def _cancel(self, message):
        if self.client:
            self.cancel(message.id)
        else:
            self.notify("a recording has no requests to cancel", severity="warning")

    @work(group="cancel")
    async def cancel(self, number):
        """Ask the engine to end a request, and say what came of it."""
        try:
            ended = await self.client.cancel(number)
        except ClientError as e:
            self.notify(once.plain(e.message), title=f"request {number}", severity="error",
                        markup=False)
            self.note("fault", f"request {number} was not cancelled: {e.message}")
        else:
            self.note("info", f"request {number} was cancelled" if ended
                      else f"request {number} had ended already")

    def _show(self):
        if self.is_running and self.dashboard.is_attached:      # its panels close one by one
            self.dashboard.update(self.state, self.history)
