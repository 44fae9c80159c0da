"""mpirun -np W python tests/mpi/rank_world.py: the collectives of engine/world.py."""

import os
import time

from drive import run_script, world

import numpy as np  # after drive, which prepares the environment

from engine import errors
from engine.world import SUM_WHOLE_BYTES

WHOLE = SUM_WHOLE_BYTES // 4        # floats of the largest sum that goes whole
SIZES = (1, 2, 5, 1000, WHOLE - 1, WHOLE, WHOLE + 1, 100_003, 400_000)
IDLE = 2.0                          # seconds that the other ranks wait for rank 0
SHARE = 0.5                         # of a core that a waiting rank may use


def numbers(rank, size):
    """What a rank brings to a sum: every rank can compute everyone's. Magnitudes that round."""
    rng = np.random.default_rng([rank, size])
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5, size)).astype(np.float32)


def sums(report):
    """In rank order from the left, float32, below and above the size that is sent whole."""
    w = world()
    for size in SIZES:
        expected = numbers(0, size)
        for rank in range(1, w.size):
            expected = expected + numbers(rank, size)
        mine = numbers(w.rank, size)
        result = w.sum(mine)
        report.check(f"sum of {size}", result.tobytes() == expected.tobytes())
        report.check(f"sum of {size} in place", mine.tobytes() == expected.tobytes())
    if w.size > 2:      # the order shows: some of these sums are another number from the right
        everyone = [numbers(rank, 1000) for rank in range(w.size)]
        left, right = everyone[0], everyone[-1]
        for rank in range(1, w.size):
            left, right = left + everyone[rank], right + everyone[w.size - 1 - rank]
        report.check("the order of a sum shows", left.tobytes() != right.tobytes())
    two = np.arange(6, dtype=np.float32).reshape(2, 3) + w.rank
    total = sum(np.arange(6) + rank for rank in range(w.size)).reshape(2, 3)
    report.check("sum of rows", np.array_equal(w.sum(two), total))
    w.sum(np.empty((0, 7), np.float32))


def gathers(report):
    """Even and uneven parts, in rank order."""
    w = world()
    even = w.gather(np.full((2, 3), w.rank, np.int32))
    expected = np.arange(w.size, dtype=np.int32).repeat(6).reshape(w.size, 2, 3)
    report.check("gather", np.array_equal(even, expected))
    parts = [np.empty(r, np.uint8) for r in range(w.size)]      # rank 0 brings nothing
    w.gather(np.full(w.rank, 7 + w.rank, np.uint8), parts)
    report.check("uneven gather", all((p == 7 + r).all() for r, p in enumerate(parts)))


def exchanges(report):
    """Parts of size 0, None, and one of its own to each; two pairs at once, of two types."""
    w = world()

    def size(sender, receiver):
        return (sender * 3 + receiver * 5) % 4 * 1000

    def part(sender, receiver, kind):
        return np.full(size(sender, receiver), 10 * sender + receiver, kind)
    pairs = []
    for kind in (np.float32, np.int16):
        outgoing = [part(w.rank, r, kind) for r in range(w.size)]
        incoming = [np.zeros(size(r, w.rank), kind) for r in range(w.size)]
        pairs.append((outgoing, incoming))
    # what is empty may as well be None, on both sides
    outgoing, incoming = pairs[1]
    pairs[1] = [o if o.size else None for o in outgoing], [i if i.size else None for i in incoming]
    w.exchange(*pairs)
    for kind, (_, incoming) in zip((np.float32, np.int16), pairs):
        right = all((a is None and size(r, w.rank) == 0) or
                    a.tobytes() == part(r, w.rank, kind).tobytes() for r, a in enumerate(incoming))
        report.check(f"exchange of {kind.__name__}", right)
    w.exchange(([None] * w.size, [None] * w.size))
    w.exchange()
    # a ring: nothing to oneself
    after, before = (w.rank + 1) % w.size, (w.rank - 1) % w.size
    outgoing, incoming = [None] * w.size, [None] * w.size
    if w.size > 1:
        outgoing[after] = np.array([w.rank], np.int64)
        incoming[before] = np.zeros(1, np.int64)
        w.exchange((outgoing, incoming))
        report.check("ring", incoming[before][0] == before)


