"""One conversation in the engine: its tokens, how far they are in the KV, and the lease that
holds them.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from engine.pool.lease import Lease
from engine.sample import Sampling


@dataclass(eq=False)
class Sequence:
    """A request from submission to its last token, and after it while it is kept.

    prompt: int32 [P]. pages: logical pages of its lease. fed: positions whose KV is written; while
    fed < P it is in prefill. cached: those of them that a kept conversation had written. seat and
    lease are None while it waits. ids: of a kept one, int32 [fed], what its KV holds. Times are of
    time.monotonic.
    """

    id: int
    prompt: np.ndarray
    sampling: Sampling
    pages: int
    fed: int = 0
    cached: int = 0
    emitted: list = field(default_factory=list)
    seat: int | None = None
    lease: Lease | None = None
    ids: np.ndarray | None = None
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None        # admitted
    first: float | None = None          # its first token
    latest: float | None = None         # its newest token
    gap: float | None = None            # seconds between its newest two tokens

    @property
    def in_prefill(self):
        return self.fed < len(self.prompt)

    def emit(self, token, now):
        """Append a token; the reason the reply ends with it: "stop", "length", or None."""
        self.emitted.append(token)
        self.gap = None if self.latest is None else now - self.latest
        self.first, self.latest = self.first or now, now
        if token in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.emitted) == self.sampling.max_tokens else None

    def settle(self):
        """The reply has ended: note what the KV holds. The last token was never fed."""
        said = np.array(self.emitted[:self.fed - len(self.prompt)], np.int32)
        self.ids = np.concatenate((self.prompt, said))

    def begins(self, prompt):
        """Whether a prompt goes on where this kept conversation ended."""
        return self.fed < len(prompt) and np.array_equal(self.ids, prompt[:self.fed])
