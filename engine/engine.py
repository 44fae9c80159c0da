"""The engine: conversations in, tokens out, on all ranks together.

Rank 0 submits, plans and samples; each round it broadcasts one plan, and every rank computes it.
The other ranks stay in `follow`. A round's rows are independent to the bit (row law), so what
runs beside a conversation never changes its reply.
"""

import pickle
import time
from typing import NamedTuple

import numpy as np

from engine.errors import WorldError
from engine.forward import Model, Rows, forward, logits
from engine.memory import classes_of, pages_below, pool_pages, window_pages
from engine.pool.lease import Pool
from engine.pool.page import Pages, rank_pages
from engine.pool.state import States
from engine.pool.table import PageTable
from engine.prefill import prefill_attention
from engine.sample import sample
from engine.scheduler import Scheduler
from engine.shape import part
from engine.step import decode_attention


class Event(NamedTuple):
    """One token of a reply; finish_reason "stop" or "length" with its last."""

    id: int
    token: int
    finish_reason: str | None


class Engine:
    """One rank's engine, made on every rank from the same Config; rank 0 drives, the others follow.

    shape, weights: from engine.weights. seconds: wall time by phase on this rank ("prefill",
    "decode"). tokens: prompt tokens prefilled and reply tokens decoded.
    """

    def __init__(self, config, world, shape, weights):
        classes = classes_of(config, world.size)
        window = window_pages(config.context, config.page_rows)
        split_pages, replicated = pool_pages(config, world.size)
        below = min(pages_below(config, classes), window)
        own = part(shape, world.rank, world.size)
        everyone = [part(shape, rank, world.size) for rank in range(world.size)]
        pages = Pages(shape, rank_pages(split_pages, classes, world.rank, replicated),
                      config.page_rows, config.kv_dtype)
        self.config, self.world, self.shape = config, world, shape
        self.model = Model(world, shape, own, weights, pages, States(shape, own, config.parallel),
                           PageTable(config.parallel, window, classes, replicated),
                           tuple(p.heads for p in everyone), tuple(p.vocab for p in everyone),
                           classes > 1, config.replicate)
        self.pool = Pool(split_pages, classes, config.placement, below, replicated,
                         config.shuffle_pages)
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
            self.model.table.unbind(seat)
        for seat, lease in plan.opens:
            self._open(seat, lease)
        chunk = rows = None
        if plan.chunk is not None:
            seat, first, tokens = plan.chunk
            chunk = self._timed("prefill", prefill_attention, plan.chunk_ends, Rows.of(
                tokens, np.full(len(tokens), seat), np.arange(first, first + len(tokens))))
        if plan.tokens.size:
            rows = self._timed("decode", decode_attention, True,
                               Rows(plan.tokens, plan.seats, plan.positions))
        return chunk, rows

    def _timed(self, phase, attend, wanted, rows):
        started = time.perf_counter()
        hidden = forward(self.model, rows, attend)
        # a chunk needs its last row's logits only, and only where the prompt ends with it
        hidden = hidden[-1:] if phase == "prefill" else hidden
        result = logits(self.model, hidden) if wanted else None
        self.seconds[phase] += time.perf_counter() - started
        self.tokens[phase] += rows.count
        return result

    def _open(self, seat, lease):
        model = self.model
        model.table.bind(seat, lease, self.world.rank)
        model.states.clear(seat)
        if self.config.poison:
            model.pages.poison(model.table.local_pages(seat))
