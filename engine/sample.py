"""One row of logits -> one token, from the row, the settings and the position alone.

Greedy (temperature 0) is the largest logit, the lowest id on ties. Otherwise

    weight[i] = exp((logit[i] - max) / temperature)                       float64
    order     = ids by weight descending, then id ascending
    nucleus   = shortest beginning of that order that holds top_p of the weight, at least one id
    token     = first id of the nucleus at which the running weight exceeds u * (nucleus weight)

with u in [0, 1) drawn by Philox4x64-10 (Salmon et al. 2011) keyed by (seed, position): one number a
position, so how many rows a step verified, or what ran beside it, cannot change a sampled reply.
top_p 1 keeps every id and walks them by id, which needs no order. Sums run in the order written;
nothing here depends on a batch. NaN, or no finite largest logit, is a FaultError.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.errors import FaultError
from engine.host import NJIT


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one reply is drawn. max_tokens counts the reply's tokens; stop_ids end it.

    logprobs: None, or how many alternatives to report with each token's log-probability.
    """

    temperature: float = 0.0    # 0 is greedy
    top_p: float = 1.0          # 0..1; 0 keeps one id
    seed: int = 0               # 0..2^64 - 1
    max_tokens: int = 1
    stop_ids: tuple = ()
    logprobs: int | None = None


def sample(logits, sampling, position):
    """The token id at `position` (of the emitted token, counted from the conversation's start).

    logits: [vocab] float32, contiguous, not modified. Raises FaultError on NaN or +inf.
    """
    assert logits.ndim == 1 and logits.dtype == np.float32 and logits.size
    best = _argmax_host(logits)
    if best < 0 or not math.isfinite(logits[best]):
        raise FaultError(f"the logits at position {position} are not finite "
                         f"({int(np.isnan(logits).sum())} of {logits.size} are NaN)",
                         "run with --poison to find unwritten rows; check the checkpoint")
    if sampling.temperature == 0.0:
        return int(best)
    weights = np.empty(logits.size, np.float64)
    total = _weigh_host(logits, logits[best], sampling.temperature, weights)
    ids = _nucleus(weights, total, sampling.top_p)
    u = uniform(sampling.seed, position)
    return int(ids[_draw_host(weights[ids], u, sampling.top_p * total)])


class Choice(NamedTuple):
    """A token; its log-probability and ((id, log-probability), ...) of the best where asked for."""

    token: int
    logprob: float | None = None
    top: tuple = ()


def choose(logits, sampling, position):
    """`sample` with the log-probabilities that `sampling` asks for: a Choice.

    They are those of the logits as they are, before temperature and top_p; float64.
    """
    token = sample(logits, sampling, position)
    if sampling.logprobs is None:
        return Choice(token)
    log_total = _log_total_host(logits, logits.max())
    best = _best(logits, sampling.logprobs)
    return Choice(token, float(logits[token]) - log_total,
                  tuple((int(i), float(logits[i]) - log_total) for i in best))


def _best(logits, count):
    """Ids of the `count` largest logits, lower id first on ties."""
    if count == 0:
        return ()
    least = np.partition(logits, -count)[-count] if count < logits.size else logits.min()
    ids = np.flatnonzero(logits >= least)
    return ids[np.lexsort((ids, -logits[ids]))][:count]


@njit("f8(f4[::1], f4)", **NJIT)
def _log_total_host(logits, largest):
    """log of the sum of exp(logits), ids ascending."""
    total = 0.0
    for logit in logits:
        total += math.exp(np.float64(logit) - np.float64(largest))
    return np.float64(largest) + math.log(total)


def uniform(seed, position):
    """The float64 in [0, 1) that belongs to (seed, position): 53 bits of Philox's first word."""
    word = np.random.Philox(key=np.array([seed, position], np.uint64)).random_raw()
    return (word >> 11) * 2.0 ** -53


def _nucleus(weights, total, top_p):
    """Candidate ids, int64, in drawing order: all by id at top_p 1, else the heavy ones by weight.

    Ids that weigh at most (1 - top_p) * total / vocab weigh together no more than the share that
    top_p leaves out, and they come last: leaving them out of the sort leaves the nucleus as it is.
    """
    if top_p >= 1.0:
        return np.arange(weights.size)
    heavy = np.flatnonzero(weights > (1.0 - top_p) * total / weights.size)
    if not heavy.size:      # all weights equal and top_p 0
        heavy = np.arange(weights.size)
    return heavy[np.argsort(-weights[heavy], kind="stable")]


@njit("int64(float32[::1])", **NJIT)
def _argmax_host(row):
    """Index of the largest value, the first on ties; -1 where there is a NaN."""
    best = 0
    for i in range(row.shape[0]):
        if row[i] != row[i]:
            return -1
        if row[i] > row[best]:
            best = i
    return best


@njit("float64(float32[::1], float32, float64, float64[::1])", **NJIT)
def _weigh_host(logits, top, temperature, weights):
    """weights[i] = exp((logits[i] - top) / temperature); returns their sum, ids ascending."""
    total = 0.0
    for i in range(logits.shape[0]):
        weights[i] = math.exp((np.float64(logits[i]) - np.float64(top)) / temperature)
        total += weights[i]
    return total


@njit("int64(float64[::1], float64, float64)", **NJIT)
def _draw_host(weights, u, share):
    """Index of the drawn weight: the beginning that holds `share` is the nucleus, u in [0, 1)."""
    kept, held = 0, 0.0
    while kept < weights.shape[0] and (kept == 0 or held < share):
        held += weights[kept]
        kept += 1
    target, running, last = u * held, 0.0, 0
    for i in range(kept):
        running += weights[i]
        if weights[i] > 0.0:
            last = i
        if running > target:
            return i
    return last
