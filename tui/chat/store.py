"""Conversations in files: one JSON file each, written whole or not at all, never over another's.

A file is replaced only where it is still what this console read or wrote; where another console has
changed it meanwhile, the conversation goes on under a new name. What cannot be read is named and
left as it is.
"""

import dataclasses
import json
import os
import pathlib
import secrets
import stat
import threading
from dataclasses import dataclass

from tui.chat.checks import Damaged
from tui.chat.conversation import Conversation

MOST = 256 << 20        # bytes of a conversation's file
SUFFIX = ".json"


def folder():
    """Where conversations are kept: $XDG_STATE_HOME/sparkgrid/conversations."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = pathlib.Path(home) if os.path.isabs(home) else pathlib.Path.home() / ".local" / "state"
    return base / "sparkgrid" / "conversations"


@dataclass(frozen=True)
class Entry:
    """A kept conversation, without its messages. changed: seconds since 1970."""

    id: str
    title: str
    changed: float
    turns: int


class Store:
    """The conversations in a folder. An error of the file system is an OSError."""

    def __init__(self, path=None):
        self.path = pathlib.Path(path) if path else folder()
        self._seen = {}         # id: what its file was when last read or written
        self._one = threading.Lock()    # of what writes: a growing reply is written by a thread

    def entries(self):
        """([Entry], newest first; [line for each file that is none]). Reads every file."""
        found, faults = [], []
        for path in sorted(self.path.glob("*" + SUFFIX)) if self.path.is_dir() else ():
            try:
                c, _ = read(path)
                found.append(Entry(c.id, c.title, c.changed, len(c.messages)))
            except (OSError, Damaged) as e:
                faults.append(f"{path.name}: {reason(e)}")
        return sorted(found, key=lambda e: -e.changed), faults

    def load(self, name):
        """The conversation with this id."""
        conversation, self._seen[name] = read(self._file(name))
        return conversation

    def save(self, conversation):
        """Write it; gives it a new id where the file under its own is not ours any more."""
        with self._one:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._ours(conversation.id):
                conversation.id = f"{conversation.id[:40]}-{secrets.token_hex(4)}"
            self._write(conversation)

    def save_part(self, conversation):
        """Write it as far as it is, over a file that is ours; `save`, at its reply's end, does what
        else there is to do."""
        with self._one:
            if conversation.id in self._seen and self._ours(conversation.id):
                self._write(conversation)

    def delete(self, name):
        """Remove the file of a conversation that was read or written here."""
        with self._one:
            if self._ours(name):
                self._file(name).unlink(missing_ok=True)
            self._seen.pop(name, None)

    def take(self, path):
        """A conversation from any file, under a new id, not yet kept."""
        conversation, _ = read(pathlib.Path(path))
        return dataclasses.replace(conversation, id=Conversation.new().id)

    def _write(self, conversation):
        self._seen[conversation.id] = write(self._file(conversation.id), text(conversation), 0o600)

    def _file(self, name):
        return self.path / (name + SUFFIX)

    def _ours(self, name):
        """Whether the file is as we know it; one that is gone is nobody's."""
        try:
            return _mark(os.stat(self._file(name))) == self._seen.get(name)
        except FileNotFoundError:
            return True


def text(conversation):
    """The JSON of a file."""
    return json.dumps(conversation.json(), ensure_ascii=False, indent=1) + "\n"


def read(path):
    """A file -> (Conversation, what the file was). Damaged or OSError where it cannot be read."""
    # a pipe under this name must not be waited for
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise Damaged("no regular file")
        if state.st_size > MOST:
            raise Damaged(f"{state.st_size:,} bytes, at most {MOST:,}")
        data = file.read(MOST + 1)
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise Damaged(f"not UTF-8 at byte {e.start:,}") from None
    except RecursionError:
        raise Damaged("nested too deeply") from None
    except ValueError as e:
        raise Damaged(f"not JSON: {e}") from None
    return Conversation.from_json(value, path.name.removesuffix(SUFFIX)), _mark(state)


def write(path, content, mode=0o666):
    """Replace a file by one with this text at once, or leave it as it was. Returns its mark."""
    path = pathlib.Path(path)
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(file, "w", encoding="utf-8", newline="") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            mark = _mark(os.fstat(out.fileno()))
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return mark


def reason(error):
    """The words of an OSError or Damaged."""
    return getattr(error, "strerror", None) or str(error)


def _mark(state):
    return state.st_ino, state.st_size, state.st_mtime_ns
