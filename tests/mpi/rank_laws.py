"""mpirun -np W python tests/mpi/rank_laws.py: one reply's bytes under every layout and batch."""

import hashlib

from drive import (close_seat, decode, logits, make, open_seat, ORACLE, prefill, random_ids,
                   run_script, trace, world)

import numpy as np  # after drive, which prepares the environment

MODEL = ("--model", ORACLE / "tiny-bf16", "--context", 512, "--parallel", 5)
PROMPT, STEPS = 330, 12     # a page is 64 rows; index_topk 64, so that lists are chosen from 65 on
FEW = 100       # of the prompt in chunks of one token, where ranks share cores
LAYOUTS = {
    "nothing split": ("--split", "off"),
    "owner": ("--placement", "owner"),
    "R = 128": ("--replicate", 128),
    "R = 256": ("--replicate", 256),
    "striped, poison, shuffled": ("--poison", "--shuffle-pages"),
    "R = 128, poison, shuffled": ("--replicate", 128, "--poison", "--shuffle-pages"),
    "owner, poison, shuffled": ("--placement", "owner", "--poison", "--shuffle-pages"),
}
CHUNKS = (("striped", (), 1), ("striped", (), 7), ("striped", (), 64),
          ("owner", ("--placement", "owner"), 7), ("R = 128", ("--replicate", 128), 100))
BATCH = (40, 100, 120, 200, 330)    # below R; crossing it in decode; beyond it


def layouts(report, ids, baseline):
    """Placements, fresh pages of NaN, any order of pages."""
    for name, options in LAYOUTS.items():
        report.same(name, trace(make(*MODEL, *options), ids, PROMPT), baseline)


def chunks(report, ids, baseline):
    """Chunk sizes; between them, both ways in which a split prefill finds its lists."""
    exchanged, gathered = {}, {"whole": baseline.recorder.gathered}
    for name, options, chunk in CHUNKS:
        prompt = FEW if chunk == 1 and world().size > 3 else PROMPT
        text = ids[:prompt + STEPS]
        found = trace(make(*MODEL, *options), text, prompt, chunk)
        report.same(f"{name}, chunks of {chunk}", found, baseline.first(len(text)))
        exchanged[f"{name} {chunk}"] = found.recorder.exchanged
        gathered[f"{name} {chunk}"] = found.recorder.gathered
    report.facts["exchanged"], report.facts["gathered"] = exchanged, gathered


def batches(report, ids):
    """Five conversations of different lengths and owners, decoded together and alone."""
    starts = [17 * i for i in range(len(BATCH))]
    texts = [np.roll(ids, -s)[:n + STEPS] for s, n in zip(starts, BATCH)]
    unsplit = make(*MODEL, "--split", "off")
    alone = [trace(unsplit, t, n) for t, n in zip(texts, BATCH)]
    for name, options in (("striped", ()), ("owner", ("--placement", "owner")),
                          ("R = 128", ("--replicate", 128)), ("nothing split", ("--split", "off"))):
        engine = make(*MODEL, *options, "--poison", "--shuffle-pages")
        leases = [open_seat(engine, seat, len(t)) for seat, t in enumerate(texts)]
        for seat, (text, n) in enumerate(zip(texts, BATCH)):
            prefill(engine, seat, text[:n])
        if name == "owner":
            report.facts["owners"] = sorted({int(o) for o in engine.backend.model.table.owners})
        seats = list(range(len(BATCH)))
        for step in range(STEPS):
            positions = [n + step for n in BATCH]
            hidden = decode(engine, seats, [t[p] for t, p in zip(texts, positions)], positions)
            rows = logits(engine.backend.model, hidden)
            for seat, position in zip(seats, positions):
                same = hidden[seat].tobytes() == alone[seat].hidden[position].tobytes()
                report.check(f"{name}, {BATCH[seat]} tokens in a batch, step {step}", same)
                if rows is not None:
                    same = rows[seat].tobytes() == alone[seat].logits[position].tobytes()
                    report.check(f"{name}, {BATCH[seat]} tokens, logits, step {step}", same)
        for seat, lease in enumerate(leases):
            close_seat(engine, seat, lease)


def body(report):
    """All laws of one world size."""
    ids = random_ids(PROMPT + STEPS, seed=11)
    baseline = trace(make(*MODEL), ids, PROMPT)
    text = b"".join(a.tobytes() for a in (baseline.hidden, baseline.lists, baseline.latents,
                                          baseline.keys))
    everyone = world().gather(np.frombuffer(hashlib.sha256(text).digest(), np.uint8))
    report.check("all ranks have the same bytes", (everyone == everyone[0]).all())
    report.check("every list was met", (baseline.lists[:, :, 0] >= 0).all())
    report.check("no latent is NaN", ((baseline.latents & 0x7FFF) <= 0x7F80).all())
    layouts(report, ids, baseline)
    chunks(report, ids, baseline)
    batches(report, ids)
    if world().size == 1:
        for rows in (128, 512):
            report.same(f"pages of {rows} rows", trace(make(*MODEL, "--page-rows", rows), ids,
                                                       PROMPT), baseline)


if __name__ == "__main__":
    run_script(body)
