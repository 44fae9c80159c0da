"""The engine that this console has started: its process, its messages, its end.

`python -m tui --start COMMAND...` runs the command in a session of its own, so that keys pressed
here do not reach it, with its output in a file. It ends with the console, unless the user leaves it
running.
"""

import contextlib
import os
import signal
import subprocess

from tui.chat import store

STOP_SECONDS = 25       # an engine drains for 10 s and ends within 10 more
TAIL = 6                # lines of its output that are shown when it ends by itself
BYTES = 4096


class Started:
    """A running command. path: the file that takes its output."""

    def __init__(self, command):
        folder = store.folder().parent
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "engine.log"
        self.left = False       # it goes on when the console ends
        with open(self.path, "wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def code(self):
        """Its exit code, None while it runs."""
        return self._process.poll()

    def ended(self):
        """What to tell the user of an engine that has ended by itself."""
        code = self.code
        how = f"with code {code}" if code >= 0 else f"by signal {-code}"
        return f"the engine ended {how}: {self.tail() or 'it said nothing'} ({self.path})"

    def tail(self):
        """The last lines of its output, in one."""
        with open(self.path, "rb") as log:
            log.seek(max(0, os.path.getsize(self.path) - BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return " / ".join([line.strip() for line in lines if line.strip()][-TAIL:])

    def stop(self):
        """Let it finish what it says and end; its exit code. Blocks for STOP_SECONDS at most."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):   # nothing of it is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return self.code
