# python -m pytest tests/model/test_embed_head.py
"""Embedding rows read in place, bit for bit; logits of a vocabulary slice against float64."""

import numpy as np
import pytest

from engine.linear import pack
from engine.model.embed import embed
from engine.model.head import head


def bits_of(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("tokens", [[0], [49], [7, 7, 0, 49, 3], []])
def test_embed_reads_rows_of_a_mapped_bf16_table(tmp_path, tokens):
    table = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)
    bits_of(table).tofile(tmp_path / "table")
    mapped = np.memmap(tmp_path / "table", np.uint16, "r", shape=(50, 24))
    out = embed(mapped, np.array(tokens, np.int32))
    assert out.dtype == np.float32 and out.shape == (len(tokens), 24)
    assert out.flags.c_contiguous and out.flags.writeable
    truncated = (table.view(np.uint32) & 0xFFFF0000).view(np.float32)       # what its bits mean
    assert out.tobytes() == truncated[tokens].tobytes() if tokens else out.size == 0


def test_embed_copies_rows_of_a_float32_table():
    table = np.random.default_rng(1).standard_normal((9, 6)).astype(np.float32)
    before = table.tobytes()
    out = embed(table, np.array([8, 2], np.int32))
    assert out.tobytes() == table[[8, 2]].tobytes() and out.flags.c_contiguous
    out[:] = 0
    assert table.tobytes() == before


def test_embed_keeps_every_bit_pattern():
    table = np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(256, 256)
    out = embed(table, np.arange(256, dtype=np.int32))
    assert (out.view(np.uint32) == table.astype(np.uint32) << 16).all()


def test_head_by_hand():
    # rows (1, 0), (0, 1), (1, -1) of the vocabulary for the hidden state (3, 4)
    weight = pack([np.array([[1, 0], [0, 1], [1, -1]], np.float32)])
    assert head(np.array([[3, 4]], np.float32), weight).tolist() == [[3, 4, -1]]


@pytest.mark.parametrize("bf16", [True, False])
def test_head_slices_are_the_whole_vocabulary(bf16):
    # 4 * 512 roundings of sums up to sqrt(512): test_linear.py's bound
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((5, 512)).astype(np.float32)
    weight = rng.standard_normal((300, 512)).astype(np.float32)
    weight = (weight.view(np.uint32) & 0xFFFF0000).view(np.float32) if bf16 else weight
    stored = bits_of(weight) if bf16 else weight
    whole = head(hidden, pack([stored]))
    exact = hidden.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.allclose(whole, exact, rtol=0, atol=4 * 512 * 2.0 ** -24)
    cuts = [0, 128, 128, 256, 300]                  # one rank has no row
    parts = [head(hidden, pack([stored[a:b]])) for a, b in zip(cuts, cuts[1:])]
    assert parts[1].shape == (5, 0)
    assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()
    for i in range(5):
        assert head(hidden[i:i + 1], pack([stored])).tobytes() == whole[i:i + 1].tobytes()
