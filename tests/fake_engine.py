"""The HTTP side on a real port, over an engine that says what a test wants: no ranks, no model.

`Fake` has the Hub, the Api, the Server and a loop thread. `fake.say(text)` sets the next replies,
`fake.gate` holds every round back while it is clear, `fake.pace` is a round's seconds,
`fake.break_with(error)` is a lost engine.
"""

import itertools
import threading
import time
from typing import NamedTuple

from engine.api.app import Api, Server, listen
from engine.hub import SERVING, Hub
from engine.prompt import check_prompt
from engine.sample import Sampling
from engine.telemetry import Board, Meters

CONTEXT, VOCAB = 2048, 4096
PATIENCE = 20       # seconds until something that must happen counts as not happening


def until(true):
    """Wait until true() is."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Event(NamedTuple):
    """engine.engine.Event, without the engine."""

    id: int
    token: int
    finish_reason: str | None
    logprob: float | None = None
    top: tuple = ()
    cached: int = 0


class Pulse:
    """Every rank is well."""

    def silent(self):
        return {}

    def everyone(self):
        return {}


class Engine:
    """Says `reply` (ids) to every prompt, a token a round. live: {request: tokens said}."""

    def __init__(self, chat):
        self.chat, self.reply = chat, []
        self.numbers = itertools.count()
        self.live, self.asked, self.cancelled = {}, {}, []
        self.refusal = self.error = None

    def submit(self, ids, sampling):
        if self.refusal:
            raise self.refusal
        check_prompt(ids, CONTEXT, VOCAB)
        number = next(self.numbers)
        self.live[number] = iter([*self.reply, self.chat.eos[0]]), 0
        self.asked[number] = list(ids), sampling
        return number

    def cancel(self, number):
        self.cancelled.append(number)
        self.live.pop(number, None)

    def step(self):
        if self.error:
            raise self.error
        return [self._one(number) for number in list(self.live)]

    def _one(self, number):
        (tokens, said), sampling = self.live[number], self.asked[number][1]
        token = next(tokens)
        self.live[number] = tokens, said + 1
        reason = ("stop" if token in sampling.stop_ids else
                  "length" if said + 1 == sampling.max_tokens else None)
        if reason:
            del self.live[number]
        asked = sampling.logprobs
        return Event(number, token, reason, None if asked is None else -0.5,
                     () if asked is None else tuple((i, -1.0 - i) for i in range(asked)),
                     3 if said == 0 else 0)


class Fake:
    """A served Engine. url: of the server. options: of Api (key, ...)."""

    def __init__(self, chat, **options):
        self.chat, self.engine = chat, Engine(chat)
        self.meters = Meters()
        self.hub = Hub(self.meters)
        self.board = Board({"version": "test", "model": "fake"}, Pulse())
        self.api = Api(self.hub, chat, self.board, Sampling(max_tokens=CONTEXT), ("fake", "alias"),
                       CONTEXT, 1_700_000_000, **options)
        self.server = Server(self.api, listen("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.pace = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.hub.become(SERVING, "")
        self._over = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def say(self, text):
        """Reply with this text from now on."""
        self.engine.reply = self.chat.encode(text)

    def break_with(self, error):
        """The next round fails."""
        self.engine.error = error

    def close(self):
        self._over = True
        self._thread.join(10)
        self.server.stop(10)
        assert not self._thread.is_alive() and not self.server.alive

    def _loop(self):
        while not self._over:
            self.hub.take(self.engine)
            if not self.engine.live or not self.gate.is_set():
                self.hub.wait(0.01)
                continue
            time.sleep(self.pace)
            try:
                self.hub.deliver(self.engine.step())
            except Exception as error:
                self.hub.fail(error)
                return
