# python -m pytest tests/test_commands.py
"""plan and bench: what they print, and what they refuse."""

import re

import pytest

from engine import bench, plan
from engine.backend import choose
from engine.config import fit, parse
from engine.errors import PlanError, UsageError
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
    table = text.partition("\n\n")[2]
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


def test_layers_of_real_dimensions_are_for_bench_on_a_device(world):
    with pytest.raises(UsageError, match="bench only"):
        parse(["--layers", "4", "--prompt", "x"])
    with pytest.raises(PlanError, match="needs a CUDA device"):
        bench.main(config_of("bench", "--layers", "4"), world)


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
