"""The form of a conversation's system prompt, sampling settings and tools."""

import json

from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static, TextArea

from tui.chat.checks import Damaged
from tui.chat.conversation import EFFORTS, Settings
from tui.chat.text import printable

# name, label, what it means and its range
FIELDS = (
    ("temperature", "Temperature", "0 to 2; 0 takes the likeliest token each time"),
    ("top_p", "Top p", "0 to 1; share of probability that tokens are drawn from"),
    ("seed", "Seed", "a whole number; the same seed gives the same reply"),
    ("max_tokens", "Max tokens", "tokens of a reply, reasoning included"),
)


class SettingsForm(ModalScreen):
    """Gives (Settings, system prompt), or None."""

    DEFAULT_CSS = """
    SettingsForm { align: center middle; }
    SettingsForm > VerticalScroll { width: 78; max-width: 98%; height: auto; max-height: 96%;
                                    border: round $accent; background: $surface; padding: 0 1; }
    SettingsForm Horizontal { height: auto; }
    SettingsForm Label { width: 13; }
    SettingsForm .help { width: 1fr; color: $text-muted; padding: 0 0 0 1; }
    SettingsForm Input { width: 16; }
    SettingsForm Select { width: 20; }
    SettingsForm TextArea { height: 4; }
    SettingsForm .fault { color: $text-error; height: auto; display: none; }
    SettingsForm Button { margin: 0 2 0 0; }
    """
    BINDINGS = [Binding("ctrl+s", "keep", "Keep", priority=True),
                Binding("escape", "leave", "Leave as it was")]

    def __init__(self, settings, system):
        super().__init__()
        self._settings, self._system = settings, system

    def compose(self):
        with VerticalScroll(can_focus=False) as box:
            box.border_title = "Settings of this conversation (empty: the engine's own)"
            yield Static("", markup=False, classes="fault")
            with Horizontal():
                yield Label("Effort")
                yield Select([(e, e) for e in EFFORTS], prompt="engine's own", id="effort",
                             value=self._settings.effort or Select.NULL, compact=True)
                yield Static("how long the model reasons before it answers", classes="help")
            for name, label, meaning in FIELDS:
                value = getattr(self._settings, name)
                with Horizontal():
                    yield Label(label)
                    yield Input("" if value is None else f"{value:.12g}" if type(value) is float
                                else str(value), id=name, compact=True)
                    yield Static(meaning, classes="help")
            yield Static("System prompt: what the model is told before everything else",
                         classes="help")
            yield TextArea(self._system, id="system", tab_behavior="focus")
            yield Static("Tools: a JSON array of OpenAI tool definitions, for the model to call",
                         classes="help")
            yield TextArea(json.dumps(list(self._settings.tools), indent=1, ensure_ascii=False)
                           if self._settings.tools else "", id="tools", tab_behavior="focus")
            with Horizontal():
                yield Button("Keep (Ctrl+S)", id="keep", variant="primary", compact=True)
                yield Button("Leave (Esc)", id="leave", compact=True)

    def on_button_pressed(self, event):
        event.stop()
        self.action_keep() if event.button.id == "keep" else self.action_leave()

    def on_input_submitted(self, event):
        event.stop()
        self.action_keep()

    def action_leave(self):
        self.dismiss(None)

    def action_keep(self):
        """Check everything; say what is wrong, or give it."""
        found = {name: _number(self.query_one(f"#{name}", Input).value) for name, *_ in FIELDS}
        effort = self.query_one("#effort", Select).value
        found["effort"] = None if effort is Select.NULL else effort
        try:
            found["tools"] = _json(self.query_one("#tools", TextArea).text)
            settings = Settings.from_json(found)
        except Damaged as e:
            line = self.query_one(".fault", Static)
            line.display = True
            line.update(f"✗ {printable(str(e))}")
            line.scroll_visible()
            return
        self.dismiss((settings, self.query_one("#system", TextArea).text))


def _number(text):
    """What was typed as JSON has it: None, a number, or the text for `Settings` to refuse."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text) if text else None
        except ValueError:
            continue
    return text


def _json(text):
    try:
        return json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as e:
        raise Damaged(f"tools are not JSON: {e}") from None
