"""Replies on their way; a part of tui.chat.chat.Chat.

They stream in workers, several at once if need be; what these post comes back here and the open
conversation's last reply shows it. A conversation is written to its file when a question is asked,
while the reply grows, for a console may be killed, and at its end.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

from textual.worker import Worker

from tui.chat.conversation import Conversation
from tui.chat.message import Message
from tui.chat.stream import stream
from tui.chat.transcript import Transcript
from tui.messages import Note

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


class Replies:
    """Uses the members of Chat."""

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
