"""What becomes of the message that is written: a question, or a tool's result; a part of
tui.chat.chat.Chat."""

from tui.chat.composer import Composer
from tui.chat.message import Message
from tui.chat.transcript import Transcript


class Sending:
    """Uses the members of Chat."""

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
