"""A conversation as a Markdown file, for people: reasoning folded, tool calls as code."""

from tui.chat.text import count, fence
from tui.units import UNKNOWN, span

NAMES = {"user": "You", "assistant": "Reply", "tool": "Tool result"}


def markdown(conversation):
    """The text of the file."""
    parts = [f"# {conversation.title}"]
    if conversation.system.strip():
        parts += ["## System", conversation.system.strip()]
    for message in conversation.messages:
        parts.append(f"## {NAMES[message.role]}")
        if message.reasoning_content:
            parts += ["<details><summary>Reasoning</summary>", message.reasoning_content.strip(),
                      "</details>"]
        if message.text:
            parts.append(_code(message.text) if message.role == "tool" else message.text.strip())
        for call in message.tool_calls:
            function = call["function"]
            parts += [f"Calls `{function['name']}`:", _code(function["arguments"], "json")]
        if message.figures:
            parts.append(f"*{figures(message.figures)}*")
    return "\n\n".join(parts) + "\n"


def _code(text, language=""):
    ticks = fence(text)
    return f"{ticks}{language}\n{text}\n{ticks}"


REASONS = {"stop": "complete", "length": "cut at its largest number of tokens",
           "tool_calls": "waits for tool results", "stopped": "stopped by you",
           "failed": "failed", "cancelled": "cancelled at the engine",
           "interrupted": "interrupted"}


def figures(found):
    """What a reply took, in one line: every number with its unit."""
    reason = found.get("reason", "")
    parts = [REASONS.get(reason, reason)]
    if "tokens" in found:
        parts.append(count(found["tokens"], "token"))
        if found.get("reasoning"):
            parts[-1] += f" ({found['reasoning']:,} reasoning)"
    elif found.get("pieces"):
        parts.append(f"about {count(found['pieces'], 'token')}")
    if "rate" in found:
        parts.append(f"{found['rate']:.1f} tokens/s")
    if "first" in found:
        parts.append(f"first token {found['first']:.2f} s")
    if "seconds" in found:
        parts.append(f"in all {span(found['seconds'])}")
    if "prompt" in found:
        cached = found.get("cached")
        parts.append(f"prompt {count(found['prompt'], 'token')}, "
                     f"{UNKNOWN if cached is None else f'{cached:,}'} of them cached")
    return " · ".join(part for part in parts if part)
