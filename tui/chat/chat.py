"""The chat: conversations, the one that is open, and the replies that are on their way.

Replies stream in workers, several at once if need be; what they post comes back here and the open
conversation's last reply shows it. A conversation is written to its file when a question is asked,
while the reply grows, for a console may be killed, and at its end.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

from textual.app import SystemCommand
from textual.binding import Binding
from textual.containers import Vertical
from textual.widget import Widget
from textual.worker import Worker

from tui.chat import actions
from tui.chat.composer import Composer
from tui.chat.conversation import Conversation, Message
from tui.chat.sidebar import Sidebar
from tui.chat.store import Entry, Store, reason
from tui.chat.stream import stream
from tui.chat.text import printable
from tui.chat.transcript import Transcript
from tui.messages import Note

WIDE = 110              # columns from which the conversations are listed without being asked for
REST = 2.0              # times a picture's CPU time that passes before the reply's next one
TICK = 0.5              # seconds between two looks at a reply that has said nothing
KEEP = 2.0              # seconds between two writes of a reply that grows


@dataclass
class Run:
    """A reply on its way. started: time.monotonic() of its request; kept: of its last write, inf
    during one."""

    conversation: Conversation
    message: Message
    started: float
    worker: Worker | None = None
    kept: float = 0.0


class Chat(actions.Actions, Widget):
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

    # --- replies --------------------------------------------------------------------------------

    async def answer(self):
        """Ask for the open conversation's next reply."""
        conversation, message = self.current, Message("assistant", growing=True)
        self.keep(conversation)
        run = Run(conversation, message, time.monotonic())
        conversation.messages.append(message)
        self.runs.append(run)
        run.worker = self.run_worker(
            stream(self.app.client, conversation, message, self.post_message), group="replies")
        await self.query_one(Transcript).sync()
        await self.query_one(Transcript).to_end()
        self._refresh()

    @property
    def run(self):
        """The open conversation's reply on its way, or None."""
        return self._run_of(self.current.id)

    def _run_of(self, name):
        return next((r for r in self.runs if r.conversation.id == name), None)

    async def on_reply_started(self, event):
        event.stop()

    async def on_reply_delta(self, event):
        event.stop()
        if event.conversation_id == self.current.id:
            self._news = True
            await self._draw()

    async def _draw(self):
        """Show what is new of the open reply, now or when the last picture's rest is over."""
        if self._news and not self._resting:
            self._news, used = False, time.process_time()
            if await self._pull(self.run):
                self._resting = True
                self.call_after_refresh(self._shown, used)

    def _shown(self, used):
        """The picture is there: the engine may share this processor, so a third of it is enough."""
        self.set_timer(REST * (time.process_time() - used), self._rested)

    async def _rested(self):
        self._resting = False
        await self._draw()

    async def on_reply_ended(self, event):
        event.stop()
        await self._ended(event.conversation_id)

    async def on_reply_failed(self, event):
        event.stop()
        self.post_message(Note("fault", f"a reply failed: {event.message}"))
        await self._ended(event.conversation_id)

    async def _ended(self, name):
        run = self._run_of(name)
        if run is None:             # of a conversation that was deleted
            return
        await self._pull(run)
        self.runs.remove(run)
        self._as_self = False
        self.keep(run.conversation)

    async def _pull(self, run):
        """Show what is new of a reply, where it is the open conversation's; whether it is."""
        reply = self.query_one(Transcript).last_reply
        if run and reply and reply.message is run.message:
            await reply.pull(time.monotonic() - run.started)
            return True
        return False

    async def _tick(self):
        if self.run:
            await self._pull(self.run)
        now = time.monotonic()
        for run in self.runs:
            if now - run.kept >= KEEP and run.message.growing and not run.message.empty:
                run.kept = float("inf")
                self.run_worker(self._keep_part(run), group="parts")

    async def _keep_part(self, run):
        with contextlib.suppress(OSError):      # the reply's end says so, if it is so still
            await asyncio.to_thread(self.store.save_part, run.conversation)
        run.kept = time.monotonic()

    # --- the message ----------------------------------------------------------------------------

    async def on_composer_sent(self, event):
        event.stop()
        if self.run:
            self.tell("the last reply is still on its way: Esc stops it", severity="warning")
            return
        conversation, composer = self.current, self.query_one(Composer)
        call = self.call
        if self._editing:
            conversation.drop_question()
            self._editing = False
        composer.put("")
        if call is not None:
            conversation.messages.append(Message(
                "tool", event.text + "".join(text for _, text in event.files),
                tool_call_id=call["id"]))
        else:
            conversation.ask(event.text, event.files)
        if self.call is not None:       # the next result
            await self.query_one(Transcript).sync()
            self.keep(conversation)
        else:
            await self.answer()

    @property
    def call(self):
        """The tool call that the message would be the result of, or None."""
        if self._editing or self._as_self or self.run:
            return None
        return next(iter(self.current.pending_calls()), None)

    async def on_entry_page(self, event):
        event.stop()
        transcript = self.query_one(Transcript)
        if event.by < 0:
            transcript.scroll_page_up(animate=False)
        elif event.by > 0:
            transcript.scroll_page_down(animate=False)
        else:
            await transcript.to_end()

    def on_entry_recall(self, event):
        event.stop()
        self.action_edit()

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
            composer.mode("The last question again (Esc leaves it as it was)")
        elif call is not None:
            composer.mode(f"Result of {printable(call['function']['name'])[:40]} "
                          "(Esc: write as yourself)")
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
