"""mpirun -np W python tests/device/rank_history.py [CASE ...]: prompts whose history lies
on W ranks of one device, by layout and chunk size.

Chunks of 300 gather the pooled keys of the longest prompt at first and exchange candidates later;
its last rows lie in a second stretch. Rank 0 prints a JSON line for each case and layout:
{"case: layout": [digest of the last logits, seconds]}.
"""

import hashlib
import json
import pathlib
import sys
import time
from dataclasses import replace

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from engine.config import fit, parse, prepare_environment  # noqa: E402

prepare_environment()

import numpy as np  # noqa: E402

from engine.backend import load  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.forward import Rows  # noqa: E402
from engine.weights import open_model  # noqa: E402
from engine.world import World  # noqa: E402

CASES = {       # model, tokens of the prompt, {layout: (chunk, options)}: one digest for all
    "long": ("mini", 34_000, {
        "off": (2048, ("--split", "off")), "striped": (300, ()), "whole chunks": (2048, ()),
        "owner": (300, ("--placement", "owner")),
        "R = 1024": (300, ("--replicate", 1024, "--poison", "--shuffle-pages"))}),
    "pages of 512": ("mini", 6000, {
        "off": (2048, ("--split", "off", "--page-rows", 512)),
        "striped": (300, ("--page-rows", 512)),
        "owner": (300, ("--placement", "owner", "--page-rows", 512))}),
    "tiny": ("tiny-bf16", 300, {
        "off": (300, ("--split", "off")), "striped": (100, ()),
        "owner": (7, ("--placement", "owner"))})}


def main(world):
    for name in sys.argv[1:] or CASES:
        model, count, layouts = CASES[name]
        folder = ROOT / ("models" if model == "mini" else "tests/oracle") / model
        shape, checkpoint = open_model(str(folder))
        shape = replace(shape, window=count + 64)
        ids = np.random.default_rng(1).integers(2, 512, count)
        weights = load(parse(["--backend", "cuda"]), checkpoint, shape, world)
        for layout, (chunk, options) in layouts.items():
            argv = [str(a) for a in ("--model", folder, "--backend", "cuda", "--context",
                                     count + 64, "--parallel", 2, *options)]
            engine = Engine(fit(parse(argv), shape), world, shape, weights)
            started = time.perf_counter()
            digest = logits_digest(engine, ids, chunk)
            seconds = round(time.perf_counter() - started, 2)
            if world.rank == 0:
                print(json.dumps({f"{name}: {layout}": [digest, seconds]}), flush=True)


def logits_digest(engine, ids, chunk):
    """sha256 of a prompt's last logits, on rank 0."""
    digest, config = hashlib.sha256(), engine.config
    engine.backend.open(0, engine.pool.grant(-(-len(ids) // config.page_rows)))
    for first in range(0, len(ids), chunk):
        part = ids[first:first + chunk]
        at = np.arange(first, first + len(part))
        last = first + chunk >= len(ids)
        logits = engine.backend.prefill(Rows.of(part, np.zeros(len(part)), at), last)
        if logits is not None:
            digest.update(logits.tobytes())
    engine.backend.close(0)
    return digest.hexdigest()


if __name__ == "__main__":
    main(World.join())
