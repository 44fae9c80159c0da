"""README's picture of the console: a recording of six ranks, replayed to where it is busiest.

    python bench/picture.py [--at SECONDS] [RECORDING] [SVG]

Draws the dashboard at 120x40 without a terminal, in the theme of a new user. By default
tests/tui/six_ranks.jsonl and docs/console.svg.
"""

import argparse
import asyncio
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tui import record  # noqa: E402
from tui.app import Console  # noqa: E402

SIZE = 120, 40          # columns, lines
STEP = 0.02             # seconds for each tree, in place of the quarter second it took


async def picture(events, path):
    """Show the events one after the other and save what the screen is like then."""
    shown = [(i * STEP, kind, data) for i, (_, kind, data) in enumerate(events)]
    shown.append((1e6, "patch", {}))        # it has not ended
    app = Console(None, replay=shown)
    app.animation_level = "none"
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(STEP * len(events) + 1.5)
        app.save_screenshot(path.name, str(path.parent))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", nargs="?", default=ROOT / "tests/tui/six_ranks.jsonl")
    parser.add_argument("svg", nargs="?", default=ROOT / "docs/console.svg", type=pathlib.Path)
    parser.add_argument("--at", type=float, default=27.6,
                        help="seconds of the recording to show (default: %(default)s)")
    args = parser.parse_args()
    events = [event for event in record.read(args.recording) if event[0] <= args.at]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder       # not the theme that was chosen here
        asyncio.run(picture(events, args.svg.resolve()))
    print(f"{args.svg}: {args.svg.stat().st_size:,} bytes, {len(events)} trees")


if __name__ == "__main__":
    main()
