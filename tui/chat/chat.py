"""The chat: conversations, the one that is open, and what is shown of them.

What its keys do is in actions.py, its list in listed.py, the message in sending.py, and how replies
come in replies.py.
"""

import asyncio
import time

from textual.app import SystemCommand
from textual.binding import Binding
from textual.containers import Vertical
from textual.widget import Widget

from tui.chat.actions import Actions
from tui.chat.composer import Composer
from tui.chat.conversation import Conversation
from tui.chat.listed import Listed
from tui.chat.replies import TICK, Replies
from tui.chat.sending import Sending
from tui.chat.sidebar import Sidebar
from tui.chat.store import Entry, Store, reason
from tui.chat.text import printable
from tui.chat.transcript import Transcript
from tui.messages import Note

WIDE = 110              # columns from which the conversations are listed without being asked for


class Chat(Actions, Listed, Replies, Sending, Widget):
    """store: where conversations are kept, by default the user's. The app has a `client`."""

    DEFAULT_CSS = """
    Chat { height: 1fr; layout: horizontal; }
    Chat > Vertical { width: 1fr; height: 1fr; }
    """
    BINDINGS = [
        Binding("escape", "stop", "Stop", tooltip="Stop the reply; what it said stays"),
        Binding("ctrl+n", "new", "New", tooltip="A new conversation"),
        Binding("ctrl+r", "retry", "Retry", tooltip="Ask the last question again"),
        Binding("ctrl+o", "settings", "Settings",
                tooltip="System prompt, effort, sampling and tools of this conversation"),
        Binding("ctrl+t", "conversations", "List",
                tooltip="The conversations: open, rename, delete, load one from a file"),
        Binding("ctrl+f", "attach", "File", show=False, tooltip="Attach a text file"),
        Binding("ctrl+g", "edit", "Edit", show=False,
                tooltip="Put the last question back into the message (Up in an empty one, too)"),
        Binding("ctrl+s", "save", "Save", show=False,
                tooltip="Save as JSON, or export as Markdown"),
        Binding("f8", "fold", "Reasoning", show=False,
                tooltip="Unfold or fold the last reply's reasoning"),
    ]

    def __init__(self, store=None, **options):
        super().__init__(**options)
        self.store = store or Store()
        self.current = Conversation.new()
        self.runs = []
        self._entries = []          # of the store, newest first
        self._editing = self._as_self = False
        self._news = self._resting = False  # of the open reply; since its last picture
        self._listed = None         # whether the list is wanted; None: where there is room

    def compose(self):
        yield Sidebar()
        with Vertical():
            yield Transcript()
            yield Composer()

    async def on_mount(self):
        self.set_interval(TICK, self._tick)
        await self.show(self.current)
        await self._read_store()

    async def _read_store(self):
        try:
            self._entries, faults = await asyncio.to_thread(self.store.entries)
        except OSError as e:
            self.fault(f"conversations cannot be read: {reason(e)}: {self.store.path}")
            return
        for line in faults:
            self.post_message(Note("warning", f"no conversation, left as it is: {line}"))
        if faults:
            self.tell(f"{faults[0]}" + f" (and {len(faults) - 1} more)" * (len(faults) > 1),
                      "Not a conversation, left as it is", "warning")
        if self._entries and not self.current.messages:
            await self.open(self._entries[0].id)
        self._refresh()

    def on_show(self):
        self.call_after_refresh(self.query_one(Composer).focus)

    def on_resize(self):
        self._refresh()

    def on_unmount(self):
        """The console ends: what has arrived is kept."""
        for run in list(self.runs):
            run.message.figures = run.message.figures or {"reason": "stopped"}
            run.message.growing = False
            self.keep(run.conversation)

    # --- conversations --------------------------------------------------------------------------

    async def open(self, name):
        """Show the conversation with this id."""
        found = next((r.conversation for r in self.runs if r.conversation.id == name), None)
        if found is None:
            try:
                found = await asyncio.to_thread(self.store.load, name)
            except (OSError, ValueError) as e:
                self.fault(f"{name} cannot be read: {reason(e)}")
                return
        await self.show(found)

    async def show(self, conversation):
        """Make a conversation the open one."""
        self.current, self._editing, self._as_self = conversation, False, False
        await self.query_one(Transcript).open(conversation)
        self._refresh()

    def keep(self, conversation):
        """Write a conversation's file; an error is told, and tried again with the next message."""
        conversation.changed = time.time()
        before = conversation.id
        try:
            self.store.save(conversation)
        except OSError as e:
            self.fault(f"the conversation is not saved: {reason(e)}: {self.store.path}")
            return
        if conversation.id != before:
            self.tell("another console has changed this conversation: it goes on as a new one",
                      "Saved beside it", "warning")
        self._entries = [e for e in self._entries if e.id != conversation.id]
        self._entries.insert(0, Entry(conversation.id, conversation.title, conversation.changed,
                                      len(conversation.messages)))
        self._refresh()

    # --- what is shown --------------------------------------------------------------------------

    def _refresh(self):
        """Bring the list, the message's title and the keys up to date."""
        if not self.is_mounted or not self.query(Sidebar):
            return
        sidebar, composer = self.query_one(Sidebar), self.query_one(Composer)
        sidebar.set_class(self.size.width >= WIDE if self._listed is None else self._listed,
                          "-there")
        sidebar.show(self._entries, self.current.id, {r.conversation.id for r in self.runs})
        call = self.call
        if self._editing:
            composer.mode("The last question again", "Esc leaves it as it was")
        elif call is not None:
            composer.mode(f"Result of {printable(call['function']['name'])[:40]}",
                          "Esc: write as yourself")
        else:
            composer.mode(printable(self.current.title))
        self.refresh_bindings()

    def tell(self, text, title="", severity="information"):
        """A passing note."""
        self.app.notify(printable(text), title=title, severity=severity, markup=False)

    def fault(self, text):
        """A note of what went wrong, in the log too."""
        self.tell(text, severity="error")
        self.post_message(Note("fault", text))

    def commands(self):
        """For the app's command palette."""
        for binding in self.BINDINGS:
            name = binding.action
            yield SystemCommand(f"Chat: {binding.tooltip}", f"Key: {binding.key}",
                                lambda name=name: self.run_worker(self.run_action(name)))
        yield SystemCommand("Chat: Copy the last reply", "All of it, as Markdown",
                            self.action_copy)
