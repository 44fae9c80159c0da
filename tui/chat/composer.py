"""Where a message is written: Enter sends it, files and long pastes come along as attachments.

A paste of more than PASTE characters does not go into the text, where nobody could edit it and each
key would cost more, but beside it; it is sent after the text.
"""

from dataclasses import dataclass

from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TextArea

from tui.chat.text import count, printable, sendable

PASTE = 4000            # characters, or
PASTE_LINES = 60        # lines that go into the text
MOST = 32 << 20         # characters of a message
PLACEHOLDER = "Ask the model; Enter sends"
HINT = " · ".join(f"[@click=press('{key}')]{words}[/]" for key, words in (
    ("ctrl+j", "^J new line"), ("ctrl+f", "^F file"), ("ctrl+g", "^G edit last"),
    ("ctrl+s", "^S save"), ("f8", "F8 reasoning")))


class Entry(TextArea):
    """The text. What it asks of the composer are messages."""

    BINDINGS = [
        Binding("enter", "send", "Send", show=False, priority=True),
        Binding("ctrl+j,alt+enter,shift+enter", "newline", "New line", show=False, priority=True),
        Binding("pageup", "page(-1)", "Scroll the conversation up", show=False),
        Binding("pagedown", "page(1)", "Scroll the conversation down", show=False),
        Binding("ctrl+end", "to_end", "To the conversation's end, and stay there", show=False),
    ]

    class Entered(Message):
        """Enter."""

    class Recall(Message):
        """Up in an empty text."""

    @dataclass
    class Pasted(Message):
        """A paste that is too long for the text."""

        text: str

    @dataclass
    class Page(Message):
        """Scroll the conversation. by: pages down; 0: to its end."""

        by: int

    def __init__(self, **options):
        super().__init__("", soft_wrap=True, tab_behavior="focus", placeholder=PLACEHOLDER,
                         highlight_cursor_line=False, **options)

    def action_send(self):
        self.post_message(self.Entered())

    def action_newline(self):
        self.replace("\n", *self.selection, maintain_selection_offset=False)

    def action_cursor_up(self, select=False):
        if self.text:
            super().action_cursor_up(select)
        else:
            self.post_message(self.Recall())

    async def _on_paste(self, event):
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        event.stop()
        event.prevent_default()
        if len(text) > PASTE or text.count("\n") > PASTE_LINES:
            self.post_message(self.Pasted(sendable(text)))
        else:
            self.replace(sendable(printable(text)), *self.selection,
                         maintain_selection_offset=False)

    def action_page(self, by):
        self.post_message(self.Page(by))

    def action_to_end(self):
        self.post_message(self.Page(0))


class Composer(Vertical):
    """Text and attachments of the next message. files: [(name, text as sent)]."""

    DEFAULT_CSS = """
    Composer { height: auto; max-height: 50%; padding: 0 1; border: round $primary;
               border-subtitle-color: $text-muted; }
    Composer:focus-within { border: round $accent; }
    Composer > Entry { height: auto; min-height: 1; max-height: 10; border: none; padding: 0;
                       background: transparent; }
    Composer > Entry:focus { border: none; }
    Composer > Static { color: $text-warning; display: none; height: auto; max-height: 4; }
    """

    @dataclass
    class Sent(Message):
        """Send this."""

        text: str
        files: list

    def __init__(self, **options):
        super().__init__(**options)
        self.files = []
        self._entry = Entry()
        self._list = Static("", markup=False)
        self._list.tooltip = "Sent after the text; Backspace in an empty text takes the last away"

    def compose(self):
        yield self._list
        yield self._entry

    def on_mount(self):
        self.mode("")

    def mode(self, title, escape=""):
        """What a message would be, other than the next question. escape: what Esc does to that."""
        self.border_title = Content.from_markup(
            "$title ([@click=press('escape')]$escape[/])" if escape else "$title",
            title=title or "Message", escape=escape)
        self.border_subtitle = HINT

    def action_press(self, key):
        """As if the key was pressed in the text."""
        self.focus()
        # from the app: a key that the text's parent sends does not go on from the text
        self.app.call_later(self.app.simulate_key, key)

    @property
    def text(self):
        return self._entry.text

    @property
    def empty(self):
        """Whether there is nothing to send."""
        return not (self.text.strip() or self.files)

    def put(self, text, files=()):
        """Make this the message."""
        self._entry.load_text(text)
        self._entry.move_cursor(self._entry.document.end)
        self.files = list(files)
        self._say()

    def attach(self, name, text):
        """Add an attachment; False where the message would be too long."""
        if sum(len(t) for _, t in self.files) + len(text) > MOST:
            self.app.notify(f"a message has at most {count(MOST, 'character')}", severity="error")
            return False
        self.files.append((name, text))
        self._say()
        return True

    def focus(self, scroll_visible=True):
        """The text has the focus."""
        self._entry.focus(scroll_visible)
        return self

    def _say(self):
        self._list.display = bool(self.files)
        self._list.update("\n".join(
            f"+ {printable(name)}: {count(len(text), 'character')}" for name, text in self.files)
            + "  (Backspace in an empty text takes it away)")

    def on_entry_pasted(self, event):
        event.stop()
        self.attach(f"paste {1 + len(self.files)}", "\n\n" + event.text)

    def on_entry_entered(self, event):
        event.stop()
        if not self.empty:
            self.post_message(self.Sent(self.text, self.files))

    def on_key(self, event):
        if event.key == "backspace" and not self.text and self.files:
            event.stop()
            self.files.pop()
            self._say()
