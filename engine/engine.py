"""The engine: conversations in, tokens out, on all ranks together.

Rank 0 submits, plans and samples; each round it broadcasts one plan, and every rank computes it.
The other ranks stay in `follow`. A round's rows are independent to the bit (row law), so what
runs beside a conversation never changes its reply.
"""

import pickle
import time
from typing import NamedTuple

import numpy as np

from engine.backend import BACKENDS, choose, make_pool
from engine.errors import WorldError
from engine.forward import Rows
from engine.sample import sample
from engine.scheduler import Scheduler


class Event(NamedTuple):
    """One token of a reply; finish_reason "stop" or "length" with its last."""

    id: int
    token: int
    finish_reason: str | None


class Engine:
    """One rank's engine, made on every rank from the same Config; rank 0 drives, the others follow.

    shape, weights: as engine.backend.load gives them. seconds: wall time by phase on this rank
    ("prefill",
    "decode"). tokens: prompt tokens prefilled and reply tokens decoded.
    """

    def __init__(self, config, world, shape, weights):
        self.config, self.world, self.shape = choose(config), world, shape
        self.backend = BACKENDS[self.config.backend](self.config, world, shape, weights)
        self.pool = make_pool(config, world.size)
        self.scheduler = Scheduler(self.pool, config.parallel, config.context, config.chunk,
                                   config.page_rows, shape.vocab)
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}
        self._rounds = 0

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
        self.world.broadcast(pickle.dumps(plan))
        chunk, rows = self._execute(plan)

        def pick(row, sampling, position):
            return sample(chunk[0] if row < 0 else rows[row], sampling, position)
        return [Event(*e) for e in self.scheduler.commit(plan, pick)]

    def stop(self):
        """Let the other ranks return from `follow`."""
        self.world.broadcast(pickle.dumps(None))

    # --- the other ranks ----------------------------------------------------------------------

    def follow(self):
        """Compute the rounds that rank 0 plans, until it stops."""
        while (plan := pickle.loads(self.world.broadcast())) is not None:
            self._execute(plan)

    # --- all ranks ----------------------------------------------------------------------------

    def _execute(self, plan):
        """Compute a round -> logits of the chunk's last row and of the decode rows, on rank 0."""
        self._rounds += 1
        if plan.number != self._rounds:
            raise WorldError(f"round {plan.number} arrived where round {self._rounds} was due",
                             "start all ranks with the same version", rank=self.world.rank)
        for seat in plan.closes:
            self.backend.close(seat)
        for seat, lease in plan.opens:
            self.backend.open(seat, lease)
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
