"""The messages of a conversation, one below the other; stays at the end unless scrolled away."""

from textual.containers import VerticalScroll
from textual.widgets import Static

from tui.chat.more import More
from tui.chat.question import Question
from tui.chat.reply import Reply
from tui.chat.text import count

SHOWN = 24      # messages that are there from the start, at most
STEP = 12       # and that the line above brings
TEXT = 12_000   # characters of them: a screen's worth; each widget makes every frame cost more

EMPTY = """No messages yet.

Write below; Enter sends, Ctrl+J or Alt+Enter makes a new line.
Ctrl+O has the system prompt, effort and sampling settings of this conversation.
Ctrl+F attaches a text file, a long paste becomes an attachment by itself.
Ctrl+T shows all conversations; they are kept in files and outlive this console."""


class Transcript(VerticalScroll, can_focus=False):
    """Call `open` with a conversation, and `sync` after its messages changed."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 0 1; }
    Transcript > .empty { color: $text-muted; margin: 1 2; }
    """

    def __init__(self, **options):
        super().__init__(**options)
        self._conversation, self._first, self._widgets = None, 0, []
        self.following = True       # whether the reader stays at the end
        self._above = More("earlier")
        self._empty = Static(EMPTY, markup=False, classes="empty")

    def compose(self):
        yield self._above
        yield self._empty

    def on_mount(self):
        self.anchor()

    # Textual says when the reader scrolls away from an anchored end, not whether he has.

    def anchor(self, anchor=True):
        self.following = anchor
        super().anchor(anchor)

    def release_anchor(self):
        self.following = False
        super().release_anchor()

    def watch_scroll_y(self, old, new):
        super().watch_scroll_y(old, new)
        if new >= self.max_scroll_y:
            self.following = True

    async def open(self, conversation):
        """Show a conversation's end."""
        self._conversation = conversation
        self.anchor()               # a reply is made at its end where that is followed
        with self.app.batch_update():
            for widget in self._widgets:
                await widget.remove()
            self._widgets = []
            self._first = _start(conversation.messages, len(conversation.messages))
            await self.sync()

    async def sync(self):
        """Make the widgets those of the messages: drop what is gone, add what is new."""
        messages = self._conversation.messages
        self._first = min(self._first, max(0, len(messages) - 1))
        wanted = messages[self._first:]
        same = 0
        for widget, message in zip(self._widgets, wanted):
            if widget.message is not message:
                break
            same += 1
        for widget in self._widgets[same:]:
            await widget.remove()
        new = [self._make(m) for m in wanted[same:]]
        if new:
            await self.mount_all(new)
        self._widgets = [*self._widgets[:same], *new]
        if self.following and self._first < _start(messages, len(messages), 2 * SHOWN, 2 * TEXT):
            first = _start(messages, len(messages))
            old = self._widgets[:first - self._first]
            self._first, self._widgets = first, self._widgets[len(old):]
            for widget in old:
                await widget.remove()
        self._say()

    def _make(self, message):
        if message.role == "assistant":
            return Reply(message, lambda: self.following)
        if message.role == "tool":
            name = next((c["function"]["name"] for m in self._conversation.messages
                         for c in m.tool_calls if c["id"] == message.tool_call_id), "a tool")
            return Question(message, f"Result of {name}")
        return Question(message)

    def _say(self):
        self._empty.display = not self._conversation.messages
        self._above.say(count(self._first, "message") if self._first else "")

    @property
    def last_reply(self):
        """The widget of the last reply, or None."""
        return next((w for w in reversed(self._widgets) if isinstance(w, Reply)), None)

    async def to_end(self):
        """Scroll to the end, and stay there."""
        if self._widgets and isinstance(self._widgets[-1], Reply):
            await self._widgets[-1].end()
        self.anchor()

    async def on_more_wanted(self, event):
        event.stop()
        messages = self._conversation.messages
        top, first = self._widgets[0], _start(messages, self._first, STEP)
        new = [self._make(m) for m in messages[first:self._first]]
        self._first, self._widgets = first, [*new, *self._widgets]
        await self.mount_all(new, after=self._above)
        self._say()
        self.call_after_refresh(top.scroll_visible, animate=False, top=True)


def _start(messages, end, most=SHOWN, text=TEXT):
    """Index of the first of those before `end` that are shown: two, and then at most `most` of
    about `text` characters."""
    first = end
    while first > 0 and (end - first < 2 or end - first < most and text > 0):
        first -= 1
        text -= len(messages[first].text)
    return first
