"""mpirun -np W python tests/device/rank_fetch.py: what `Fetch` brings together from W ranks,
against pages whose content every rank can compute.

It also runs where NUMBA_ENABLE_CUDASIM=1 simulates the device. Rank 0 prints one JSON line: for
each layout what differs, on any rank.
"""

import json
import pathlib
import sys
from types import SimpleNamespace

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent.parent)]

from engine.config import Config, prepare_environment  # noqa: E402

prepare_environment()

import numpy as np  # noqa: E402
from numba import config  # noqa: E402

from engine import device_history  # noqa: E402
from engine.device import cuda  # noqa: E402
from engine.device_graph import Buffers, Crossing  # noqa: E402
from engine.forward import Rows  # noqa: E402
from engine.memory import classes_of, pages_below, pool_pages  # noqa: E402
from engine.pool.lease import Pool  # noqa: E402
from engine.pool.page import rank_pages  # noqa: E402
from engine.pool.table import PageTable  # noqa: E402
from engine.transport import Transport  # noqa: E402
from engine.world import World  # noqa: E402

PAGES = 10                          # of a conversation, 64 rows each
LAYOUTS = {"striped": {}, "R = 192": dict(replicate=192), "all below R": dict(replicate=640),
           "owner": dict(placement="owner")}
WIDTHS = {"latents": (64, 12), "keys": (16, 8)}


class Simulated:
    """Buffers and transport where the device is simulated, and host memory is its memory."""

    def take(self, name, *shape, dtype=np.float32):
        return cuda.to_device(np.full(shape, 7, dtype))

    def buffer(self, buffers, name, *shape, dtype=np.float32):
        array = self.take(name, *shape, dtype=dtype)
        return Crossing(array, array._ary)


def content(rows, width, seat):
    """What the logical pages of a seat hold, on any rank: uint16 [PAGES, rows, width]."""
    return np.random.default_rng(seat).integers(0, 1 << 16, (PAGES, rows, width), np.uint16)


def main(world):
    device_history.STRETCH = 256        # rows: four pages
    buffers, transport = Buffers(), Transport(world, "pinned")
    if config.ENABLE_CUDASIM:           # there a thread is slow, and a page shall take two blocks
        device_history.THREADS = 32
        buffers = transport = Simulated()
    wrong = {}
    for layout, options in LAYOUTS.items():
        asked = Config(context=639, parallel=2, **options)
        split, replicated = pool_pages(asked, world.size)
        classes = classes_of(asked, world.size)
        pool = Pool(split, classes, asked.placement, min(pages_below(asked, classes), PAGES),
                    replicated, shuffle=True)
        table = PageTable(2, PAGES, classes, replicated)
        local = rank_pages(split, classes, world.rank, replicated)
        held = {name: np.full((local, *shape), 5, np.uint16) for name, shape in WIDTHS.items()}
        for seat in range(2):
            table.bind(seat, pool.grant(PAGES), world.rank)
            here = table.table[seat] >= 0
            for name, shape in WIDTHS.items():
                held[name][table.table[seat, here]] = content(*shape, seat)[here]
        model = SimpleNamespace(world=world, stream=0, buffers=buffers, transport=transport)
        fetch = device_history.Fetch(model, table, 64)
        wrong[layout] = [f"seat {seat}, {count} rows: {what}" for seat, count in ((1, 65), (0, 600))
                         for what in differences(fetch, held, seat, count)]
    return wrong


def differences(fetch, held, seat, count):
    fetch.aim(Rows.of([0], [seat], [count - 1]))
    many = -(-count // 64)
    on_device = {name: cuda.to_device(array) for name, array in held.items()}
    wanted = {name: content(*shape, seat)[:many] for name, shape in WIDTHS.items()}
    whole = fetch.all("keys", on_device["keys"], PAGES)
    if not (whole.copy_to_host()[:many] == wanted["keys"]).all():
        yield "keys"
    found = []

    def work(first, tile):
        found.append((first, tile.copy_to_host()))
    fetch.stretches("latents", on_device["latents"], work)
    if [first for first, _ in found] != list(range(0, many, 4)):
        yield "stretches"
    for first, tile in found:
        part = wanted["latents"][first:first + 4]
        if not (tile[:len(part)] == part).all():
            yield f"latents from page {first}"


if __name__ == "__main__":
    joined = World.join()
    said = np.frombuffer(json.dumps(main(joined)).encode().ljust(1 << 16), np.uint8)
    everyone = [json.loads(bytes(report)) for report in joined.gather(said)]
    if joined.rank == 0:
        print(json.dumps({layout: [f"rank {r}: {what}" for r, report in enumerate(everyone)
                                   for what in report[layout]] for layout in LAYOUTS}), flush=True)
