"""Where a rank computes: `host` (NumPy arrays and njit kernels) or `cuda`. The only place that
chooses.

Both offer the same: `open` and `close` a seat, `prefill` a chunk, `decode` a step. A choice that
falls back says so at start.
"""

from engine.device import available
from engine.device_model import DeviceModel
from engine.device_weights import load_device_weights
from engine.errors import PlanError
from engine.forward import Model, forward, logits
from engine.memory import classes_of, pages_below, pool_pages, window_pages
from engine.pool.lease import Pool
from engine.pool.page import Pages, rank_pages
from engine.pool.state import States
from engine.pool.table import PageTable
from engine.prefill import prefill_attention
from engine.shape import part
from engine.step import decode_attention
from engine.weights import load_weights


def choose(config):
    """config with its backend decided: "host" or "cuda". PlanError for a cuda that is not there."""
    device = available() if config.backend != "host" else False
    if config.backend == "cuda" and not device:
        raise PlanError("--backend cuda: no CUDA device answers on this machine",
                        "check nvidia-smi and pip install -e '.[cuda]', or use --backend host")
    if device and config.kv_dtype != "bf16":
        if config.backend == "cuda":
            raise PlanError(f"--kv-dtype {config.kv_dtype} is for the host backend",
                            "--backend host, or --kv-dtype bf16")
        device = False
    if not device and config.transport != "auto":
        raise PlanError(f"--transport {config.transport} moves device arrays; the backend is host",
                        "leave --transport out, or run where a CUDA device answers")
    return config.replaced(backend="cuda" if device else "host")


def load(config, checkpoint, shape, world, progress=None):
    """This rank's Weights for the chosen backend. progress(done, total)."""
    read = load_device_weights if config.backend == "cuda" else load_weights
    return read(checkpoint, shape, part(shape, world.rank, world.size), progress)


class HostBackend:
    """A rank on the CPU."""

    def __init__(self, config, world, shape, weights):
        has = _Layout(config, world, shape)
        pages = Pages(shape, has.pages, config.page_rows, config.kv_dtype)
        self.poison = config.poison
        self.model = Model(world, shape, has.own, weights, pages,
                           States(shape, has.own, config.parallel), has.table, has.heads,
                           has.vocab, has.split, config.replicate)

    def open(self, seat, lease):
        """Bind a conversation's pages and clear its states."""
        model = self.model
        model.table.bind(seat, lease, model.world.rank)
        model.states.clear(seat)
        if self.poison:
            model.pages.poison(model.table.local_pages(seat))

    def close(self, seat):
        """Forget a conversation's pages."""
        self.model.table.unbind(seat)

    def prefill(self, rows, wanted):
        """A prompt chunk; where `wanted`, [1, vocab] logits of its last row on rank 0."""
        hidden = forward(self.model, rows, prefill_attention)
        return logits(self.model, hidden[-1:]) if wanted else None

    def decode(self, rows):
        """[n, vocab] logits of a decode step on rank 0."""
        return logits(self.model, forward(self.model, rows, decode_attention))


class DeviceBackend:
    """A rank on a CUDA device."""

    def __init__(self, config, world, shape, weights):
        has = _Layout(config, world, shape)
        self.poison, self.table, self.rank = config.poison, has.table, world.rank
        self.device = DeviceModel(world, shape, has, weights, config)
        self.prefill, self.decode = self.device.prefill, self.device.decode

    def open(self, seat, lease):
        """Bind a conversation's pages and clear its states."""
        self.table.bind(seat, lease, self.rank)
        self.device.attention.bind(seat, self.table.table[seat])
        self.device.clear(seat)
        if self.poison:
            self.device.attention.poison(self.table.local_pages(seat))

    def close(self, seat):
        """Forget a conversation's pages."""
        self.table.unbind(seat)


BACKENDS = {"host": HostBackend, "cuda": DeviceBackend}


class _Layout:
    """What a rank holds, from Config, world and shape alone."""

    def __init__(self, config, world, shape):
        classes = classes_of(config, world.size)
        split_pages, replicated = pool_pages(config, world.size)
        everyone = [part(shape, rank, world.size) for rank in range(world.size)]
        self.own, self.split = everyone[world.rank], classes > 1
        self.heads = tuple(p.heads for p in everyone)
        self.vocab = tuple(p.vocab for p in everyone)
        self.pages = rank_pages(split_pages, classes, world.rank, replicated)
        self.window = window_pages(config.context, config.page_rows)
        self.table = PageTable(config.parallel, self.window, classes, replicated)


def make_pool(config, world):
    """The page pool of `world` ranks that the plan describes."""
    classes = classes_of(config, world)
    split_pages, replicated = pool_pages(config, world)
    below = min(pages_below(config, classes), window_pages(config.context, config.page_rows))
    return Pool(split_pages, classes, config.placement, below, replicated, config.shuffle_pages)
