# python -m pytest tests/test_sample.py
"""Sampling against probabilities and random numbers computed here, in another way."""

import numpy as np
import pytest

from engine.errors import FaultError
from engine.sample import Sampling, sample, uniform

MASK = 2 ** 64 - 1


def philox(counter, key):
    """Philox4x64-10 from its paper (Salmon et al., SC11): four words for a counter and a key."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & MASK, (p0 >> 64) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c


def test_philox_here_gives_the_papers_known_answers():
    assert philox([0] * 4, [0] * 2)[0] == 0x16554D9ECA36314C
    assert philox([MASK] * 4, [MASK] * 2)[0] == 0x87B092C3013FE90B


@pytest.mark.parametrize("seed, position", [(0, 0), (0, 1), (1, 0), (7, 131071), (MASK, 2 ** 40)])
def test_one_number_a_position_is_philox(seed, position):
    word = philox([1, 0, 0, 0], [seed, position])[0]    # NumPy counts up before the first word
    assert uniform(seed, position) == (word >> 11) / 2.0 ** 53


def nucleus(logits, temperature, top_p):
    """The nucleus by the definition, float64: {id: probability} in drawing order."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, held = [], 0.0
    for i in order:
        kept.append(i)
        held += p[i]
        if held >= top_p:
            break
    return {i: p[i] / held for i in kept}


def row(size, seed, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


# --- greedy -------------------------------------------------------------------------------------


def test_greedy_is_the_largest_and_the_lowest_id_on_ties():
    x = row(1000, 1)
    x[[17, 400, 999]] = x.max() + 1
    assert sample(x, Sampling(), 5) == 17
    assert sample(np.zeros(8, np.float32), Sampling(), 0) == 0
    assert sample(np.array([-np.inf, -0.0, 0.0], np.float32), Sampling(), 0) == 1
    assert sample(np.array([3.0], np.float32), Sampling(), 0) == 0


def test_greedy_ignores_seed_and_position():
    x = row(500, 2)
    assert {sample(x, Sampling(seed=s), p) for s in range(5) for p in range(5)} == {int(x.argmax())}


# --- drawn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1.0, 0.999)])
def test_frequencies_are_the_probabilities(temperature, top_p):
    x, draws = row(40, 3), 20000
    expected = nucleus(x, temperature, top_p)
    counts = np.zeros(40)
    for position in range(draws):
        counts[sample(x, Sampling(temperature, top_p, seed=11), position)] += 1
    assert set(np.flatnonzero(counts)) <= set(expected)
    for i, p in expected.items():
        assert abs(counts[i] / draws - p) < 5 * np.sqrt(p * (1 - p) / draws) + 1e-9, i


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.95])
def test_each_draw_is_the_definitions(top_p):
    """Token by token: the running sum over the sorted nucleus passes u where it says."""
    for seed in range(20):
        x = row(300, seed)
        x[5:9] = x[20]          # ties inside
        probabilities = nucleus(x, 0.8, top_p)
        u = uniform(seed, 1000 + seed)
        running, expected = 0.0, None
        for i, p in probabilities.items():
            running += p
            if expected is None and running > u:
                expected = i
        edges = np.cumsum(list(probabilities.values()))
        assert np.abs(edges - u).min() > 1e-9       # no seed of this list sits on an edge
        assert sample(x, Sampling(0.8, top_p, seed), 1000 + seed) == expected


def test_top_p_edges():
    x = row(200, 4)
    best = int(x.argmax())
    for top_p in (0.0, 1e-12, nucleus(x, 1.0, 0.0)[best] * 0.01):
        assert {sample(x, Sampling(1.0, top_p, 3), p) for p in range(50)} == {best}
    ties = np.zeros(100, np.float32)
    assert {sample(ties, Sampling(1.0, 0.0, 3), p) for p in range(50)} == {0}
    # 0.25 of four equal ids is the first alone: a nucleus stops once it holds its share
    four = np.zeros(4, np.float32)
    assert {sample(four, Sampling(1.0, 0.25, 3), p) for p in range(50)} == {0}
    assert {sample(four, Sampling(1.0, 0.26, 3), p) for p in range(200)} == {0, 1}
    assert {sample(four, Sampling(1.0, 1.0, 3), p) for p in range(200)} == {0, 1, 2, 3}


def test_an_impossible_id_is_never_drawn():
    x = np.full(50, -np.inf, np.float32)
    x[[7, 30]] = [1.0, 1.0]
    for top_p in (1.0, 0.9):
        assert {sample(x, Sampling(2.0, top_p, 9), p) for p in range(200)} == {7, 30}


def test_the_smallest_number_draws_no_impossible_id(monkeypatch):
    monkeypatch.setattr("engine.sample.uniform", lambda seed, position: 0.0)
    x = np.array([-np.inf, -np.inf, 1.0, 2.0], np.float32)
    assert sample(x, Sampling(1.0, 1.0), 0) == 2 and sample(x, Sampling(1.0, 0.9), 0) == 3


def test_small_and_large_temperatures():
    x = row(100, 5)
    assert sample(x, Sampling(1e-30, 1.0, 1), 0) == x.argmax()
    assert len({sample(x, Sampling(1e30, 1.0, 1), p) for p in range(400)}) > 90


def test_a_draw_depends_on_seed_and_position_alone():
    x, y = row(400, 6), row(400, 7)
    settings = Sampling(1.0, 0.95, seed=42)
    forward = [sample(x, settings, p) for p in range(30)]
    mixed = {}
    for p in reversed(range(30)):
        sample(y, settings, p + 1)
        mixed[p] = sample(x.copy(), Sampling(1.0, 0.95, seed=42, max_tokens=9, stop_ids=(1,)), p)
    assert forward == [mixed[p] for p in range(30)]
    assert forward != [sample(x, Sampling(1.0, 0.95, seed=43), p) for p in range(30)]
    assert len(set(forward)) > 3


def test_the_row_is_not_modified():
    x = row(100, 8)
    before = x.tobytes()
    sample(x, Sampling(1.0, 0.5, 1), 3)
    assert x.tobytes() == before


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Sampling(), Sampling(1.0, 1.0), Sampling(1.0, 0.9)])
@pytest.mark.parametrize("where", [0, 50, 99])
def test_nan_is_a_fault(settings, where):
    x = row(100, 9)
    x[where] = np.nan
    with pytest.raises(FaultError, match=r"position 77 .*1 of 100 are NaN") as caught:
        sample(x, settings, 77)
    assert caught.value.hint and caught.value.exit_code == 7


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_no_finite_largest_logit_is_a_fault(value):
    with pytest.raises(FaultError, match="not finite"):
        sample(np.full(10, value, np.float32), Sampling(), 0)
