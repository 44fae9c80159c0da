"""What the console remembers of itself: {"theme": name} in $XDG_STATE_HOME/sparkgrid/console.json.

A file that cannot be read, or is something else, counts as none: the next choice replaces it.
"""

import json

from tui.chat import store

DARK, LIGHT = "textual-dark", "textual-light"
MOST = 1 << 16          # bytes of the file that are read


def path():
    """Of the file."""
    return store.folder().with_name("console.json")


def theme(names):
    """The theme that was chosen last, where it is one of these names; else the dark one."""
    try:
        if not path().is_file():        # a pipe under this name must not be waited for
            return DARK
        with open(path(), "rb") as file:
            found = json.loads(file.read(MOST))
    except (OSError, ValueError, RecursionError):
        return DARK
    name = found.get("theme") if isinstance(found, dict) else None
    return name if isinstance(name, str) and name in names else DARK


def keep_theme(name):
    """Remember it; an OSError where that is not possible."""
    path().parent.mkdir(parents=True, exist_ok=True)
    store.write(path(), json.dumps({"theme": name}) + "\n")
