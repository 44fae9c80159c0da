"""What a conversation's JSON may hold: each function returns its value, or `Damaged` names it."""

import json

from tui.chat.text import sendable

MOST = 1e15         # of a figure


class Damaged(ValueError):
    """A file or a value that is no conversation: what is wrong, and where."""


def expect(value, kind, at):
    if not isinstance(value, kind):
        raise Damaged(f"{at} is {show(value)}, it must be "
                      + {dict: "an object", list: "an array"}[kind])
    return value


def text(value, at):
    if not isinstance(value, str):
        raise Damaged(f"{at} is {show(value)}, it must be a string")
    return sendable(value)


def choice(value, choices, at, needed=False):
    if value not in choices if isinstance(value, str) else needed or value is not None:
        raise Damaged(f"{at} is {show(value)}, it must be one of {', '.join(choices)}")
    return value


def number(value, low, high, at):
    if value is None:
        return None
    if type(value) not in (int, float) or not low <= value <= high:     # NaN is in no range
        raise Damaged(f"{at} is {show(value)}, it must be a number from {low:g} to {high:g}")
    return float(value)


def whole(value, low, high, at):
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise Damaged(f"{at} is {show(value)}, it must be a whole number from {low} to {high}")
    return value


def tools(value):
    """Tool definitions as a request takes them; Damaged otherwise."""
    expect(value, list, "tools")
    for i, tool in enumerate(value):
        function = expect(expect(tool, dict, f"tools[{i}]").get("function"), dict,
                          f"tools[{i}].function")
        if not text(function.get("name"), f"tools[{i}].function.name"):
            raise Damaged(f"tools[{i}].function.name is empty")
    try:
        return tuple(json.loads(sendable(json.dumps(value, ensure_ascii=False, allow_nan=False))))
    except ValueError as e:
        raise Damaged(f"tools: {e}") from None


def part_of(part, at):
    found = {"type": "text", "text": text(expect(part, dict, at).get("text"), f"{at}.text")}
    if "name" in part:
        found["name"] = text(part["name"], f"{at}.name")
    return found


def call_of(call, at):
    function = expect(expect(call, dict, at).get("function"), dict, f"{at}.function")
    return {"id": text(call.get("id", ""), f"{at}.id"), "type": "function", "function": {
        "name": text(function.get("name"), f"{at}.function.name"),
        "arguments": text(function.get("arguments", ""), f"{at}.function.arguments")}}


def figures(value):
    """Those figures that are what they must be; a reply is not lost for a wrong one."""
    kinds = {"reason": str, "error": str, "prompt": int, "tokens": int, "cached": int,
             "reasoning": int, "pieces": int, "seconds": float, "first": float, "rate": float}
    return {name: sendable(value[name]) if kind is str else value[name]
            for name, kind in kinds.items()
            if type(value.get(name)) in ((int, float) if kind is float else (kind,))
            and (kind is str or 0 <= value[name] < MOST)}


def complete(call):
    """Whether a call's arguments came to their end: an engine takes only a JSON object."""
    try:
        return isinstance(json.loads(call["function"]["arguments"] or "{}",
                                     parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name):
    raise ValueError(f"{name} is no JSON")


def show(value):
    text = "missing" if value is None else ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
