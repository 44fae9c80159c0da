"""How many tokens a new conversation could have now: integer arithmetic on the tree's counts.

Striped, page k of a conversation is of class k mod W, and the first R pages are in the region that
every rank has; with an owner all pages are of one class. `windows_free` counts what is free or
kept: kept conversations make room.
"""

from tui.state import number, rows, text


def class_windows(state):
    """{class: tokens of the largest new conversation that this class has room for}."""
    page_rows = number(state, "pool", "page_rows")
    if not page_rows:
        return {}
    classes, context = rows(state, "classes"), number(state, "context")
    found = {}
    for i, row in enumerate(classes):
        c, free = number(row, "class"), number(row, "windows_free")
        if c is None or free is None:
            continue
        pages = free
        if text(state, "placement") == "striped":
            first = (number(state, "replicate") or 0) // page_rows
            own = max(0, (first - i + len(classes) - 1) // len(classes))
            pages = (free + own) * len(classes) + i
        tokens = pages * page_rows
        found[c] = tokens if context is None else min(tokens, context)
    return found


def largest_window(state):
    """Tokens of the largest new conversation that fits, None where the tree does not say."""
    windows = class_windows(state).values()
    if not windows:
        return None
    if text(state, "placement") != "striped":
        return max(windows)
    page_rows = number(state, "pool", "page_rows")
    first = (number(state, "replicate") or 0) // page_rows
    room = sum(number(state, "pool", "replicated", k) or 0 for k in ("free", "kept"))
    return min(*windows, room * page_rows) if room < first else min(windows)
