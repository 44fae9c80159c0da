"""`python -m tui`: the console of an engine that runs here or elsewhere.

Exit code 1: --once got no answer. 2: the command line, or a file or an engine's command that cannot
be used. 128 + N: signal N ended the console.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys

from tui.answer import ClientError
from tui.app import Console
from tui.client import URL, Client
from tui.ending import Ending
from tui.link import run
from tui.messages import Link
from tui.once import report
from tui.record import Recorder, RecordError, read
from tui.starter import Started

KEY = "SPARKGRID_API_KEY"


def parse(argv):
    """The command line -> argparse.Namespace."""
    parser = argparse.ArgumentParser(
        prog="python -m tui", description="Watch a running engine, and talk to it.",
        epilog="F1 in the console lists all keys.")
    parser.add_argument("--connect", metavar="URL", default=URL,
                        help=f"the engine's address (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get(KEY),
                        help=f"its API key (default: {KEY} of the environment)")
    parser.add_argument("--once", action="store_true",
                        help="print one snapshot as text and end; exit code 1 without an answer")
    parser.add_argument("--record", metavar="FILE",
                        help="write what the engine reports to a new file; without a terminal: "
                             "record until interrupted")
    parser.add_argument("--replay", metavar="FILE",
                        help="show a recording instead of an engine")
    parser.add_argument("--start", metavar="COMMAND", nargs=argparse.REMAINDER,
                        help="start the engine by this command first, and end it with the console")
    found = parser.parse_args(argv)
    if found.replay and (found.record or found.once):
        parser.error("--replay goes with neither --record nor --once")
    if found.once and found.record:
        parser.error("--once and --record exclude each other")
    if found.start == []:
        parser.error("--start needs the command that starts the engine after it")
    if found.start and (found.replay or found.once or found.record):
        parser.error("--start goes with neither --once, --record nor --replay")
    return found


def main(argv=None):
    """The command; returns the exit code."""
    args = parse(argv)
    try:
        if args.replay:
            return _show(Console(None, read(args.replay)))
        client = Client(args.connect, args.api_key)
        if args.once:
            return asyncio.run(_once(client))
        if args.start is not None:
            return _start(client, args.start)
        if not args.record:
            return _show(Console(client))
        with Recorder(args.record) as recorder:
            if not _terminal():
                return asyncio.run(_record(client, recorder))
            code = _show(Console(client, record=recorder))
        if recorder.failed:
            return _say(recorder.failed, 2)
        return code
    except (ClientError, RecordError) as e:
        return _say(e, 2)


def _start(client, command):
    """The console over an engine of its own."""
    if not _terminal():
        return _say("--start needs a terminal", 2)
    with Ending() as ending:
        try:
            engine = Started(command)
        except OSError as e:
            return _say(f"the engine is not started: {e.filename}: {e.strerror}", 2)
        try:
            code = ending.run(Console(client, engine=engine))
        finally:
            if not engine.left:
                if ending.code is None:     # else nobody may be there to read it
                    _stopping()
                engine.stop()
        return ending.code or code


def _stopping():
    with contextlib.suppress(OSError):      # a terminal that is gone must not keep the engine
        print("stopping the engine ...", flush=True)


def _show(app):
    if not _terminal():
        return _say("the console needs a terminal; --once prints a snapshot, --record FILE records "
                    "without one", 2)
    with Ending() as ending:
        return ending.run(app)


def _terminal():
    return sys.stdin.isatty() and sys.stdout.isatty()


async def _once(client):
    try:
        print(report(await client.once(), client.url))
    except ClientError as e:
        return _say(e, 1)
    finally:
        await client.close()
    return 0


async def _record(client, recorder):
    """Record until a signal asks to end, or the file cannot be written."""
    def post(message):
        if isinstance(message, Link) and (message.up or message.retry_in):
            _say("the engine answers" if message.up else message.reason)

    def record(kind, data):
        recorder(kind, data)
        if recorder.failed:
            work.cancel()
    work = asyncio.ensure_future(run(client, post, record))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    await client.close()
    return _say(recorder.failed, 2) if recorder.failed else 0


def _say(line, code=0):
    print(f"tui: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
