# python -m pytest tests/test_commands.py
"""plan and bench: what they print, and what they refuse."""

import hashlib
import re

import numpy as np
import pytest

from engine import bench, plan
from engine.backend import choose, device_memory, open_weights
from engine.config import fit, parse
from engine.errors import PlanError
from engine.release import release_shape
from engine.shape import Shape
from engine.weights import open_model
from engine.world import World


@pytest.fixture(scope="module")
def world():
    return World.join()


def config_of(*argv):
    config = parse([*argv, "--backend", "host"])
    shape, _ = open_model(config.model)
    assert isinstance(shape, Shape)
    return fit(config, shape)


def test_plan_prints_what_is_then_allocated(world, capsys):
    config = config_of("plan", "--context", "4096", "--parallel", "2")
    plan.main(config, world)
    text = capsys.readouterr().out
    shape, checkpoint = open_model(config.model)
    total = plan.plan_of(config, shape, checkpoint, 1).total(0)
    assert "1 rank, context 4,096 tokens, 2 conversations, KV bf16, not split" in text
    assert re.search(rf"^total +{total:,}$", text, re.M)
    assert re.search(r"^free now +[\d,]+$", text, re.M) and "does not fit" not in text
    table = text.partition("\n\n")[2].partition("free now")[0]
    sizes = [int(n.replace(",", "")) for n in re.findall(r"^[A-Za-z].*? +([\d,]+)$", table, re.M)]
    assert sum(sizes[:-1]) == sizes[-1] == total


def test_a_pool_without_room_for_one_window_is_refused(world):
    with pytest.raises(PlanError, match="3 pages"):
        plan.main(config_of("plan", "--context", "4096", "--pages", "3"), world)


def test_bench_prints_a_row_a_test_and_the_memory(world, capsys, monkeypatch):
    monkeypatch.setattr(bench, "DEPTHS", (0, 64))
    monkeypatch.setattr(bench, "PROMPT", 32)
    monkeypatch.setattr(bench, "GENERATED", 4)
    bench.main(config_of("bench"), world)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| model | ranks | KV | test | t/s |"
    rows = [re.fullmatch(r"\| mini \| 1 \| whole \| (\S+ @ d\d+) \| (\S+) ± (\S+) \|", line)
            for line in lines[2:-1]]
    assert [row[1] for row in rows] == ["pp32 @ d0", "tg4 @ d0", "pp32 @ d64", "tg4 @ d64"]
    assert all(float(row[2]) > 0 for row in rows)
    assert re.fullmatch(r"rank 0: \d+ MiB resident = \d+ Python \+ \d+; planned \d+ \(.*\), "
                        r"KV whole", lines[-1])


RANDOM = ("--weights", "random", "--shape", "glm-5.3-flash", "--layers", "4")


@pytest.mark.parametrize("command", [bench, plan])
def test_random_weights_are_made_by_a_device_only(world, command, monkeypatch):
    monkeypatch.setattr("engine.backend.available", lambda: False)
    for more, why in (((), "no CUDA device answers"),
                      (("--backend", "host"), "the backend is host")):
        with pytest.raises(PlanError, match=f"--weights random: {why}"):
            command.main(fit(parse(["plan", *RANDOM, *more]), release_shape(4)), world)


def test_the_plan_of_random_weights_is_the_releases(monkeypatch):
    monkeypatch.setattr("engine.backend.available", lambda: True)
    config = choose(fit(parse(["plan", *RANDOM, "--context", "131072"]), release_shape(4)))
    shape, source = open_weights(config)
    sizes = dict(plan.plan_of(config, shape, source, 1).ranks[0])
    assert shape == release_shape(4) and "random" in source.notes[0]
    assert sizes["experts"] == 288 * 3 * 2048 * 4096 * (1 + 4 / 128 ** 2)
    assert sizes["output head"] == 154880 * 4096 * 2 and sizes["reserve"] == plan.DEVICE_RESERVE


# ---- memory ------------------------------------------------------------------------------------

class Ranks:
    """A world whose other ranks measured what `rows` says: (key, free, total, pid) each."""

    def __init__(self, rank, rows):
        self.rank, self.size, self.rows = rank, len(rows), rows

    def barrier(self):
        pass

    def gather(self, mine):
        assert mine.dtype == np.int64 and len(mine) == len(self.rows[0])
        return np.array([mine if r == self.rank else row for r, row in enumerate(self.rows)])


