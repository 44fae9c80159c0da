"""One conversation in the engine: its tokens, how far they are in the KV, and the lease that
holds them.
"""

from dataclasses import dataclass, field

import numpy as np

from engine.pool.lease import Lease
from engine.sample import Sampling


@dataclass
class Sequence:
    """A request from submission to its last token.

    prompt: int32 [P]. pages: logical pages of its lease. fed: positions whose KV is written; while
    fed < P it is in prefill. seat and lease are None while it waits.
    """

    id: int
    prompt: np.ndarray
    sampling: Sampling
    pages: int
    fed: int = 0
    emitted: list = field(default_factory=list)
    seat: int | None = None
    lease: Lease | None = None

    @property
    def in_prefill(self):
        return self.fed < len(self.prompt)

    def emit(self, token):
        """Append a token; the reason the reply ends with it: "stop", "length", or None."""
        self.emitted.append(token)
        if token in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.emitted) == self.sampling.max_tokens else None
