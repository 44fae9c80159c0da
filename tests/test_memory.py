# python -m pytest tests/test_memory.py
"""The plan of memory: the design's table and examples, and that it says what is then allocated."""

import json
from dataclasses import replace

import pytest

from engine.config import Config
from engine.errors import PlanError
from engine.memory import (Place, Plan, check_memory, plan, pool_pages, token_bytes, weight_bytes,
                           window_pages)
from engine.pool.lease import Pool
from engine.pool.owner import class_size
from engine.pool.page import Pages, rank_pages
from engine.pool.state import States
from engine.pool.table import PageTable
from engine.shape import Shape, part
from engine.weights import load_weights, open_model
from release import CONFIG, fp8_kind

RELEASE = Shape.from_config(CONFIG)
LONG = Config(page_rows=512, context=131072, parallel=4)
MILLION = replace(LONG, context=1 << 20, pages=2056)


# ---- the design's numbers ---------------------------------------------------------------------

@pytest.mark.parametrize("latents, keys, draft, bytes_by_world", [
    (False, False, False, {1: 13056, 2: 13056, 3: 13056, 6: 13056}),
    (True, False, False, {2: 7424, 3: 5547, 6: 3669}),
    (True, False, True, {2: 6912, 3: 4864, 6: 2816}),
    (True, True, False, {2: 7072, 3: 5077, 6: 3083}),
    (True, True, True, {1: 13056, 2: 6528, 3: 4352, 6: 2176})])
def test_bytes_a_token(latents, keys, draft, bytes_by_world):
    for world, size in bytes_by_world.items():
        assert token_bytes(RELEASE, world, latents, keys, draft) == size


@pytest.mark.parametrize("context, page_rows, overhang, pages", [
    (131072, 512, 1, 257), (131072, 512, 0, 256), (1 << 20, 512, 1, 2049), (63, 64, 1, 1),
    (64, 64, 1, 2), (1, 64, 1, 1)])
def test_window_pages(context, page_rows, overhang, pages):
    assert window_pages(context, page_rows, overhang) == pages


@pytest.mark.parametrize("placement", ["owner", "striped"])
def test_131072_by_4_serves_on_two_ranks(placement):
    found = plan(replace(LONG, placement=placement), RELEASE, 2, fp8_kind)
    assert found.window == 257 and found.classes == (514, 514) and found.windows >= 1
    assert found.token_bytes == 6528


def test_owner_refuses_a_million_by_name():
    with pytest.raises(PlanError) as caught:
        plan(replace(MILLION, placement="owner"), RELEASE, 2, fp8_kind)
    said = str(caught.value)
    for number in ("--context 1048576", "2049 pages", "2056 pages", "1028 a class", "owner"):
        assert number in said
    assert "--placement striped" in caught.value.hint and "--pages 4098" in caught.value.hint
    assert "--context of at most 526335" in caught.value.hint


def test_striped_serves_one_window_of_a_million_at_a_time():
    found = plan(replace(MILLION, placement="striped"), RELEASE, 2, fp8_kind)
    assert (found.window, found.classes, found.windows) == (2049, (1028, 1028), 1)


@pytest.mark.parametrize("config, world", [
    (replace(MILLION, placement="owner"), 2), (replace(MILLION, pages=2048), 2),
    (replace(LONG, pages=100, placement="owner"), 3), (replace(LONG, pages=0), 6),
    (replace(LONG, pages=200, replicate=512 * 50), 3), (replace(LONG, pages=255, split=False), 2)])
def test_what_a_refusal_advises_is_taken(config, world):
    with pytest.raises(PlanError) as caught:
        plan(config, RELEASE, world, fp8_kind)
    for advice in caught.value.hint.split(" or "):
        words = advice.split()
        option, value = words[0].strip("-"), words[-1 if "most" in words else 1]
        value = value if option == "placement" else int(value)
        assert plan(replace(config, **{option: value}), RELEASE, world, fp8_kind).windows >= 1


# ---- the pool ---------------------------------------------------------------------------------

@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("placement, replicate, split", [
    ("striped", 0, True), ("striped", 1024, True), ("striped", 1024, False),
    ("striped", 1 << 20, True), ("owner", 0, True), ("owner", 0, False)])
