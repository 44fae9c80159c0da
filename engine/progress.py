"""One line of progress on the user's terminal, for whatever takes longer than a second.

    with Progress(visible).phase("loading weights", bytes_of=True) as p:
        p.update(done, total)

The line is drawn on rank 0's standard error, rewritten in place, and wiped when the phase ends, so
that nothing of it is left beside a reply. Without a terminal nothing is written at all.

Under mpirun a rank's standard input and outputs are pipes even on a terminal. `on_terminal`
therefore asks the launcher: its own file descriptors are the user's, and it forwards what rank 0
writes.
"""

import contextlib
import os
import stat
import sys
import threading
import time

PATIENCE = 1.0          # seconds before a line appears
REDRAW = 0.25           # seconds between two drawings
WIPE = "\x1b[K"         # from the cursor to the end of the line
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpiexec.gforke", "hydra_pmi_proxy", "orterun",
             "prterun", "prted", "orted")
ANCESTORS = 12          # shells between a launcher and a rank are few


def on_terminal(fd):
    """True where descriptor 0, 1 or 2 of this rank ends at a terminal, directly or by mpirun."""
    try:
        if os.isatty(fd):
            return True
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return False
        launcher = _launcher(os.getpid())
        return launcher is not None and _is_terminal(os.stat(f"/proc/{launcher}/fd/{fd}"))
    except OSError:
        return False


def _is_terminal(status):
    """A character device with a terminal's major number: 4 tty, 5 console, 136-143 pseudo."""
    return stat.S_ISCHR(status.st_mode) and (os.major(status.st_rdev) in (4, 5)
                                             or 136 <= os.major(status.st_rdev) <= 143)


def _launcher(pid):
    """The topmost launcher above process `pid` (mpirun itself, above its proxies), or None."""
    found = None
    for _ in range(ANCESTORS):
        with open(f"/proc/{pid}/stat") as f:
            line = f.read()     # pid (name, which may hold anything) state ppid ...
        name = line[line.index("(") + 1:line.rindex(")")]
        if name in LAUNCHERS or name[:15] in [n[:15] for n in LAUNCHERS]:
            found = pid
        elif found is not None:
            return found
        pid = int(line[line.rindex(")") + 2:].split()[1])
        if pid <= 1:
            return found
    return found


class Progress:
    """This process's progress line. visible: draw it (rank 0 on a terminal), else say nothing."""

    def __init__(self, visible, out=None):
        self.visible = visible
        self._out = out or sys.stderr

    @contextlib.contextmanager
    def phase(self, what, bytes_of=False):
        """Shows `what` from the second second on, until the block ends or `done` is called.

        bytes_of: what `update` is told are bytes, and shown with their rate.
        """
        line = _Line(what, bytes_of, self._out if self.visible else None)
        try:
            yield line
        finally:
            line.done()


class _Line:
    """One phase's line, drawn by its own thread: what it waits for may call nothing for minutes."""

    def __init__(self, what, bytes_of, out):
        self._what, self._bytes, self._out = what, bytes_of, out
        self._started = time.perf_counter()
        self._state = (0, 0)
        self._over = threading.Event()
        self._thread = None
        if out is not None:
            self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()

    def update(self, done, total):
        """done of total, in any one unit."""
        self._state = (done, total)

    def done(self):
        """Wipe the line; more calls do nothing."""
        if self._thread is not None and not self._over.is_set():
            self._over.set()
            self._thread.join()

    def _draw(self):
        if self._over.wait(PATIENCE):
            return
        while True:
            self._out.write("\r" + self._text() + WIPE)
            self._out.flush()
            if self._over.wait(REDRAW):
                break
        self._out.write("\r" + WIPE)
        self._out.flush()

    def _text(self):
        (done, total), passed = self._state, time.perf_counter() - self._started
        share = f" {100 * done // total} %" if total else ""
        if not self._bytes or not done or not total:
            return f"{self._what}{share}, {passed:.0f} s"
        return (f"{self._what} {done / 1e9:.1f} of {total / 1e9:.1f} GB,{share}, "
                f"{done / passed / 1e9:.1f} GB/s, {passed * (total - done) / done:.0f} s left")
