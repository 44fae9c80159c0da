"""`python -m engine plan`: what every rank will hold, by name, before anything is allocated."""

from engine.backend import choose
from engine.device import cuda
from engine.device_attention import device_scratch_bytes
from engine.memory import check_memory, plan
from engine.prefill import scratch_bytes
from engine.weights import open_model


def main(config, world):
    """Print the plan of config's model at this world's size, on rank 0. Raises PlanError."""
    shape, checkpoint = open_model(config.model)
    config = choose(config)
    made = plan_of(config, shape, checkpoint, world.size)
    if world.rank == 0:
        print("\n".join(lines(config, made)), flush=True)


def plan_of(config, shape, checkpoint, world):
    """The engine.memory.Plan of an opened model, buffers included."""
    scratch = device_scratch_bytes if config.backend == "cuda" else scratch_bytes
    return plan(config, shape, world, checkpoint.kind, scratch(config, shape, world))


def admit(config, shape, checkpoint, world):
    """PlanError where the pool holds no window, or the memory not the ranks' plans.

    The ranks of a machine share its memory, or its device's, alike.
    """
    made = plan_of(config, shape, checkpoint, world.size)
    if config.backend == "cuda":
        free, _ = cuda.current_context().get_memory_info()
        return check_memory(made.total(world.rank), free // world.local_size, world.rank)
    with open("/proc/meminfo", encoding="ascii") as f:
        kib = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable:"))
    check_memory(made.total(world.rank), kib * 1024 // world.local_size, world.rank)


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
