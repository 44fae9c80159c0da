"""What the console's keys do, and its command palette; a part of tui.app.Console."""

from textual.app import SystemCommand
from textual.widgets import ContentSwitcher

from tui import once, settings
from tui.chat.chat import Chat
from tui.help import Help
from tui.leave import LEAVE, Leave, others


class Actions:
    """Uses the members of Console."""

    def action_view(self, name):
        """Show a view and give it the focus."""
        self.query_one(ContentSwitcher).current = name
        self.bar.shown = name
        view = self.query_one(f"#{name}")
        first = next((w for w in self.screen_stack[0].focus_chain if view in w.ancestors), None)
        if first and view not in (self.focused.ancestors if self.focused else ()):
            first.focus()
        self._show()

    def action_help(self):
        """The help screen, or away with it."""
        if isinstance(self.screen, Help):
            self.pop_screen()
        else:
            self.push_screen(Help())

    def action_hurry(self):
        """End the countdown."""
        self._hurry.set()

    async def action_quit(self):
        """End; where the engine was started here and others use it, ask what becomes of it."""
        alive = self.engine is not None and self.engine.code is None and self.up
        users = others(self.state) if alive else ""
        if not users:
            return self.exit()
        self.push_screen(Leave(users), self._left)

    def _left(self, choice):
        if choice is not None:
            self.engine.left = choice == LEAVE
            self.exit()

    def action_light(self):
        """The light theme, or the dark one."""
        self.theme = settings.LIGHT if self.current_theme.dark else settings.DARK

    def keep_theme(self, name):
        """Remember it for the next start, however it was chosen."""
        try:
            settings.keep_theme(name)
        except OSError as e:
            self.note("warning", f"the theme is not remembered: {e.strerror}: {settings.path()}")

    def action_copy_state(self):
        """The snapshot as text, to the clipboard."""
        self.copy_to_clipboard(once.report(self.state, self.client.url if self.client else "-"))
        self.notify("copied")

    def get_key_display(self, binding):
        """F1 as it is written on the key."""
        shown = super().get_key_display(binding)
        return shown.upper() if shown.startswith("f") and shown[1:].isdigit() else shown

    def get_system_commands(self, screen):
        """The command palette: what has a key, and some that have none."""
        yield from super().get_system_commands(screen)
        yield SystemCommand("Dashboard", "Show the dashboard (F2)",
                            lambda: self.action_view("dashboard"))
        yield SystemCommand("Chat", "Show the chat (F3)", lambda: self.action_view("chat"))
        yield SystemCommand("Help", "All keys, signs and words (F1)", self.action_help)
        yield SystemCommand("Light or dark", "Change between the two (F9)", self.action_light)
        yield SystemCommand("Reconnect", "Try the engine now (F5)", self.action_hurry)
        yield SystemCommand("Copy snapshot", "The engine's state as text, as --once prints it",
                            self.action_copy_state)
        for chat in self.screen_stack[0].query(Chat):
            yield from chat.commands()
