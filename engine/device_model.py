"""One rank's model on the device: weights, KV pages and states there, and the walk through the
layers.

The walk is the one of forward.py and dsa.py, with device arrays and BF16 activations: decode
steps are captured into graphs by batch bucket (device_graph), prompt chunks are launched
directly. Rows past the real ones have seat -1 and are skipped by every kernel. A layer's parts
cross the ranks between two graphs (transport) and are added up in rank order by the kernel that
takes them in.
"""

import numpy as np

from engine.device import cuda
from engine.device_attention import Attention
from engine.device_graph import Buffers, Walk
from engine.errors import FaultError
from engine.gemm import gemm
from engine.gemm_experts import Space, experts
from engine.model.dense import swiglu_cuda
from engine.model.dots import parts
from engine.model.embed import embed_cuda
from engine.model.hyper import hyper_end_cuda, hyper_in_cuda, hyper_out_cuda
from engine.model.kda_cuda import finish_cuda, prepare_cuda, recur_cuda
from engine.model.moe import route_cuda
from engine.model.norm import narrow_cuda, rms_norm_cuda
from engine.transport import choose

BUCKETS = (1, 2, 4, 8, 16, 32)      # rows of a captured decode step


class DeviceModel:
    """What one rank computes with.

    has: what the rank holds (pages, page table, parts of every rank). weights: device_weights.
    """

    def __init__(self, world, shape, has, weights, config):
        self.world, self.shape, self.weights = world, shape, weights
        self.vocab, part, seats = has.vocab, has.own, config.parallel
        self.stream = cuda.stream()
        self._spaces = {}           # buffers of the chunks, and of each captured step
        self.buffers = None         # those in use
        self.own_heads = part.heads[1] - part.heads[0]
        kda, d = part.kda_heads[1] - part.kda_heads[0], shape.kda_dim
        self.kda_heads = kda
        layers = len(shape.kda_layers)
        self.kda = [_zeros((seats, kda, d, d)) for _ in range(layers)]
        self.conv = [_zeros((seats, shape.conv - 1, 3 * kda * d)) for _ in range(layers)]
        self.attention = Attention(self, has, config)
        self.transport = choose(config.transport, world, self.stream, Buffers())
        self._walks, self._outgoing = {}, {}

    # --- what the engine asks for ---------------------------------------------------------------

    def clear(self, seat):
        """Zero a seat's states, for a new conversation."""
        for array in self.kda + self.conv:
            array[seat].copy_to_device(np.zeros(array.shape[1:], np.float32))
        self.attention.clear(seat)

    def decode(self, rows):
        """Logits [n, vocab] float32 of n decode rows on rank 0, None elsewhere."""
        n = rows.count
        bucket = next((b for b in BUCKETS if b >= n), n)
        alone = self.attention.alone(rows)
        key = bucket, alone
        self.buffers = self._spaces.setdefault(key, Buffers())
        self._load(rows, bucket)
        if key not in self._walks:      # the first time: compiles, sizes the buffers
            self._walks[key] = Walk(self.stream, lambda cut: self._decode(bucket, alone, cut))
            self._walks[key].run()
        else:
            if not self.buffers.fixed:
                self.buffers.fixed = True
                self._walks[key].capture()
            self._walks[key].replay()
        return self._logits(n, bucket)

    def prefill(self, rows, wanted):
        """A prompt chunk; logits [1, vocab] of its last row on rank 0 where wanted."""
        m = rows.count
        self.buffers = self._spaces.setdefault("chunks", Buffers())
        self._load(rows, m)

        def cut(host_work):
            self.stream.synchronize()
            host_work()
        streams = self._layers(m, self.attention.alone(rows), cut, rows)
        if not wanted:
            return self.finish()
        pick = self.buffers.take("pick", 1, dtype=np.int32)
        pick.copy_to_device(np.array([m - 1], np.int32), stream=self.stream)
        self._head(streams, pick, 1)
        return self._logits(1, 1)

    # --- the walk -------------------------------------------------------------------------------

    def _load(self, rows, n):
        """Send n rows' embeddings, seats and positions to the device, padded with seat -1."""
        have, table = rows.count, self.weights.embed
        embedded = self.send("embedded", (n, table.shape[1]), table.dtype)
        seats = self.send("seats", (n,), np.int32)
        positions = self.send("positions", (n,), np.int32)
        every = self.send("every", (n,), np.int32)
        embedded[:have], embedded[have:] = table[rows.tokens], 0
        seats[:have], seats[have:] = rows.seats, -1
        positions[:have], positions[have:] = rows.positions, 0
        every[:] = np.arange(n)
        self.attention.load(rows, n)
        for name in ("embedded", "seats", "positions", "every", "attended"):
            self.sent(name)

    def send(self, name, shape, dtype):
        """The pinned host array that `sent` copies to the buffer of that name."""
        self._outgoing[name] = self.buffers.pinned(name, shape, dtype)
        return self._outgoing[name]

    def sent(self, name):
        """Start the copy of what was filled in since `send`."""
        host = self._outgoing[name]
        device = self.buffers.take(name, *host.shape, dtype=host.dtype)
        device.copy_to_device(host, stream=self.stream)

    def _decode(self, n, alone, cut):
        streams = self._layers(n, alone, cut)
        self._head(streams, self.buffers.take("every", n, dtype=np.int32), n)

    def _layers(self, n, alone, cut, rows=None):
        s, take, stream = self.shape, self.buffers.take, self.stream
        seats = take("seats", n, dtype=np.int32)
        streams = take("streams", n, s.hc_mult, s.hidden)
        embed_cuda(take("embedded", n, s.hidden, dtype=self.weights.embed.dtype),
                   take("every", n, dtype=np.int32), seats, streams, stream)
        x, wide = take("x", n, s.hidden, dtype=np.uint16), take("wide", n, s.hidden)
        post, comb = take("post", n, s.hc_mult), take("comb", n, s.hc_mult, s.hc_mult)
        partial = take("hyper parts", n, parts(s.hc_mult * s.hidden), s.hyper_rows + 1)
        y = take("y", n, s.hidden)

        def site(hyper, norm, work):
            hyper_in_cuda(streams, hyper.fn.w, hyper.base, hyper.scale, s, norm, seats, partial,
                          x, wide, post, comb, stream)
            work()
            hyper_out_cuda(streams, self._everyones(y, cut), post, comb, seats, stream)

        binding = kda = 0
        for layer in self.weights.layers:
            if layer.kind == "kda":
                site(layer.attn_hyper, layer.attn_norm,
                     lambda: self._kda(layer.attn, kda, x, seats, y))
                kda += 1
            else:
                site(layer.attn_hyper, layer.attn_norm, lambda: self.attention.layer(
                    layer.attn, binding, x, n, y, alone, cut, rows))
                binding += 1
            site(layer.ffn_hyper, layer.ffn_norm,
                 lambda: self._feed_forward(layer.mlp, x, wide, seats, y))
        return streams

    def _everyones(self, y, cut):
        """y [n, D] of every rank, [W, n, D] on the device in rank order."""
        world = self.world
        if world.size == 1:
            return y.reshape(1, *y.shape)
        whole = self.buffers.take("everyone's y", world.size, *y.shape)
        pair = [y] * world.size, [whole[r] for r in range(world.size)]
        self.transport.exchange(self.buffers, "y", [pair], cut)
        return whole

    def _kda(self, w, index, x, seats, y):
        s, take, stream, n = self.shape, self.buffers.take, self.stream, len(x)
        heads, d = self.kda_heads, s.kda_dim
        own = heads * d
        if not heads:
            return _fill_zero(y, stream)
        rows = take("kda rows", n, 3 * own + 2 * d + heads)
        gemm(x, w.inp.w, rows, stream, w.inp.scales)
        low = take("kda low", n, d, dtype=np.uint16)
        forget, gate = take("forget", n, own), take("gate", n, own)
        narrow_cuda(rows, 3 * own, seats, low, stream)
        gemm(low, w.f_b.w, forget, stream, w.f_b.scales)
        narrow_cuda(rows, 3 * own + d, seats, low, stream)
        gemm(low, w.g_b.w, gate, stream, w.g_b.scales)
        qkv, keep, beta = take("qkv", n, 3 * own), take("keep", n, own), take("beta", n, heads)
        o, out = take("o", n, own), take("kda out", n, own, dtype=np.uint16)
        prepare_cuda(rows, forget, w.conv, w.decay, w.dt_bias, s.gate_bound, self.conv[index],
                     seats, qkv, keep, beta, stream)
        recur_cuda(rows, qkv, keep, beta, seats, self.kda[index], self.conv[index], o, stream)
        finish_cuda(o, gate, w.o_norm, s.eps, seats, out, stream)
        gemm(out, w.out.w, y, stream, w.out.scales)

    def _feed_forward(self, w, x, wide, seats, y):
        if hasattr(w, "router"):
            self._experts(w, x, wide, seats, y)
            self._mlp(w.shared, x, seats, y, True)
        else:
            self._mlp(w, x, seats, y, False)

    def _mlp(self, w, x, seats, y, add):
        columns = w.down.w.shape[1]
        if not columns:
            return None if add else _fill_zero(y, self.stream)
        up = self.buffers.take("up", len(x), 2 * columns)
        act = self.buffers.take("act", len(x), columns, dtype=np.uint16)
        gemm(x, w.gate_up.w, up, self.stream, w.gate_up.scales)
        swiglu_cuda(up, self.shape.swiglu_limit, 1, seats, act, self.stream)
        gemm(act, w.down.w, y, self.stream, w.down.scales, add)

    def _experts(self, w, x, wide, seats, y):
        s, take, stream, n = self.shape, self.buffers.take, self.stream, len(x)
        picks, columns = s.experts_per_token, w.down.w.shape[2]
        if not columns:
            return _fill_zero(y, stream)
        chosen, weights = take("chosen", n, picks, dtype=np.int32), take("weights", n, picks)
        route_cuda(wide, w.router.w, w.bias, s.routed_scaling, seats,
                   take("router parts", n, parts(s.hidden), s.experts), chosen, weights, stream)
        space = Space(take("visits", n * picks, dtype=np.int32),
                      take("tiles", n * picks // 64 + s.experts, 3, dtype=np.int32),
                      take("expert out", n * picks, s.hidden))
        act = take("expert act", n * picks, columns, dtype=np.uint16)
        experts(x, chosen, weights, w.gate_up.w, w.down.w, s.swiglu_limit, y, act, stream,
                w.gate_up.scales, w.down.scales, space)

    def _head(self, streams, pick, n):
        s, take, stream = self.shape, self.buffers.take, self.stream
        mean, x = take("mean", n, s.hidden), take("head x", n, s.hidden, dtype=np.uint16)
        hyper_end_cuda(streams, pick, mean, stream)
        rms_norm_cuda(mean, 0, self.weights.norm, s.eps, take("every", n, dtype=np.int32), x, 0,
                      stream)
        head = self.weights.head
        gemm(x, head.w, take("logits", n, head.w.shape[0]), stream, head.scales)

    def _logits(self, n, bucket):
        """Everyone's logits, gathered on rank 0: [n, vocab]. FaultError where a score was NaN."""
        world, rows = self.world, self.weights.head.w.shape[0]
        mine = self.buffers.pinned("logits", (bucket, rows))
        self.buffers.take("logits", bucket, rows).copy_to_host(mine, stream=self.stream)
        self.finish()
        sent = [mine[:n]] + [None] * (world.size - 1)
        if world.rank:
            world.exchange((sent, [None] * world.size))
            return None
        found = [np.empty((n, stop - start), np.float32) for start, stop in self.vocab]
        world.exchange((sent, found))
        return found[0] if world.size == 1 else np.concatenate(found, axis=1)

    def finish(self):
        """Wait for the stream; FaultError where stage 2 met a score that is no number."""
        faults = self.buffers.pinned("faults", (1,), np.int32)
        self.attention.faults.copy_to_host(faults, stream=self.stream)
        self.stream.synchronize()
        if faults[0]:
            raise FaultError(f"{faults[0]} scores of the sparse attention are not numbers",
                             "The checkpoint may be damaged; if it is not, please report this.",
                             rank=self.world.rank)


def _zeros(shape, dtype=np.float32):
    return cuda.to_device(np.zeros(shape, dtype))


def _fill_zero(array, stream):
    """Zero a float32 array where this rank has nothing to add."""
    cuda.driver.device_memset(array, 0, array.nbytes, stream)
