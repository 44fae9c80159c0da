"""`python -m engine plan`: what every rank will hold, by name, before anything is allocated; and
the refusal of a start that the memory cannot take.
"""

import hashlib
import os
import subprocess

import numpy as np

from engine.backend import choose, open_weights
from engine.device import cuda
from engine.device_attention import device_scratch_bytes
from engine.errors import PlanError
from engine.memory import Place, check_memory, plan
from engine.prefill import scratch_bytes

DEVICE_RESERVE = 256 << 20      # bytes a rank: kernels' code and stacks, graphs, rounding
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,name,used_memory",
         "--format=csv,noheader,nounits")


def main(config, world):
    """Print the plan of config's model at this world's size, on rank 0. Raises PlanError."""
    config = choose(config)
    shape, checkpoint = open_weights(config)
    made = plan_of(config, shape, checkpoint, world.size)
    places = places_of(config, world)
    if world.rank == 0:
        print("\n".join([*lines(config, made), *verdict(made, places)]), flush=True)


def plan_of(config, shape, checkpoint, world):
    """The engine.memory.Plan of an opened model, buffers included."""
    if config.backend == "cuda":
        scratch = (*device_scratch_bytes(config, shape, world), ("reserve", DEVICE_RESERVE))
    else:
        scratch = scratch_bytes(config, shape, world)
    return plan(config, shape, world, checkpoint.kind, scratch)


def admit(config, shape, checkpoint, world):
    """PlanError, the same on every rank, where the pool holds no window or a memory not its ranks.

    Called by all ranks, before anything is allocated. Ranks that share a device, or a machine on
    the host backend, are counted together.
    """
    made = plan_of(config, shape, checkpoint, world.size)
    places = places_of(config, world)
    check_memory(made, places, lambda ranks: users_of(places, ranks) if config.backend == "cuda"
                 else "")


def places_of(config, world):
    """Every rank's engine.memory.Place."""
    if config.backend == "cuda":
        cuda.current_context()      # takes memory itself: every rank's is there before any measures
        world.barrier()
    name, free, total = memory_here(config.backend)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    everyone = world.gather(np.array([key, free, total, os.getpid()], np.int64))
    return [Place(*map(int, row)) for row in everyone]


def memory_here(backend):
    """(what memory: a device's or a machine's own name, free bytes, all bytes)."""
    with open("/proc/meminfo", encoding="ascii") as f:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in f}
    available, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    if backend != "cuda":
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read(), available, total
    device, (free, total) = cuda.get_current_device(), cuda.current_context().get_memory_info()
    if device.INTEGRATED:           # it shares the machine's; the driver counts page cache as taken
        free = max(free, available)
    return device.uuid, free, total


def users_of(places, ranks):
    """The processes on this rank's device beside the ranks, as nvidia-smi lists them; or ""."""
    own, found = {place.pid for place in places}, []
    try:
        said = subprocess.run(QUERY, capture_output=True, text=True, timeout=10).stdout
        for line in said.splitlines():
            uuid, pid, name, mib = [word.strip() for word in line.split(",")]
            if uuid == cuda.get_current_device().uuid and int(pid) not in own:
                found.append(f"{os.path.basename(name)} (pid {pid}) {mib} MiB")
    except (OSError, subprocess.SubprocessError, ValueError):
        pass                        # not installed, or it answers otherwise: then nobody is named
    return "others on it: " + ", ".join(found[:4]) if found else ""


def verdict(made, places):
    """Lines on whether the plan fits here, now."""
    yield f"{'free now':<20}" + "".join(f"{place.free:>16,}" for place in places)
    try:
        check_memory(made, places)
    except PlanError as error:
        yield f"does not fit here: {error}"


def lines(config, made):
    """The plan as lines of text. made: engine.memory.Plan."""
    classes = len(made.classes)
    ranks = len(made.ranks)
    yield (f"{ranks} rank{'s' * (ranks > 1)}, context {config.context:,} tokens, {config.parallel} "
           f"conversation{'s' * (config.parallel > 1)}, KV {config.kv_dtype}, "
           + (f"split in {classes} classes, {config.placement}" if classes > 1 else "not split"))
    yield (f"pages of {config.page_rows} rows: {made.window:,} a window, "
           f"{', '.join(f'{n:,}' for n in made.classes)} a class, "
           f"{made.replicated:,} replicated; {made.windows:,} windows fit")
    yield f"KV bytes a token a rank: {made.token_bytes:,}"
    yield ""
    heads = "".join(f"{'rank ' + str(r):>16}" for r in range(ranks))
    yield f"{'bytes':<20}{heads}"
    for i, (name, _) in enumerate(made.ranks[0]):
        sizes = [made.ranks[r][i][1] for r in range(ranks)]
        if any(sizes):
            yield f"{name:<20}" + "".join(f"{size:>16,}" for size in sizes)
    yield f"{'total':<20}" + "".join(f"{made.total(r):>16,}" for r in range(ranks))
