"""Text from a model, a file or a clipboard: made safe to show, measured, cut short."""

import re

# What a terminal would obey instead of show (C0 but tab and newline, DEL, C1), and characters that
# str.splitlines takes for line ends but Markdown does not.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_LONE = re.compile("[\ud800-\udfff]")
_TICKS = re.compile("`{3,}")


def printable(text):
    """text without what a terminal obeys: control characters as their pictures, no half pairs."""
    return _LONE.sub("\ufffd", _CONTROL.sub(_picture, text))


def _picture(match):
    code = ord(match[0])
    if code == 0x0d:
        return ""
    if code in (0x85, 0x2028, 0x2029):
        return "\n"
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7f else "\ufffd"


def sendable(text):
    """text that has a UTF-8 form: lone surrogates replaced."""
    return _LONE.sub("\ufffd", text)


def one_line(text, most):
    """The first words of a text on one line of at most `most` characters."""
    words = " ".join(printable(text[:4 * most + 200]).split())
    return words if len(words) <= most else words[:most - 1].rstrip() + "…"


def cut(text, characters, lines):
    """(beginning of text within both limits, characters left out)."""
    shown = "\n".join(text[:characters].split("\n", lines)[:lines])
    return shown, len(text) - len(shown)


def fence(text):
    """Backticks that begin and end a code block around text: more than any run in it."""
    return "`" * (1 + max((len(run) for run in _TICKS.findall(text)), default=2))


def count(number, word, words=None):
    """1,234 tokens; 1 token."""
    return f"{number:,} {word if number == 1 else words or word + 's'}"
