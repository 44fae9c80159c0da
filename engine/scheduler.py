"""Who steps next: waiting, prefilling, decoding and kept conversations, and the pages they lease.
On rank 0 only; no device, no MPI.

A round takes at most one prefill chunk and one token of every decoding conversation, so a long
prompt never stops the others for longer than a chunk. While others wait, the chunk is cut to what
`round_seconds` lets by, as measured; conversations in prefill take turns. Conversations are
admitted in order of arrival, each with all pages that its prompt and longest reply can need, so
none is ever thrown out later. A request that could never fit is refused at once, with the numbers.

A conversation that ended stays, with its seat and the pages it has filled, until they are needed
(the oldest goes first). A prompt that goes on where a kept conversation ended continues from it:
by the row law that is the same to the bit as reading the whole prompt.
"""

import time
from collections import deque
from dataclasses import replace

import numpy as np

from engine.errors import QueueFull, TooLong
from engine.prompt import check_prompt
from engine.round import Round
from engine.sequence import Sequence

LEAST_CHUNK = 64            # tokens of a chunk however slow the machine is
SMOOTHING = 0.3             # weight of the newest chunk in the measured seconds a token


class Scheduler:
    """The conversations of one engine.

    pool: engine.pool.lease.Pool. seats: conversations at a time, kept ones included. context:
    tokens of one, prompt and reply. chunk: the most prompt tokens a round. queue: requests that may
    wait. round_seconds: what a round should take at most while others wait for it.
    """

    def __init__(self, pool, seats, context, chunk, page_rows, vocab, queue=64,
                 round_seconds=0.25):
        self.pool, self.context, self.chunk = pool, context, chunk
        self.page_rows, self.vocab, self.queue = page_rows, vocab, queue
        self.round_seconds = round_seconds
        self.token_seconds = 0.0    # measured, of a prompt token; 0 until the first chunk
        self.hit_tokens = 0         # prompt tokens taken from kept conversations
        self.waiting = deque()
        self.live = {}              # seat -> Sequence, in order of admission
        self.kept = {}              # seat -> Sequence, the longest unused first
        self._turns = deque()       # conversations in prefill, the next to get a chunk first
        self._free_seats = list(range(seats))[::-1]
        self._closes = []           # seats to empty in the next round
        self._submitted = self._rounds = 0

    @property
    def busy(self):
        """Whether a round has anything to do."""
        return bool(self.waiting or self.live or self._closes)

    def submit(self, prompt, sampling):
        """Queue a prompt (ids); its request id. RequestError before anything changes."""
        try:
            check_prompt(prompt, self.context, self.vocab)
            longest = min(sampling.max_tokens, self.context - len(prompt))
            pages = -(-(len(prompt) + longest) // self.page_rows)
            self.pool.refusal(pages)
        except TooLong as e:
            raise TooLong(f"{e.message}; {self._sizes(prompt, sampling)}", e.hint) from None
        prompt = np.array(prompt, np.int32)
        seats = len(self._free_seats) + len(self.kept)      # that the next round may fill
        if len(self.waiting) >= self.queue + seats:
            raise QueueFull(f"{len(self.waiting)} requests wait already, the queue takes "
                            f"{self.queue}; {len(self.live)} conversations are being answered",
                            "try again soon, or start the engine with a larger --queue")
        sequence = Sequence(self._submitted, prompt,
                            replace(sampling, max_tokens=int(longest)), pages)
        self._submitted += 1
        self.waiting.append(sequence)
        return sequence.id

    def _sizes(self, prompt, sampling):
        """What a request that is too long is, and what would fit."""
        most = self.pool.longest()
        return (f"prompt {len(prompt)} tokens, reply up to {sampling.max_tokens}, window "
                f"{self.context}, pool {self.pool.pages} pages of {self.page_rows} tokens; "
                f"{min(self.context, most * self.page_rows)} tokens with the reply would fit")

    def cancel(self, request):
        """Forget a request; its pages are free within a round. An ended id is no error."""
        for sequence in self.waiting:
            if sequence.id == request:
                self.waiting.remove(sequence)
                return
        for sequence in list(self.live.values()):
            if sequence.id == request:
                self._leave(sequence)
                self._close(sequence)

    def plan(self):
        """The next Round: admit what fits, one prefill chunk, decode all that are past theirs."""
        opens = self._admit()
        closes, self._closes = tuple(self._closes), []
        chunk, ends = None, False
        if self._turns:
            filling = self._turns[0]
            tokens = filling.prompt[filling.fed:filling.fed + self._chunk_size()]
            chunk = filling.seat, filling.fed, tokens
            ends = filling.fed + len(tokens) == len(filling.prompt)
        decoding = self._decoding()
        self._rounds += 1
        if not decoding:
            return Round(self._rounds, closes, opens, chunk, ends)
        return Round(self._rounds, closes, opens, chunk, ends,
                     *(np.array(values, np.int32) for values in zip(
                         *((s.emitted[-1], s.seat, s.fed) for s in decoding))))

    def last(self):
        """The round after which every rank stops."""
        self._rounds += 1
        return Round(self._rounds, stop=True)

    def commit(self, plan, pick):
        """Take a round's results. pick(row, sampling, position) -> Choice; row -1 is the chunk's.

        Returns [(Sequence, Choice, finish reason or None)]; ended conversations are kept.
        """
        emitted = []
        decoding = self._decoding()
        if plan.chunk is not None:
            filling = self._turns.popleft()
            filling.fed += len(plan.chunk[2])
            if plan.chunk_ends:
                emitted.append((filling, pick(-1, filling.sampling, filling.fed)))
            else:
                self._turns.append(filling)
        for row, sequence in enumerate(decoding):
            sequence.fed += 1
            emitted.append((sequence, pick(row, sequence.sampling, sequence.fed)))
        events, now = [], time.monotonic()
        for sequence, choice in emitted:
            reason = sequence.emit(choice.token, now)
            events.append((sequence, choice, reason))
            if reason:
                self._leave(sequence)
                self._keep(sequence)
        return events

    def measured(self, tokens, seconds):
        """A round with a prefill chunk of `tokens` took so long."""
        new = seconds / tokens
        self.token_seconds += (new - self.token_seconds) * (SMOOTHING if self.token_seconds else 1)

    def _chunk_size(self):
        alone = len(self.live) == 1 and not self.waiting
        if alone or not self.token_seconds:
            return self.chunk
        fits = int(self.round_seconds / self.token_seconds) // LEAST_CHUNK * LEAST_CHUNK
        return min(self.chunk, max(LEAST_CHUNK, fits))

    def _decoding(self):
        return [s for s in self.live.values() if not s.in_prefill]

    # --- admission ------------------------------------------------------------------------------

    def _admit(self):
        """Admit what fits, in order of arrival: [(seat, Lease, kept positions)]."""
        opens = []
        while self.waiting:
            sequence = self.waiting[0]
            if not (self._resume(sequence) or self._start(sequence)):
                break
            self.waiting.popleft()
            self.live[sequence.seat] = sequence
            self._turns.append(sequence)
            sequence.started = time.monotonic()
            self.hit_tokens += sequence.cached
            opens.append((sequence.seat, sequence.lease, sequence.cached))
        return tuple(opens)

    def _resume(self, sequence):
        """Continue the kept conversation that holds most of the prompt, if one holds any."""
        best = max((k for k in self.kept.values() if k.begins(sequence.prompt)),
                   key=lambda k: k.fed, default=None)
        if best is None:
            return False
        others = [k for k in self.kept.values() if k is not best]
        lease = self.pool.resize(best.lease, sequence.pages)
        while lease is None and others:
            self._drop(others.pop(0))
            lease = self.pool.resize(best.lease, sequence.pages)
        if lease is None:
            return False
        del self.kept[best.seat]
        sequence.seat, sequence.lease = best.seat, lease
        sequence.fed = sequence.cached = best.fed
        return True

    def _start(self, sequence):
        """A seat and fresh pages, if they can be had."""
        kept = list(self.kept.values())
        if not self._free_seats and not kept:
            return False
        if not self.pool.would_fit(sequence.pages, [k.lease for k in kept]):
            return False
        if not self._free_seats:
            self._drop(kept.pop(0))
        while (lease := self.pool.grant(sequence.pages)) is None:
            self._drop(kept.pop(0))
        sequence.lease, sequence.seat = lease, self._free_seats.pop()
        return True

    # --- endings --------------------------------------------------------------------------------

    def _leave(self, sequence):
        del self.live[sequence.seat]
        if sequence in self._turns:
            self._turns.remove(sequence)

    def _keep(self, sequence):
        """Keep an ended conversation, with the pages that hold what it has read and said."""
        filled = -(-sequence.fed // self.page_rows)
        if filled < sequence.lease.pages:
            sequence.lease = self.pool.resize(sequence.lease, filled)
        self.pool.keep(sequence.lease)
        sequence.settle()
        self.kept[sequence.seat] = sequence

    def _drop(self, sequence):
        """Forget a kept conversation."""
        del self.kept[sequence.seat]
        self._close(sequence)

    def _close(self, sequence):
        self.pool.release(sequence.lease)
        self._free_seats.append(sequence.seat)
        self._closes.append(sequence.seat)
