"""mpirun -np W python tests/device/rank_walk.py: replies of W ranks that share a device, by layout.

The layouts are tried under the transport that `auto` takes; striped under each that this MPI can.

Rank 0 prints one JSON line: for each layout the cases whose reply is not the expected one, a digest
of all logits on the way, seconds and the transport.
"""

import hashlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from engine.config import fit, parse, prepare_environment  # noqa: E402

prepare_environment()

from engine.backend import load  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.sample import Sampling  # noqa: E402
from engine.weights import open_model  # noqa: E402
from engine.world import World  # noqa: E402

LAYOUTS = {"striped": (), "owner": ("--placement", "owner"), "off": ("--split", "off"),
           "chunks of 300, poison": ("--chunk", 300, "--poison", "--shuffle-pages"),
           "R = 1024": ("--replicate", 1024), "pinned": ("--transport", "pinned"),
           "device": ("--transport", "device")}
CASES = ("capital", "count", "recall_turns", "tool_call", "long_3000", "long_6000")


def main():
    mini = ROOT / "models" / "mini"
    cases = json.loads((mini / "expected.json").read_text(encoding="utf-8"))["cases"]
    cases = [c for c in cases if c["name"] in CASES]
    world = World.join()
    shape, checkpoint = open_model(str(mini))
    config = parse(["--backend", "cuda"])
    weights = load(config, checkpoint, shape, world)
    found = {}
    aware = world.cuda_aware()
    for name, options in LAYOUTS.items():
        if name == "device" and not aware:
            continue
        argv = [str(a) for a in ("--backend", "cuda", "--context", 8192, *options)]
        engine = Engine(fit(parse(argv), shape), world, shape, weights)
        if world.rank:
            engine.follow()
        else:
            found[name] = [*replies(engine, cases), engine.backend.device.transport.name]
    if world.rank == 0:
        print(json.dumps(found), flush=True)


def replies(engine, cases):
    """[cases that differ, alone and together; sha256 of the logits of all cases alone; seconds]"""
    digest = hashlib.sha256()
    execute = engine._execute

    def watched(plan):
        chunk, rows = execute(plan)
        for logits in (chunk, rows):
            if logits is not None:
                digest.update(logits.tobytes())
        return chunk, rows
    engine._execute = watched
    wrong = [c["name"] for c in cases if reply(engine, [c]) != [c["greedy_ids"]]]
    alone = digest.hexdigest()
    engine._execute = execute
    if reply(engine, cases) != [c["greedy_ids"] for c in cases]:
        wrong.append("together")
    seconds = {k: round(v, 2) for k, v in engine.seconds.items()}
    engine.stop()
    return [wrong, alone, seconds]


def reply(engine, cases):
    ids = [engine.submit(c["prompt_ids"], Sampling(max_tokens=64, stop_ids=engine.shape.eos))
           for c in cases]
    found = {i: [] for i in ids}
    while engine.busy:
        for event in engine.step():
            found[event.id].append(event.token)
    return [found[i] for i in ids]


if __name__ == "__main__":
    main()
