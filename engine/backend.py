"""Where a rank computes: `host` (NumPy arrays and njit kernels) or `cuda`. The only place that
chooses.

Both offer the same: `open` and `close` a seat, `prefill` a chunk, `decode` a step. A choice that
falls back says so at start. Weights come from a model folder, or are random and need none.
"""

import contextlib

from engine.device import available, cuda
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
from engine.random_weights import random_device_weights
from engine.release import Unwritten, named_shape
from engine.shape import part
from engine.step import decode_attention
from engine.weights import load_weights, open_model


def choose(config):
    """config with its backend decided: "host" or "cuda". PlanError for a cuda that is not there."""
    device = available() if config.backend != "host" else False
    if config.weights == "random" and not device:
        why = "the backend is host" if config.backend == "host" else "no CUDA device answers"
        raise PlanError(f"--weights random: {why}; only a device's kernels make these weights, and "
                        "a CPU would take minutes a token", "run it where nvidia-smi lists a "
                        "device, or leave --weights out")
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


def open_weights(config):
    """(Shape, Checkpoint) of config's model folder; or of random weights, with an Unwritten."""
    if config.weights == "random":
        return named_shape(config.shape, config.layers), Unwritten()
    return open_model(config.model)


def load(config, checkpoint, shape, world, progress=None):
    """This rank's Weights for the chosen backend. progress(done, total): bytes.

    Raises PlanError where the device has less memory than the plan was told.
    """
    own = part(shape, world.rank, world.size)
    with device_memory(world.rank):
        if config.weights == "random":
            return random_device_weights(shape, own, shape.layers, config.seed)
        read = load_device_weights if config.backend == "cuda" else load_weights
        return read(checkpoint, shape, own, progress, config.drop_page_cache)


@contextlib.contextmanager
def device_memory(rank):
    """Device or host memory that ran out inside, whatever the plan said, becomes a PlanError."""
    try:
        yield
    except Exception as error:      # the driver's, by its name: its class changes with Numba
        if not isinstance(error, MemoryError) and "OUT_OF_MEMORY" not in str(error):
            raise
        raise PlanError(f"memory ran out in spite of the plan: {error}", "see with nvidia-smi what "
                        "else has taken memory since the start; fewer --pages, a shorter "
                        "--context, less --parallel or a smaller --chunk", rank) from None


class HostBackend:
    """A rank on the CPU."""

    def __init__(self, config, world, shape, weights):
        has = _Layout(config, world, shape)
        pages = Pages(shape, has.pages, config.page_rows, config.kv_dtype)
        self.poison, self.page_rows, self.table = config.poison, config.page_rows, has.table
        self.model = Model(world, shape, has.own, weights, pages,
                           States(shape, has.own, config.parallel), has.table, has.heads,
                           has.vocab, has.split, config.replicate)

    def open(self, seat, lease, kept=0):
        """Bind a conversation's pages; clear its states, or leave `kept` > 0 positions as they are.
        """
        model = self.model
        if kept:
            self.table.unbind(seat)
        else:
            model.states.clear(seat)
        self.table.bind(seat, lease, model.world.rank)
        if self.poison:
            model.pages.poison(self.table.local_pages(seat, -(-kept // self.page_rows)))

    def close(self, seat):
        """Forget a conversation's pages."""
        self.table.unbind(seat)

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
        self.poison, self.page_rows, self.table = config.poison, config.page_rows, has.table
        self.rank = world.rank
        with device_memory(self.rank):
            self.device = DeviceModel(world, shape, has, weights, config)

    @staticmethod
    def used_bytes():
        """Bytes in use on the device, by anyone."""
        free, total = cuda.current_context().get_memory_info()
        return total - free

    def prefill(self, rows, wanted):
        """As HostBackend's."""
        with device_memory(self.rank):
            return self.device.prefill(rows, wanted)

    def decode(self, rows):
        """As HostBackend's."""
        with device_memory(self.rank):
            return self.device.decode(rows)

    def open(self, seat, lease, kept=0):
        """As HostBackend's."""
        if kept:
            self.table.unbind(seat)
        else:
            self.device.clear(seat)
        self.table.bind(seat, lease, self.rank)
        self.device.attention.bind(seat, self.table.table[seat])
        if self.poison:
            self.device.attention.poison(
                self.table.local_pages(seat, -(-kept // self.page_rows)))

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