def admitted(monkeypatch, free, rows, rank=0, name="GPU-a"):
    """plan.admit on `rank` of a device with `free` bytes of 100 GiB; the words of its refusal."""
    monkeypatch.setattr("engine.backend.available", lambda: True)
    monkeypatch.setattr(plan.cuda, "current_context", lambda: None, raising=False)
    monkeypatch.setattr(plan, "memory_here", lambda backend: (name, free, 100 << 30))
    monkeypatch.setattr(plan, "users_of", lambda places, ranks: "others on it: x (pid 9) 7 MiB")
    config = choose(fit(parse([*RANDOM, "--prompt-ids", "5", "--context", "131072"]),
                        release_shape(4)))
    shape, source = open_weights(config)
    made = plan.plan_of(config, shape, source, len(rows))
    try:
        plan.admit(config, shape, source, Ranks(rank, rows))
        return made, None
    except PlanError as error:
        assert error.rank is None and "--pages" in error.hint
        return made, str(error)


def test_a_device_that_is_too_small_is_refused_with_the_numbers(monkeypatch):
    made, said = admitted(monkeypatch, 0, [(0, 0, 0, 0)])
    assert admitted(monkeypatch, made.total(0), [(0, 0, 0, 0)])[1] is None
    for part in (f"rank 0 needs {made.total(0) / 2 ** 30:.2f} GiB (experts ", "0.00 GiB of 100.00",
                 "pid 9"):
        assert part in said
    said = admitted(monkeypatch, made.total(0) - 1, [(0, 0, 0, 0)])[1]
    assert "rank 0 needs" in said and len(said) < 600       # a longer one is cut on its way


def test_ranks_that_share_a_device_are_counted_together_and_all_say_the_same(monkeypatch):
    size = admitted(monkeypatch, 1 << 50, [(0, 0, 0, 0)] * 2)[0].total(0)
    own = int.from_bytes(hashlib.sha256(b"GPU-a").digest()[:7], "big")
    free = 2 * size - 1

    def rows(*keys):
        return [(key, free, 100 << 30, 7) for key in keys]
    apart = admitted(monkeypatch, free, rows(own, own + 1))[1]
    assert apart is None
    said = {admitted(monkeypatch, free, rows(own, own), rank)[1] for rank in (0, 1)}
    assert len(said) == 1 and "ranks 0, 1 share a memory and need" in said.pop()
    # rank 2 alone is short: rank 0, whose device has room, says so too
    third = rows(own, own, own + 1)
    third[2] = own + 1, 5, 100 << 30, 7
    assert "rank 2 needs" in admitted(monkeypatch, 1 << 40, third)[1]


def test_the_host_counts_the_machines_memory():
    name, free, total = plan.memory_here("host")
    assert 0 < free < total and len(name) > 30


def test_memory_that_runs_out_all_the_same_is_named():
    for error in (MemoryError("no 8 TiB"), RuntimeError("[2] CUDA_ERROR_OUT_OF_MEMORY")):
        with pytest.raises(PlanError, match="in spite of the plan") as caught:
            with device_memory(3):
                raise error
        assert caught.value.rank == 3
    with pytest.raises(RuntimeError, match="another"), device_memory(0):
        raise RuntimeError("another")


def test_what_only_a_device_can_do_is_refused_without_one(monkeypatch):
    monkeypatch.setattr("engine.backend.available", lambda: False)
    with pytest.raises(PlanError, match="no CUDA device answers"):
        choose(parse(["--backend", "cuda"]))
    with pytest.raises(PlanError, match="the backend is host"):
        choose(parse(["--transport", "pinned"]))
    assert choose(parse([])).backend == "host"


def test_float32_kv_goes_to_the_host_even_where_a_device_answers(monkeypatch):
    monkeypatch.setattr("engine.backend.available", lambda: True)
    assert choose(parse(["--kv-dtype", "float32"])).backend == "host"
    assert choose(parse([])).backend == "cuda"
    with pytest.raises(PlanError, match="for the host backend"):
        choose(parse(["--kv-dtype", "float32", "--backend", "cuda"]))