def test_the_default_pool_holds_parallel_conversations(mini, world, placement, replicate, split):
    """A real Pool of those pages grants `parallel` leases of `context` tokens, and the windows."""
    shape = Shape.from_config(json.loads((mini / "config.json").read_text()))
    for context in (4096, 5000, 64 * 6 * 8, 100):
        config = Config(context=context, parallel=4, page_rows=64, placement=placement,
                        replicate=replicate, split=split)
        pages, replicated = pool_pages(config, world)
        classes = world if split else 1
        below = replicate // 64 if classes > 1 else 0

        def grants(size):
            pool = Pool(pages, classes, placement, below, replicated)
            count = 0
            while count < 1000 and pool.grant(size) is not None:
                count += 1
            return count

        assert grants(-(-context // 64)) >= 4
        found = plan(config, shape, world, lambda name: "BF16")
        if found.classes != (0,) * classes:         # all below R: the region alone decides
            assert min(found.windows, 4) == min(grants(found.window), 4)
        assert found.classes == tuple(class_size(pages, classes, c) for c in range(classes))


def test_explicit_pages_are_taken_as_given():
    config = replace(LONG, pages=1000, replicate=5120)
    assert pool_pages(config, 3) == (1000, 40)
    assert pool_pages(config, 1) == (1000, 0)


# ---- what is allocated ------------------------------------------------------------------------

@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("kv_dtype, placement, replicate", [
    ("bf16", "striped", 256), ("float32", "owner", 0)])
def test_the_plan_is_what_is_allocated(mini, world, kv_dtype, placement, replicate):
    shape, checkpoint = open_model(str(mini))
    config = Config(context=1000, parallel=3, kv_dtype=kv_dtype, placement=placement,
                    replicate=replicate)
    found = plan(config, shape, world, checkpoint.kind, scratch=[("scratch", 12345)])
    pages, replicated = pool_pages(config, world)
    for rank in range(world):
        own = part(shape, rank, world)
        sizes = dict(found.ranks[rank])
        local = Pages(shape, rank_pages(pages, world, rank, replicated), 64, kv_dtype)
        assert sizes.pop("KV latents") == sum(a.nbytes for a in local.latents)
        assert sizes.pop("pooled keys") == sum(a.nbytes for a in local.keys)
        states = States(shape, own, 3)
        assert sizes.pop("KDA states") == states.kda.nbytes
        assert sizes.pop("convolution states") == states.conv.nbytes
        assert sizes.pop("index tails") == states.tail_k.nbytes + states.tail_g.nbytes
        table = PageTable(3, found.window, world, replicated)
        assert sizes.pop("page tables") == table.bytes
        assert sizes.pop("scratch") == 12345
        assert sizes == load_weights(checkpoint, shape, own).bytes
        assert found.total(rank) == sum(size for _, size in found.ranks[rank])


def test_bf16_weights_of_the_release():
    """Against the BF16 release's 642,676,397,788 bytes on disk: the rest is the vision tower, about
    1.1 GB, less the padding of 24-row mHC projections to 64; the embedding stays in the file.
    """
    held = sum(weight_bytes(RELEASE, part(RELEASE, 0, 1), lambda name: "BF16").values())
    embedding = 154880 * 4096 * 2
    assert 0.9e9 < 642_676_397_788 - held - embedding < 1.2e9


def test_ranks_share_the_releases_weights():
    alone = weight_bytes(RELEASE, part(RELEASE, 0, 1), fp8_kind)
    assert alone["routers"] == 42 * (320 * 4096 * 2 + 288 * 4)
    assert alone["output head"] == 154880 * 4096 * 2
    assert alone["experts"] == 42 * 288 * 3 * 2048 * 4096 * 4       # FP8 is held as float32
    for world in (2, 3, 6, 8):
        ranks = [weight_bytes(RELEASE, part(RELEASE, r, world), fp8_kind) for r in range(world)]
        for name in ("experts", "shared experts", "dense MLPs", "output head"):
            assert sum(sizes[name] for sizes in ranks) == alone[name]
        for name in ("indexer", "hyper-connections", "norms", "routers"):
            assert all(sizes[name] == alone[name] for sizes in ranks)
        assert all(sizes["embedding"] == 0 for sizes in ranks)


def test_memory_that_is_short_is_refused_by_rank():
    sizes = [(("KV latents", size << 30), ("states", 1 << 30)) for size in (3, 4)]
    made = Plan(1, (1, 1), 0, 1, 1, tuple(sizes))
    check_memory(made, [Place(1, 9 << 30, 10 << 30, 0)] * 2)
    check_memory(made, [Place(1, 4 << 30, 10 << 30, 0), Place(2, 5 << 30, 10 << 30, 0)])
    with pytest.raises(PlanError, match="^ranks 0, 1 share a memory and need 9.00 GiB together; "
                       r"rank 1 needs 5.00 GiB \(KV latents 4.00 GiB, states 1.00 GiB, ...\); "
                       "8.99 GiB of 10.00 GiB are free; by whom$") as caught:
        check_memory(made, [Place(1, (9 << 30) - (10 << 20), 10 << 30, 0)] * 2,
                     lambda ranks: "by whom" if ranks == [0, 1] else "")
    assert caught.value.rank is None and caught.value.hint
    with pytest.raises(PlanError, match="^rank 1 needs 5.00 GiB"):
        check_memory(made, [Place(1, 4 << 30, 10 << 30, 0), Place(2, 4 << 30, 10 << 30, 0)])


def test_states_of_the_release():
    """KDA 136 MiB a conversation; convolutions twice their BF16 size, 34 x 3 x 24,576 values."""
    sizes = dict(plan(replace(LONG, parallel=1), RELEASE, 1, fp8_kind).ranks[0])
    assert sizes["KDA states"] == 142_606_336
    assert sizes["convolution states"] == 2 * 5_013_504
    assert sizes["index tails"] == 12 * 3 * 2 * 128 * 4


def test_small_models_have_plans(oracle):
    for name in ("tiny-bf16", "tiny-fp8"):
        shape = Shape.from_config(json.loads((oracle / name / "config.json").read_text()))
        found = plan(Config(context=shape.window), shape, 8, lambda name: "F32")
        assert len(found.ranks) == 8 and found.windows == 3      # of 129 pages, 17 in class 0
        assert found.classes == (65,) * 4 + (64,) * 4
