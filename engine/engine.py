"""The engine: conversations in, tokens out, on all ranks together.

Rank 0 submits, plans and samples; each round it broadcasts one plan, and every rank computes it.
The other ranks stay in `follow`. A round's rows are independent to the bit (row law), so what
runs beside a conversation never changes its reply.
"""

import time
from typing import NamedTuple

import numpy as np

from engine.backend import BACKENDS, choose, make_pool
from engine.forward import Rows
from engine.memory import page_bytes
from engine.round import Ledger, pack, unpack
from engine.sample import choose as choose_token
from engine.scheduler import Scheduler
from engine.telemetry import Meters


class Event(NamedTuple):
    """One token of a reply; finish_reason "stop" or "length" with its last.

    logprob, top: engine.sample.Choice. cached: with a reply's first token, the prompt tokens that
    were taken from a kept conversation; else 0.
    """

    id: int
    token: int
    finish_reason: str | None
    logprob: float | None = None
    top: tuple = ()
    cached: int = 0


class Engine:
    """One rank's engine, made on every rank from the same Config; rank 0 drives, the others follow.

    shape, weights: as engine.backend.load gives them. seconds: wall time by phase on this rank
    ("prefill", "decode"). tokens: prompt tokens prefilled and reply tokens decoded.
    """

    def __init__(self, config, world, shape, weights):
        self.config, self.world, self.shape = choose(config), world, shape
        self.backend = BACKENDS[self.config.backend](self.config, world, shape, weights)
        self.pool = make_pool(config, world.size)
        self.scheduler = Scheduler(self.pool, config.parallel, config.context, config.chunk,
                                   config.page_rows, shape.vocab, config.queue,
                                   config.round_ms / 1e3)
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}
        self.page_bytes = sum(size for _, size in page_bytes(shape, self.config, 1))
        self.meters = Meters()
        self.ledger = Ledger(self.backend.table, world.rank)

    # --- rank 0 -------------------------------------------------------------------------------

    def submit(self, prompt, sampling):
        """Queue a prompt (token ids); its request id. RequestError before anything changes."""
        return self.scheduler.submit(prompt, sampling)

    def cancel(self, request):
        """End a request early; its pages are free within one round."""
        self.scheduler.cancel(request)

    @property
    def busy(self):
        """Whether `step` has anything to do."""
        return self.scheduler.busy

    def step(self):
        """One round on all ranks: [Event], at most one a conversation."""
        plan = self.scheduler.plan()
        started = time.perf_counter()
        chunk, rows = self._broadcast(plan)
        if plan.chunk is not None:
            self.scheduler.measured(len(plan.chunk[2]), time.perf_counter() - started)

        def pick(row, sampling, position):
            return choose_token(chunk[0] if row < 0 else rows[row], sampling, position)
        events = []
        for s, choice, reason in self.scheduler.commit(plan, pick):
            self.meters.token(s, reason)
            events.append(Event(s.id, choice.token, reason, choice.logprob, choice.top,
                                s.cached if len(s.emitted) == 1 else 0))
        return events

    def stop(self):
        """Let the other ranks return from `follow`."""
        self._broadcast(self.scheduler.last())

    def _broadcast(self, plan):
        self.world.broadcast(pack(plan, self.ledger.digests))
        return self._execute(plan)

    # --- the other ranks ----------------------------------------------------------------------

    def follow(self):
        """Compute the rounds that rank 0 plans, until it stops."""
        stop = False
        while not stop:
            plan, digests = unpack(self.world.broadcast())
            self.ledger.check(plan, digests)
            self._execute(plan)
            stop = plan.stop

    # --- all ranks ----------------------------------------------------------------------------

    def _execute(self, plan):
        """Compute a round -> logits of the chunk's last row and of the decode rows, on rank 0."""
        for seat in plan.closes:
            self.backend.close(seat)
        for seat, lease, kept in plan.opens:
            self.backend.open(seat, lease, kept)
        self.ledger.note(plan)
        chunk = rows = None
        if plan.chunk is not None:
            seat, first, tokens = plan.chunk
            chunk = self._timed("prefill", Rows.of(
                tokens, np.full(len(tokens), seat), np.arange(first, first + len(tokens))),
                plan.chunk_ends)
        if plan.tokens.size:
            rows = self._timed("decode", Rows(plan.tokens, plan.seats, plan.positions))
        return chunk, rows

    def _timed(self, phase, rows, *wanted):
        started = time.perf_counter()
        result = getattr(self.backend, phase)(rows, *wanted)
        self.seconds[phase] += time.perf_counter() - started
        self.tokens[phase] += rows.count
        return result
