"""States: what a conversation keeps outside pages, in arrays of fixed size indexed by its seat.

| array | shape |
|---|---|
| kda | [KDA layers, seats, own KDA heads, D, D]: one a head, key by value channels |
| conv | [KDA layers, seats, conv - 1, 3 * own KDA heads * D]: past rows q, k, v, oldest first |
| tail_k, tail_g | [bindings, seats, kpool - 1, index_dim]: raw keys, gates of the unfilled pool |

All float32. KDA heads are this rank's own; the tail is the same on every rank. A seat is the index
of a live conversation; whoever seats one clears it first.
"""

import numpy as np


class States:
    """The fixed arrays of `seats` conversations on one rank.

    shape: engine.shape.Shape; part: engine.shape.Part (its KDA heads, possibly none).
    """

    def __init__(self, shape, part, seats):
        heads = part.kda_heads[1] - part.kda_heads[0]
        layers = len(shape.kda_layers)
        dim = shape.kda_dim
        tail = (shape.bindings, seats, shape.index_kpool - 1, shape.index_dim)
        self.seats = seats
        self.kda = np.zeros((layers, seats, heads, dim, dim), np.float32)
        self.conv = np.zeros((layers, seats, shape.conv - 1, 3 * heads * dim), np.float32)
        self.tail_k = np.zeros(tail, np.float32)
        self.tail_g = np.zeros(tail, np.float32)

    @property
    def bytes(self):
        """Resident bytes of all four arrays."""
        return sum(a.nbytes for a in (self.kda, self.conv, self.tail_k, self.tail_g))

    def clear(self, seat):
        """Set a seat's states to those of a conversation that has no token yet: zeros."""
        for array in (self.kda, self.conv, self.tail_k, self.tail_g):
            array[:, seat] = 0.0
