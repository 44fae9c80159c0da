# python -m pytest tests/test_project.py
"""The byte accounting of bench/project.py: against published figures and against a made tree."""

import pathlib
import sys
from dataclasses import replace

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "bench"))

import project  # noqa: E402
import release  # noqa: E402
from engine import random_weights  # noqa: E402
from engine.checkpoint import expected_tensors  # noqa: E402
from engine.memory import weight_bytes  # noqa: E402
from engine.release import Unwritten, release_shape  # noqa: E402
from engine.shape import Shape, part  # noqa: E402

SHAPE = release_shape()
WORLDS = (1, 2, 3, 4, 6, 8)


def test_release_shape_is_the_releases():
    whole = Shape.from_config(release.CONFIG)
    assert SHAPE == replace(whole, mtp=0)
    eight = release_shape(8)
    assert eight == replace(SHAPE, layers=8, layer_types=SHAPE.layer_types[:8],
                            mlp_types=SHAPE.mlp_types[:8])
    assert eight.dsa_layers == (3, 7) and eight.mlp_types.count("sparse") == 5
    matrices = [name for name in expected_tensors(SHAPE) if name.endswith("weight")]
    assert len(matrices) > 36_000
    assert all(Unwritten.kind(name) == release.fp8_kind(name) for name in matrices)


def test_weights_of_a_token_are_what_others_counted():
    """Decode traffic of the FP8 release at one sequence, GB, as another engine gives it."""
    sizes = project.weight_bytes(SHAPE, part(SHAPE, 0, 1), 8)
    theirs = {"KDA": 9.37, "experts": 8.46, "DSA": 1.48, "head": 1.27, "shared experts": 1.06,
              "dense MLPs": 0.45, "indexer": 0.16}
    for name, gb in theirs.items():
        assert abs(sizes[name] / 1e9 - gb) < 0.006, (name, sizes[name])
    rest = sizes["routers"] + sizes["hyper-connections"] + sizes["norms"]
    assert abs(rest / 1e9 - 0.17) < 0.006 and abs(sum(sizes.values()) / 1e9 - 22.4) < 0.05


def test_all_weights_are_the_releases_file():
    """328.33 GB on disk, less the vision tower (347 BF16 tensors, under 2 GB) and the embedding."""
    own = part(SHAPE, 0, 1)
    held = sum(project.weight_bytes(SHAPE, own, SHAPE.experts).values())
    draft = project.draft_bytes(SHAPE, own)
    assert abs(draft / 1e9 - 7.49) < 0.01
    left = 328_326_771_576 - held - draft - 2 * SHAPE.vocab * SHAPE.hidden
    assert 0 < left < 2e9, left


def test_states_are_twice_what_a_sequence_keeps():
    """136 MiB of float32 KDA states a sequence; convolution rows in float32, twice its BF16."""
    assert project.state_bytes(SHAPE, part(SHAPE, 0, 1)) == 2 * (142_606_336 + 2 * 5_013_504)


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_share_what_is_divided(world):
    ranks = [project.weight_bytes(SHAPE, part(SHAPE, r, world), 8) for r in range(world)]
    alone = project.weight_bytes(SHAPE, part(SHAPE, 0, 1), 8)
    for name in ("experts", "shared experts", "dense MLPs", "head"):
        assert sum(r[name] for r in ranks) == alone[name], name
    for name in ("indexer", "routers", "hyper-connections", "norms"):
        assert all(r[name] == alone[name] for r in ranks), name
    assert max(ranks, key=lambda r: sum(r.values())) == ranks[0]


@pytest.mark.parametrize("world", (1, 3))
def test_weights_are_the_bytes_of_a_made_tree(world, monkeypatch):
    """Every array of `random_device_weights`, made here without a device, and none besides."""
    monkeypatch.setattr(random_weights.cuda, "device_array", np.empty, raising=False)
    monkeypatch.setattr(random_weights.cuda, "to_device", np.asarray, raising=False)
    monkeypatch.setattr(random_weights.cuda, "synchronize", lambda: None, raising=False)
    for fill in ("fill_codes", "fill_bf16"):
        monkeypatch.setattr(random_weights, fill, lambda *args: None)
    monkeypatch.setattr(random_weights, "upload", lambda tree: tree)
    shape = replace(release_shape(4), experts=16)
    own = part(shape, 0, world)
    tree = random_weights.random_device_weights(shape, own, 4, 1)

    def count(node):
        if isinstance(node, tuple):
            return sum(map(count, node))
        return node.nbytes if isinstance(node, np.ndarray) else 0

    made = count((tree.layers, tree.norm, tree.head))
    assert made == sum(project.weight_bytes(shape, own, 16).values())
    assert made == sum(weight_bytes(shape, own, Unwritten.kind, "cuda").values())
    assert tree.embed.shape == (shape.vocab, shape.hidden) and tree.mtp is None


def test_kv_of_a_row():
    """11 DSA layers: 512 pools of 4 and up to 3 rows attended, pools scored past 2,048."""
    assert project.kv_bytes(SHAPE, 2048, 1) == (0, 11 * 2048 * 1024)
    assert project.kv_bytes(SHAPE, 1 << 20, 1) == (11 * 262_144 * 256, 11 * 2051 * 1024)
    assert project.kv_bytes(SHAPE, 1 << 20, 6) == (11 * 43_691 * 256, 11 * 342 * 1024)


def test_collectives_of_a_token():
    assert project.collectives(SHAPE, 1) == []
    found = {name: (n, size) for name, n, size in project.collectives(SHAPE, 2)}
    assert found["sums of layers"] == (90, 16_384)
    assert found["candidates, queries"] == (11, 4096 + 32 * 512 * 4)
    assert found["partials"] == (11, 32 * 513 * 4)
    assert found["logits"] == (1, 4 * 77_440)
    whole = project.collectives(SHAPE, 2, whole=True)
    assert sum(n for _, n, _ in whole) == 92


def test_a_step_is_its_bytes_over_its_speeds():
    options = project.parse(["--gemv", "1", "--attend", "1", "--score", "1", "--state", "1",
                             "--launch", "0", "--latency", "0", "--peer", "0", "--link", "1e9"])
    own = part(SHAPE, 0, 3)
    total = sum(project.step_ms(SHAPE, 131_072, 3, options, 100.0).values())
    moved = (sum(project.weight_bytes(SHAPE, own, 8).values()) + project.state_bytes(SHAPE, own)
             + sum(project.kv_bytes(SHAPE, 131_072, 3)))
    assert total == pytest.approx(moved / 1e8, rel=1e-6)
    slower = project.parse(["--gemv", "0.5"])
    assert project.step_ms(SHAPE, 131_072, 3, slower, 100.0)["weights"] == pytest.approx(
        2 * project.step_ms(SHAPE, 131_072, 3, options, 100.0)["weights"])


def test_tables_have_a_row_for_each_world_and_context():
    lines = list(project.tables(project.parse(["--world", "2", "6", "--context", "4096", "65536"])))
    rows = [line for line in lines if line.startswith(("| 2 ", "| 6 "))]
    assert len(rows) == 2 + 4
    assert len({line.count("|") for line in rows[2:]}) == 1