def broadcasts(report):
    """Nothing, a byte, and 10 MB; many in a row without an answer."""
    w = world()
    large = np.random.default_rng(3).integers(0, 256, 10_000_000, np.uint8).tobytes()
    for message in (b"", b"x", large):
        got = w.broadcast(message if w.rank == 0 else None)
        report.check(f"broadcast of {len(message)} bytes", got == message)
    for i in range(200):
        got = w.broadcast(bytes([i]) * i if w.rank == 0 else None)
        report.check(f"broadcast {i} of 200", got == bytes([i]) * i)


def agreements(report):
    """No error, one rank's, every rank's; messages of any length and script."""
    w = world()
    report.check("nobody failed", w.agree(None) is None)
    texts = {"plain": ("the pool has 3 pages", "give it more"),
             "long": ("x" * 50_000, "y" * 50_000),
             "accents": ("dossier introuvable: /modèles/é\n" * 4, "réessayez"),
             "long accents": ("é" * 5_000, "ü" * 5_000),
             "long Chinese": ("模型" * 2_500, "页" * 5_000),
             "long emoji": ("\N{HEDGEHOG}" * 5_000, "\N{HEDGEHOG}" * 5_000),
             "zero bytes": ("a\0b", "\0"),
             "a lone surrogate": ("file \udc80", "")}
    for failing in sorted({0, w.size - 1}):
        for name, (message, hint) in texts.items():
            error = errors.PlanError(message, hint) if w.rank == failing else None
            # rank order, and the failing rank's own words; a long text may be cut
            try:
                answer = w.agree(error)
            except ValueError as e:
                report.check(f"agree, {name}, rank {failing}", False, f"{type(e).__name__}: {e}")
                continue
            rank, told = answer
            right = (rank == failing and type(told) is errors.PlanError
                     and len(told.message) >= min(len(message), 500)
                     and message.startswith(told.message) and hint.startswith(told.hint)
                     and told.rank == (failing if w.size > 1 else None))
            report.check(f"agree, {name}, rank {failing}", right, f"{answer!r:.200}")
    answer = w.agree(errors.ModelError(f"rank {w.rank} has no file", "copy it"))
    report.check("all failed", answer[0] == 0 and type(answer[1]) is errors.ModelError
                 and answer[1].message == "rank 0 has no file" and answer[1].rank is None)
    if w.size > 2:
        answer = w.agree(errors.WorldError(f"{w.rank}") if w.rank in (1, 2) else None)
        report.check("two of them failed", answer[0] == 1 and answer[1].message == "1")
    report.check("and again nobody", w.agree(None) is None)


def barriers(report):
    """Nobody leaves before the last has come."""
    w = world()
    for late in range(w.size):
        came = time.clock_gettime(time.CLOCK_MONOTONIC)     # one clock for a machine's processes
        if w.rank == late:
            time.sleep(0.05)
            came = time.clock_gettime(time.CLOCK_MONOTONIC)
        w.barrier()
        left = time.clock_gettime(time.CLOCK_MONOTONIC)
        times = w.gather(np.array([came, left]))
        report.check(f"barrier, rank {late} late", times[:, 1].min() >= times[:, 0].max())


def idle(report):
    """Ranks that wait in a broadcast leave their cores to others."""
    w = world()
    w.barrier()
    started, before = time.perf_counter(), os.times()
    if w.rank == 0:
        time.sleep(IDLE)
    w.broadcast(b"go" if w.rank == 0 else None)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    share = used / (time.perf_counter() - started)
    report.check("waiting costs little", share < SHARE, f"{share:.2f} of a core")


def body(report):
    """All collectives of one world size."""
    for work in (sums, gathers, exchanges, broadcasts, agreements, barriers, idle):
        work(report)


if __name__ == "__main__":
    run_script(body)
