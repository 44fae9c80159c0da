"""What the list of conversations does: open, load, delete, rename; a part of tui.chat.chat.Chat."""

import asyncio
import os

from textual import work

from tui.chat.ask import Ask, Confirm
from tui.chat.composer import Composer
from tui.chat.conversation import UNTITLED, Conversation
from tui.chat.sidebar import Sidebar
from tui.chat.store import reason
from tui.chat.text import one_line


class Listed:
    """Uses the members of Chat."""

    async def on_sidebar_asked(self, event):
        event.stop()
        if event.what == "open":
            await self.open(event.id)
            if self.size.width < self.query_one(Sidebar).size.width + 80:
                self._listed = None
            self._refresh()
            self.query_one(Composer).focus()
        elif event.what == "load":
            self._load()
        elif event.id is not None:
            self._delete(event.id) if event.what == "delete" else self._rename(event.id)

    @work(group="forms", exclusive=True)
    async def _load(self):
        path = await self.app.push_screen_wait(Ask(
            "Load a conversation", "The path of a JSON file that was saved here. Right completes "
            "it. It becomes a conversation of its own; the file stays as it is.", path=True,
            check=self._no_conversation))
        if path:
            try:
                found = await asyncio.to_thread(self.store.take, os.path.expanduser(path))
            except (OSError, ValueError) as e:
                self.fault(f"{path}: {reason(e)}")
                return
            await self.show(found)
            self.keep(found)
            self.query_one(Composer).focus()

    def _no_conversation(self, path):
        try:
            self.store.take(os.path.expanduser(path))
        except (OSError, ValueError) as e:
            return reason(e)
        return ""

    @work(group="forms", exclusive=True)
    async def _delete(self, name):
        title = next(e.title for e in self._entries if e.id == name)
        if not await self.app.push_screen_wait(
                Confirm(f"Delete \u201c{one_line(title, 60)}\u201d and its file?")):
            return
        run = self._run_of(name)
        if run:
            self.runs.remove(run)
            run.worker.cancel()
        try:
            self.store.delete(name)
        except OSError as e:
            self.fault(f"the file stays: {reason(e)}")
        self._entries = [e for e in self._entries if e.id != name]
        if self.current.id == name:
            await self.show(Conversation.new(self.current.settings, self.current.system))
        self._refresh()

    @work(group="forms", exclusive=True)
    async def _rename(self, name):
        title = next(e.title for e in self._entries if e.id == name)
        new = await self.app.push_screen_wait(Ask("Rename", "The conversation's title", title))
        if not new:
            return
        run = self._run_of(name)
        try:
            found = (self.current if self.current.id == name else
                     run.conversation if run else self.store.load(name))
        except (OSError, ValueError) as e:
            self.fault(f"{name}: {reason(e)}")
            return
        found.title = one_line(new, 80) or UNTITLED
        self.keep(found)
