"""What the chat's keys do; a part of tui.chat.chat.Chat."""

import asyncio
import os
import pathlib
import re

from textual import work

from tui.chat.ask import Ask
from tui.chat.composer import Composer
from tui.chat.conversation import Conversation
from tui.chat.export import markdown
from tui.chat.message import file_part
from tui.chat.settings import SettingsForm
from tui.chat.sidebar import Sidebar
from tui.chat.store import reason, text, write
from tui.chat.text import count, sendable
from tui.chat.transcript import Transcript

MOST = 16 << 20         # bytes of a file that is attached


class Actions:
    """Uses the members of Chat."""

    def check_action(self, action, parameters):
        """Which keys the footer shows: those that would do something."""
        if action == "stop":
            return self.run is not None or self._editing or self.call is not None
        if action in ("retry", "edit"):
            return self.run is None and self.current.last_question() is not None
        return True

    async def action_stop(self):
        """Stop the reply, or give up what the message was to be instead of a question."""
        if self.run:
            self.run.worker.cancel()
        elif self._editing:
            self._editing = False
            self.query_one(Composer).put("")
        else:
            self._as_self = True
        self._refresh()

    async def action_new(self):
        if self.current.messages:
            await self.show(Conversation.new(self.current.settings, self.current.system))
        self.query_one(Composer).focus()

    async def action_retry(self):
        self.current.drop_answer()
        await self.answer()

    def action_edit(self):
        if not self.check_action("edit", ()) or self._editing:
            return
        composer = self.query_one(Composer)
        if not composer.empty:
            self.tell("the message is not empty: send or delete it first", severity="warning")
            return
        question = next((m for m in reversed(self.current.messages) if m.role == "user"), None)
        if question is not None:
            self._editing = True
            composer.put(question.typed, question.files)
            composer.focus()
            self._refresh()

    def action_fold(self):
        reply = self.query_one(Transcript).last_reply
        if reply:
            reply.action_fold()

    def action_copy(self):
        reply = self.query_one(Transcript).last_reply
        if reply:
            reply.action_copy()

    def action_conversations(self):
        """List them and go there; from there, away with the list."""
        sidebar = self.query_one(Sidebar)
        self._listed = not sidebar.has_focus
        self._refresh()
        (sidebar if self._listed else self.query_one(Composer)).focus()

    @work(group="forms", exclusive=True)
    async def action_settings(self):
        found = await self.app.push_screen_wait(
            SettingsForm(self.current.settings, self.current.system))
        if found:
            self.current.settings, self.current.system = found
            if self.current.messages:
                self.keep(self.current)

    @work(group="forms", exclusive=True)
    async def action_attach(self):
        path = await self.app.push_screen_wait(Ask(
            "Attach a text file", f"A path; UTF-8, at most {count(MOST, 'byte')}. Right completes "
            "it. The file is sent after the message.", path=True, check=lambda p: _file(p)[1]))
        if path:
            data, fault = await asyncio.to_thread(_file, path)
            if fault:                   # it went away meanwhile
                self.fault(fault)
            else:
                name = os.path.basename(path)
                self.query_one(Composer).attach(name, file_part(sendable(name), data))

    @work(group="forms", exclusive=True)
    async def action_save(self):
        name = re.sub(r"[^\w.-]+", "-", self.current.title).strip("-.")[:60] or "conversation"
        path = await self.app.push_screen_wait(Ask(
            "Save this conversation", "A path that is not there yet: NAME.md exports it as "
            "Markdown, NAME.json can be loaded again (in the list: l).", f"{name}.md", path=True,
            check=_new_file))
        if not path:
            return
        make = markdown if path.endswith(".md") else text
        try:
            write(os.path.expanduser(path), make(self.current))
        except OSError as e:
            self.fault(f"{path} is not written: {reason(e)}")
        else:
            self.tell(os.path.abspath(os.path.expanduser(path)), "Saved")


def _file(path):
    """(text of a file, ""), or ("", what is wrong with it)."""
    path = pathlib.Path(os.path.expanduser(path))
    try:
        if not path.is_file():
            return "", f"{path} is no file" if path.exists() else f"{path} is not there"
        if path.stat().st_size > MOST:
            return "", f"{path} has {path.stat().st_size:,} bytes, at most {MOST:,}"
        data = path.read_bytes()
    except (OSError, ValueError) as e:
        return "", f"{path}: {reason(e)}"
    try:
        found = data.decode("utf-8")
    except UnicodeDecodeError as e:
        return "", f"{path} is no UTF-8 text: byte {e.start:,}"
    return ("", f"{path} is no text: it has a zero byte") if "\0" in found else (found, "")


def _new_file(path):
    """What is wrong with a path to write to."""
    path = os.path.expanduser(path)
    if not path.endswith((".md", ".json")):
        return "a path ends in .md or .json"
    return f"{path} is there already" if os.path.lexists(path) else ""
