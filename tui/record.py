"""Recordings of telemetry: JSON lines {"t": seconds, "event": "snapshot" | "patch", "data": ...}.

`t` counts from the first line. A line is a whole event and written at once, so a recording that
was cut off is good up to its last line.
"""

import contextlib
import json
import time


class RecordError(Exception):
    """A file that cannot be written or replayed. The message: which, and why."""


class Recorder:
    """`with Recorder(path) as record: record(kind, data)`. Refuses a file that exists."""

    def __init__(self, path):
        try:
            self._file = open(path, "x", encoding="utf-8")
        except FileExistsError:
            raise RecordError(f"{path} exists; name another file, or remove it") from None
        except OSError as e:
            raise RecordError(f"{path} cannot be written: {e.strerror or e}") from None
        self._path, self._start, self.failed = path, None, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):      # what a full disk did not take: `failed` says so
            self._file.close()

    def __call__(self, kind, data):
        """Write an event; a full disk ends the recording (`failed` says why), not the console."""
        if self.failed:
            return
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        line = {"t": round(now - self._start, 3), "event": kind, "data": data}
        try:
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as e:
            self.failed = f"{self._path} cannot be written any more: {e.strerror or e}"


def read(path):
    """[(seconds, kind, data)] of a recording."""
    found = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                found.append(_event(line, f"{path}, line {number}"))
    except OSError as e:
        raise RecordError(f"{path} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is not a recording: not UTF-8") from None
    if not found or found[0][1] != "snapshot":
        raise RecordError(f"{path} is not a recording: no snapshot at its beginning")
    return found


def _event(line, where):
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError(f"{where}: not JSON") from None
    if not isinstance(value, dict):
        raise RecordError(f"{where}: not an object")
    at, kind, data = value.get("t"), value.get("event"), value.get("data")
    if (kind not in ("snapshot", "patch") or not isinstance(data, dict)
            or isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e9):
        raise RecordError(f'{where}: not {{"t": seconds, "event": "snapshot" or "patch", '
                          '"data": object}')
    return at, kind, data
