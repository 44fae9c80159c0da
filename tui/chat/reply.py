"""A reply: reasoning folded, the text as Markdown, tool calls, and what it took.

The widget follows a Message that grows: `pull` shows what is new in it. While reasoning is folded
only its length is shown, so it costs nothing.
"""

import asyncio

from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Static

from tui.chat.call import Call
from tui.chat.export import figures
from tui.chat.parts import Parts
from tui.chat.text import count, printable
from tui.units import span

INTERRUPTED = "its end was not kept: the console that asked ended before it, or still has it"


class Reply(Vertical, can_focus=True):
    """One reply. following: whether the reader is at the end of the conversation."""

    DEFAULT_CSS = """
    Reply { height: auto; margin: 1 0 0 0; padding: 0 1; border-left: thick $success; }
    Reply.-failed { border-left: thick $error; }
    Reply:focus { border-left: thick $accent; background: $boost; }
    Reply > .name { text-style: bold; color: $text-success; }
    Reply.-failed > .name { color: $text-error; }
    Reply > .figures { color: $text-muted; }
    Reply > .fault { color: $text-error; display: none; }
    Reply Collapsible { display: none; padding: 0; border-top: none; background: transparent; }
    Reply Collapsible.-there { display: block; }
    Reply Collapsible Contents { padding: 0 0 0 2; }
    Reply Collapsible Parts { color: $text-muted; }
    """
    BINDINGS = [Binding("c", "copy", "Copy reply"), Binding("f", "fold", "Fold reasoning"),
                Binding("end", "end", "To its end", show=False)]

    def __init__(self, message, following=lambda: True):
        super().__init__()
        self.message = message
        self._text = Parts(following, classes="text")
        self._thoughts = Parts(following)
        self._folded = Collapsible(self._thoughts, title="Reasoning")
        self._folded.tooltip = "What the model wrote before its answer; Enter unfolds it"
        self._name = Static("Reply", classes="name")
        self._calls = []
        self._one = asyncio.Lock()
        self._fault = Static("", classes="fault", markup=False)
        self._figures = Static("", classes="figures", markup=False)
        self._figures.tooltip = ("Why it ended; tokens of the reply, reasoning included; tokens a "
                                 "second after the first; time to the first token; the prompt's "
                                 "tokens and how many of them the engine still had")

    def compose(self):
        yield self._name
        yield self._folded
        yield self._text
        yield self._fault
        yield self._figures

    async def on_mount(self):
        await self.pull()

    async def pull(self, seconds=None):
        """Show what the message has now. seconds: since the request, while it is running."""
        async with self._one:           # it comes from several tasks
            await self._pull(seconds)

    async def _pull(self, seconds):
        m = self.message
        if m.reasoning_content:
            self._folded.add_class("-there")
            self._folded.title = f"Reasoning · {count(len(m.reasoning_content), 'character')}"
            if not self._folded.collapsed:
                await self._thoughts.show(m.reasoning_content)
        await self._text.show(m.content.lstrip("\n"))
        for call in self._calls:
            call.show()
        for call in m.tool_calls[len(self._calls):]:
            self._calls.append(Call(call))
            await self.mount(self._calls[-1], before=self._fault)
        if m.figures:
            self._end()
        elif seconds is not None:
            said = "waiting for the first token" if m.empty else "streaming"
            self._figures.update(Content.from_markup(
                "… $said · $time · [@click=app.simulate_key('escape')]esc stops[/]",
                said=said, time=span(seconds)))

    def _end(self):
        found = self.message.figures
        fault = {"failed": found.get("error") or "no reason is known",
                 "interrupted": INTERRUPTED}.get(found.get("reason"))
        self._name.update("Reply ✗" if fault else "Reply")
        self.set_class(bool(fault), "-failed")
        self._fault.display = bool(fault)
        if fault:
            self._fault.update(Content.from_markup(
                "✗ $fault\n[@click=app.simulate_key('ctrl+r')]ctrl+r retries[/]",
                fault=printable(fault)))
        self._figures.update(printable(figures(found)))

    async def end(self):
        """Show the end of the text."""
        await self._text.end()

    async def on_collapsible_expanded(self, event):
        event.stop()
        await self._thoughts.show(self.message.reasoning_content)

    def action_fold(self):
        self._folded.collapsed = not self._folded.collapsed

    async def action_end(self):
        await self.end()

    def action_copy(self):
        """The whole text, also what is not shown."""
        text = self.message.content
        self.app.copy_to_clipboard(text)
        self.app.notify(f"{count(len(text), 'character')} copied", title="Copied")
