"""The console's end by a signal (SIGHUP: its terminal is closed): in order, and for certain.

What the app holds is saved as when it is left by a key. An app that cannot end (its pictures may
hang in a terminal that nobody reads) has GRACE seconds; then the engine that it has started is
stopped, and the process ends without it.
"""

import asyncio
import os
import signal
import threading

SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
TEXTUAL = signal.SIGTSTP, signal.SIGCONT    # its handlers outlive an app, and fail without one
GRACE = 5.0             # seconds that the app may take to end


class Ending:
    """`with Ending() as ending: ending.run(app)`: a signal ends the app instead of the process.

    code: 128 + the number of the first signal, None before one has come. One that comes while no
    app runs is only remembered.
    """

    def __init__(self):
        self.code = self._app = self._last = None

    def __enter__(self):
        self._before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, app):
        """Run a tui.app.Console, not at all where a signal has come before it: the exit code."""
        self._app = app
        try:
            if self.code is None:
                app.run()
        finally:
            self._app = None
            for number in TEXTUAL:
                signal.signal(number, signal.SIG_DFL)
            if self._last:
                self._last.cancel()
        return self.code or app.return_code or 0

    def _signalled(self, signum, frame):
        self.code, app = self.code or 128 + signum, self._app
        if app is None:
            return
        signal.signal(signal.SIGCONT, lambda *_: None)      # comes with SIGHUP
        if signum == signal.SIGHUP and app._driver:
            app._driver.write = lambda data: None       # there is no terminal any more
        if self._last is None:
            self._last = threading.Timer(GRACE, self._end_hard, [app])
            self._last.daemon = True
            self._last.start()
        try:
            asyncio.get_running_loop().call_soon_threadsafe(app.exit)
        except RuntimeError:            # no loop yet, and the app will end as soon as it has one
            app.exit()

    def _end_hard(self, app):
        if app.engine and not app.engine.left:
            app.engine.stop()
        os._exit(self.code)
