"""Screens that are stored, as text or as SVG: compared with what is shown, or written anew."""

import os

WRITE = "SPARKGRID_WRITE_SCREENS"       # in the environment: write all that is compared
HOW = f"{WRITE}=1 in the environment writes it anew: then read the difference"


def differs(path, shown):
    """What to say where a file is not this text, "" where it is; its folder is there."""
    if os.environ.get(WRITE):
        path.write_text(shown, encoding="utf-8")
    same = path.exists() and path.read_text(encoding="utf-8") == shown
    return "" if same else f"{path.name} has changed; {HOW}"
