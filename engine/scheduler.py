"""Who steps next: waiting, prefilling and decoding conversations, and the pages they lease. On
rank 0 only; no device, no MPI.

A round takes at most one prefill chunk and one token of every decoding conversation, so a long
prompt never stops the others for longer than a chunk. Conversations are admitted in order of
arrival, each with all pages that its prompt and longest reply can need, so none is ever thrown
out later. A request that could never fit is refused at once, with the numbers.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from engine.prompt import check_prompt
from engine.sequence import Sequence


@dataclass(frozen=True)
class Round:
    """What every rank does next, in this order. Rank 0 broadcasts it.

    closes: seats to empty. opens: (seat, Lease) to bind. chunk: (seat, first position, tokens
    int32 [m]) or None; chunk_ends: its last row's logits give the first token of a reply.
    tokens, seats, positions: int32 [n] of the decode step.
    """

    number: int
    closes: tuple
    opens: tuple
    chunk: tuple | None
    chunk_ends: bool
    tokens: np.ndarray
    seats: np.ndarray
    positions: np.ndarray


class Scheduler:
    """The conversations of one engine.

    pool: engine.pool.lease.Pool. seats: conversations at a time. context: tokens of one, prompt and
    reply. chunk: prompt tokens a round. page_rows, vocab: for counting and checking.
    """

    def __init__(self, pool, seats, context, chunk, page_rows, vocab):
        self.pool, self.context, self.chunk = pool, context, chunk
        self.page_rows, self.vocab = page_rows, vocab
        self._free_seats = list(range(seats))[::-1]
        self._waiting = deque()
        self._live = {}             # seat -> Sequence, in order of admission
        self._closes = []           # seats to empty in the next round
        self._submitted = self._rounds = 0

    @property
    def busy(self):
        """Whether a round has anything to do."""
        return bool(self._waiting or self._live or self._closes)

    def submit(self, prompt, sampling):
        """Queue a prompt (ids); its request id. RequestError before anything changes."""
        check_prompt(prompt, self.context, self.vocab)
        prompt = np.array(prompt, np.int32)
        longest = min(sampling.max_tokens, self.context - prompt.size)
        pages = -(-(prompt.size + longest) // self.page_rows)
        self.pool.refusal(pages)
        sequence = Sequence(self._submitted, prompt,
                            replace(sampling, max_tokens=int(longest)), pages)
        self._submitted += 1
        self._waiting.append(sequence)
        return sequence.id

    def cancel(self, request):
        """Forget a request; its pages are free within a round. An ended id is no error."""
        for sequence in self._waiting:
            if sequence.id == request:
                self._waiting.remove(sequence)
                return
        for sequence in list(self._live.values()):
            if sequence.id == request:
                self._close(sequence)

    def plan(self):
        """The next Round: admit what fits, prefill the oldest, decode all that are past theirs."""
        closes, self._closes = tuple(self._closes), []
        opens = self._admit()
        filling = next((s for s in self._live.values() if s.in_prefill), None)
        chunk, ends = None, False
        if filling is not None:
            tokens = filling.prompt[filling.fed:filling.fed + self.chunk]
            chunk = (filling.seat, filling.fed, tokens)
            ends = filling.fed + len(tokens) == len(filling.prompt)
        decoding = self._decoding()
        self._rounds += 1
        return Round(self._rounds, closes, opens, chunk, ends,
                     np.array([s.emitted[-1] for s in decoding], np.int32),
                     np.array([s.seat for s in decoding], np.int32),
                     np.array([s.fed for s in decoding], np.int32))

    def commit(self, plan, pick):
        """Take a round's results. pick(row, sampling, position) -> token; row -1 is the chunk's.

        Returns [(request id, token, finish reason or None)]; ended conversations close with the
        next round.
        """
        emitted = []
        decoding = self._decoding()
        if plan.chunk is not None:
            filling = self._live[plan.chunk[0]]
            filling.fed += len(plan.chunk[2])
            if plan.chunk_ends:
                emitted.append((filling, pick(-1, filling.sampling, filling.fed)))
        for row, sequence in enumerate(decoding):
            sequence.fed += 1
            emitted.append((sequence, pick(row, sequence.sampling, sequence.fed)))
        events = []
        for sequence, token in emitted:
            reason = sequence.emit(token)
            events.append((sequence.id, token, reason))
            if reason:
                self._close(sequence)
        return events

    def _decoding(self):
        return [s for s in self._live.values() if not s.in_prefill]

    def _admit(self):
        opens = []
        while self._waiting and self._free_seats:
            sequence = self._waiting[0]
            sequence.lease = self.pool.grant(sequence.pages)
            if sequence.lease is None:
                break
            self._waiting.popleft()
            sequence.seat = self._free_seats.pop()
            self._live[sequence.seat] = sequence
            opens.append((sequence.seat, sequence.lease))
        return tuple(opens)

    def _close(self, sequence):
        del self._live[sequence.seat]
        self.pool.release(sequence.lease)
        self._free_seats.append(sequence.seat)
        self._closes.append(sequence.seat)
