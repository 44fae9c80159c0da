"""A round: what every rank does next, in bytes of a fixed layout, and the check that all ranks are
in the same state.

Rank 0 broadcasts it. Little-endian; after the header come the arrays, each as long as its count:

| offset | size | field |
|---|---|---|
| 0 | 4 | "SGRD" |
| 4 | 2 | version, 1 |
| 6 | 2 | flags: 1 = the chunk ends its prompt, 2 = stop after this round |
| 8 | 8 | number, 1 for the first round |
| 16 | 8 | digest of the page tables after the round before |
| 24 | 8 | digest of all tokens fed up to the round before |
| 32 | 16 | counts: closes, opens, chunk tokens, decode rows (4 x uint32) |
| 48 | 8 | chunk: seat, first position (2 x int32), 0 where it has no tokens |
| 56 | 4 c | closes: int32 seats |
| | 24 + 8 p | each open: int32 seat, kept, owner or -1, p pages; int64 lease; int32 region, ids |
| | 4 m | chunk tokens, int32 |
| | 12 n | decode tokens, seats, positions, int32 |

A round is valid if and only if magic and version are these, its length is what its counts say, its
number is one more than the last, and both digests are the receiver's own (Ledger).
"""

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np

from engine.errors import WorldError
from engine.pool.lease import Lease

MAGIC, VERSION = b"SGRD", 1
HEADER = struct.Struct("<4sHHQ8s8s4I2i")
OPEN = struct.Struct("<4iq")
ENDS, STOP = 1, 2
NONE = np.zeros(0, np.int32)
NEW = bytes(8)
SAME = "start all ranks with the same version and options; if they are, please report this"


@dataclass(frozen=True)
class Round:
    """What every rank does, in this order.

    closes: seats to empty. opens: (seat, Lease, kept): seats to bind; kept > 0: the seat's state
    and the KV of its first `kept` positions stay, its lease grows or shrinks. chunk: (seat, first
    position, tokens int32 [m]) or None; chunk_ends: its last row's logits give a reply's first
    token. tokens, seats, positions: int32 [n] of the decode step. stop: the last round.
    """

    number: int
    closes: tuple = ()
    opens: tuple = ()
    chunk: tuple | None = None
    chunk_ends: bool = False
    tokens: np.ndarray = field(default_factory=lambda: NONE)
    seats: np.ndarray = field(default_factory=lambda: NONE)
    positions: np.ndarray = field(default_factory=lambda: NONE)
    stop: bool = False


def pack(made, digests):
    """Round, Ledger.digests -> bytes."""
    seat, first, fed = made.chunk or (0, 0, NONE)
    parts = [HEADER.pack(MAGIC, VERSION, ENDS * made.chunk_ends | STOP * made.stop, made.number,
                         *digests, len(made.closes), len(made.opens), len(fed), len(made.tokens),
                         seat, first),
             _ints(made.closes)]
    for at, lease, kept in made.opens:
        owner = -1 if lease.owner is None else lease.owner
        parts += [OPEN.pack(at, kept, owner, lease.pages, lease.id), _ints(lease.region),
                  _ints(lease.ids)]
    parts += [_ints(a) for a in (fed, made.tokens, made.seats, made.positions)]
    return b"".join(parts)


def _ints(values):
    return np.asarray(values, "<i4").tobytes()


def unpack(data):
    """bytes -> (Round, digests). WorldError where they are no round of this version."""
    try:
        return _unpack(data)
    except (struct.error, ValueError) as e:
        raise WorldError(f"a round of {len(data)} bytes cannot be read: {e}", SAME) from None


def _unpack(data):
    (magic, version, flags, number, tables, tokens, closes, opens, fed, rows, seat,
     first) = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"it starts with {magic!r}, version {version}; this is {MAGIC!r}, "
                         f"version {VERSION}")
    at = HEADER.size

    def ints(count):
        nonlocal at
        found = np.frombuffer(data, "<i4", count, at).astype(np.int32)    # writable, aligned
        at += 4 * count
        return found

    emptied = tuple(ints(closes).tolist())
    bound = []
    for _ in range(opens):
        place, kept, owner, pages, lease = OPEN.unpack_from(data, at)
        at += OPEN.size
        bound.append((place, Lease(lease, None if owner < 0 else owner, ints(pages), ints(pages)),
                      kept))
    chunk = (seat, first, ints(fed)) if fed else None
    made = Round(number, emptied, tuple(bound), chunk, bool(flags & ENDS), ints(rows), ints(rows),
                 ints(rows), bool(flags & STOP))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes are left over")
    return made, (tables, tokens)


class Ledger:
    """One rank's account of what it has done: digests that must be equal on every rank.

    table: the rank's PageTable, of which `holders` and `owners` are every rank's alike.
    """

    def __init__(self, table, rank):
        self._table, self._rank = table, rank
        self._rows = [NEW] * len(table.owners)
        self._tokens = NEW
        self.number = 0

    @property
    def digests(self):
        """(page tables, tokens), 8 bytes each."""
        return _digest(*self._rows), self._tokens

    def check(self, made, digests):
        """WorldError unless the round is the next one and rank 0 is in the state of this rank."""
        if made.number != self.number + 1:
            raise WorldError(f"round {made.number} arrived where round {self.number + 1} was due",
                             SAME, rank=self._rank)
        for name, theirs, own in zip(("page tables", "tokens fed"), digests, self.digests):
            if theirs != own:
                raise WorldError(
                    f"before round {made.number} the {name} differ: rank 0 has {theirs.hex()}, "
                    f"rank {self._rank} has {own.hex()}", SAME, rank=self._rank)

    def note(self, made):
        """Account for a round whose seats have been closed and opened."""
        self.number = made.number
        for seat in (*made.closes, *(seat for seat, _, _ in made.opens)):
            self._rows[seat] = _digest(self._table.holders[seat].tobytes(),
                                       self._table.owners[seat].tobytes())
        seat, first, fed = made.chunk or (0, 0, NONE)
        self._tokens = _digest(self._tokens, _ints((seat, first)), _ints(fed), _ints(made.tokens),
                               _ints(made.seats), _ints(made.positions))


def _digest(*parts):
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()
