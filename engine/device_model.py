"""One rank's model on the device: weights, KV pages and states there, and the walk through the
layers.

The walk is the one of forward.py and dsa.py, with device arrays and BF16 activations: decode
steps are captured into graphs by batch bucket (device_graph), prompt chunks are launched
directly. Rows past the real ones have seat -1 and are skipped by every kernel. A layer's parts
cross the ranks between two graphs (transport) and are added up in rank order by the kernel that
takes them in.

A replayed step allocates nothing: the host writes tokens' embeddings, seats and positions into
fixed pinned arrays, the graph takes them from there and leaves logits and faults in others. In a
decode step chains of kernels that do not wait for each other run side by side (device_graph.Side).
"""

import numpy as np

from engine.device import cuda
from engine.device_attention import Attention
from engine.device_graph import Buffers, Side, Walk
from engine.errors import FaultError
from engine.gemm import gemm
from engine.gemm_experts import Space, experts
from engine.model.dense import swiglu_cuda
from engine.model.embed import embed_cuda
from engine.model.hyper_cuda import SUMS, hyper_first_cuda, hyper_out_cuda, parts
from engine.model.kda_cuda import kda_cuda
from engine.model.mix_cuda import hyper_end_cuda, hyper_in_cuda
from engine.model.moe import choose_cuda
from engine.model.thirds import THIRDS
from engine.transport import choose, copy, sum_parts, zero

BUCKETS = (1, 2, 4, 8, 16, 32)      # rows of a captured decode step


class DeviceModel:
    """What one rank computes with.

    has: what the rank holds (pages, page table, parts of every rank). weights: device_weights.
    """

    def __init__(self, world, shape, has, weights, config):
        self.world, self.shape, self.weights = world, shape, weights
        self.vocab, part, seats = has.vocab, has.own, config.parallel
        self.stream = cuda.stream()
        self._sides = Side(self.stream, cuda.stream()), Side(self.stream, self.stream)
        self.side = None            # of a decode step, of a prompt chunk
        self._spaces = {}           # buffers of the chunks, and of each captured step
        self.buffers = None         # those in use
        self.own_heads = part.heads[1] - part.heads[0]
        kda, d = part.kda_heads[1] - part.kda_heads[0], shape.kda_dim
        self.kda_heads = kda
        layers = len(shape.kda_layers)
        self.kda = [_zeros((seats, kda, d, d)) for _ in range(layers)]
        self.conv = [_zeros((seats, shape.conv - 1, 3 * kda * d)) for _ in range(layers)]
        self.attention = Attention(self, has, config)
        self.transport = choose(config.transport, world)
        self._walks = {}

    # --- what the engine asks for ---------------------------------------------------------------

    def clear(self, seat):
        """Zero a seat's states, for a new conversation."""
        for array in self.kda + self.conv:
            array[seat].copy_to_device(np.zeros(array.shape[1:], np.float32))
        self.attention.clear(seat)

    def decode(self, rows):
        """Logits [n, vocab] float32 of n decode rows on rank 0, None elsewhere.

        They are a view of a buffer: the next step overwrites it.
        """
        n = rows.count
        bucket = next((b for b in BUCKETS if b >= n), n)
        alone = self.attention.alone(rows)
        key = bucket, alone
        self.buffers, self.side = self._spaces.setdefault(key, Buffers()), self._sides[0]
        self._fill(rows, bucket)
        if key not in self._walks:      # the first time: compiles, sizes the buffers
            self._walks[key] = Walk(self.stream, lambda cut: self._decode(bucket, alone, cut))
            self._walks[key].run()
        else:
            if not self.buffers.fixed:
                self.buffers.fixed = True
                self._walks[key].capture()
            self._walks[key].replay()
        self._check_faults()
        return self._logits(n, bucket)

    def prefill(self, rows, wanted):
        """A prompt chunk; logits [1, vocab] of its last row on rank 0 where wanted, as `decode`."""
        m = rows.count
        self.buffers, self.side = self._spaces.setdefault("chunks", Buffers()), self._sides[1]
        self._fill(rows, m)

        def cut(host_work, beside=False):
            self.stream.synchronize()
            host_work()
        streams = self._layers(m, self.attention.alone(rows), cut, rows)
        if wanted:
            pick = self.buffers.take("pick", 1, dtype=np.int32)
            pick.copy_to_device(np.array([m - 1], np.int32), stream=self.stream)
            self._head(streams, pick, 1)
        self._fetch_faults()
        self.stream.synchronize()
        self._check_faults()
        return self._logits(1, 1) if wanted else None

    # --- the walk -------------------------------------------------------------------------------

    def _fill(self, rows, n):
        """Write n rows' embeddings, seats and positions where the walk takes them from; padding
        has seat -1."""
        have, table = rows.count, self.weights.embed
        embedded = self._embedded(n).wire
        embedded[:have] = table[rows.tokens]
        seats, positions, attended, every = self._given(n).wire
        seats[:have], seats[have:] = rows.seats, -1
        positions[:have], positions[have:] = rows.positions, 0
        attended[:have], attended[have:] = self.attention.attended(rows), -1
        every[:] = np.arange(n)

    def _embedded(self, n):
        table = self.weights.embed
        return self.buffers.crossing("embedded", (n, table.shape[1]), table.dtype, True)

    def _given(self, n):
        return self.buffers.crossing("given", (4, n), np.int32, True)

    def _decode(self, n, alone, cut):
        streams = self._layers(n, alone, cut)
        self._fetch_faults()
        self._head(streams, self.buffers.take("every", n, dtype=np.int32), n)

    def _layers(self, n, alone, cut, rows=None):
        s, take, stream, world = self.shape, self.buffers.take, self.stream, self.world
        given = take("given here", 4, n, dtype=np.int32)
        copy(self._given(n).array, given, stream)
        for row, name in enumerate(("seats", "positions", "attended", "every")):
            self.buffers.name(name, given[row])
        seats = take("seats", n, dtype=np.int32)
        streams = take("streams", n, s.hc_mult, s.hidden)
        embed_cuda(self._embedded(n).array, take("every", n, dtype=np.int32), seats, streams,
                   stream)
        x = take("x", THIRDS, n, s.hidden, dtype=np.uint16)
        post, comb = take("post", n, s.hc_mult), take("comb", n, s.hc_mult, s.hc_mult)
        partial = take("hyper parts", n, parts(s.hidden), SUMS)
        fns = [hyper.fn.w for layer in self.weights.layers
               for hyper in (layer.attn_hyper, layer.ffn_hyper)]
        following = iter(fns[1:] + [None])
        hyper_first_cuda(streams, post, comb, fns[0], seats, partial, stream)
        ys = self.transport.buffer(self.buffers, "y", world.size, n, s.hidden)
        wires = [ys.wire[rank] for rank in range(world.size)]
        meet = world.repeated(([wires[world.rank]] * world.size, wires), stage="sum")
        y = ys.array[world.rank]

        def site(hyper, norm, kept, work, cuts=False):      # cuts: there are some inside work
            beside = stream if cuts else self.side.fork()
            hyper_in_cuda(streams, partial, hyper.base, hyper.scale, s, norm, seats, x[:kept],
                          post, comb, stream, beside)
            way_out = None if cuts else self.side.mark()
            two = work()            # experts and shared experts, or None: it is in y
            self.side.join(way_out)
            if world.size > 1:
                if two is not None:
                    sum_parts(two, 2, y, stream)
                cut(meet)
                two = None
            hyper_out_cuda(streams, ys.array if two is None else two, post, comb, next(following),
                           seats, partial, stream)

        binding = kda = 0
        for layer in self.weights.layers:
            if layer.kind == "kda":
                site(layer.attn_hyper, layer.attn_norm, 1,
                     lambda: self._kda(layer.attn, kda, x[0], seats, y))
                kda += 1
            else:
                site(layer.attn_hyper, layer.attn_norm, 1, lambda: self.attention.layer(
                    layer.attn, binding, x[0], n, y, alone, cut, rows), world.size > 1)
                binding += 1
            site(layer.ffn_hyper, layer.ffn_norm, THIRDS if hasattr(layer.mlp, "router") else 1,
                 lambda: self._feed_forward(layer.mlp, x, seats, y))
        return streams

    def _kda(self, w, index, x, seats, y):
        s, take, stream, n = self.shape, self.buffers.take, self.stream, len(x)
        heads, d = self.kda_heads, s.kda_dim
        own = heads * d
        if not heads:
            return zero(y, stream)
        rows = take("kda rows", n, 3 * own + 2 * d + heads)
        gemm(x, w.inp.w, rows, stream, w.inp.scales)
        factors, o = take("kda factors", n, heads, 4 * d + 4), take("kda o", n, own)
        out = take("kda out", n, own, dtype=np.uint16)
        kda_cuda(rows, w, s.gate_bound, s.eps, seats, self.kda[index], self.conv[index], factors,
                 o, out, stream)
        gemm(out, w.out.w, y, stream, w.out.scales)

    def _feed_forward(self, w, x, seats, y):
        """y [n, D] of a dense MLP; of experts [2, n, D]: experts, shared experts."""
        if not hasattr(w, "router"):
            return self._mlp(w, x[0], seats, y, self.stream)
        two = self.buffers.take("experts, shared", 2, *y.shape)
        self._mlp(w.shared, x[0], seats, two[1], self.side.fork())
        shared = self.side.mark()
        self._experts(w, x, seats, two[0])
        self.side.join(shared)
        return two

    def _mlp(self, w, x, seats, y, stream):
        columns = w.down.w.shape[1]
        if not columns:
            return zero(y, stream)
        up = self.buffers.take("up", len(x), 2 * columns)
        act = self.buffers.take("act", len(x), columns, dtype=np.uint16)
        gemm(x, w.gate_up.w, up, stream, w.gate_up.scales)
        swiglu_cuda(up, self.shape.swiglu_limit, 1, seats, act, stream)
        gemm(act, w.down.w, y, stream, w.down.scales)

    def _experts(self, w, x, seats, y):
        s, take, stream, n = self.shape, self.buffers.take, self.stream, len(y)
        picks, columns = s.experts_per_token, w.down.w.shape[2]
        if not columns:
            return zero(y, stream)
        chosen, weights = take("chosen", n, picks, dtype=np.int32), take("weights", n, picks)
        logits = take("router logits", THIRDS, n, w.router.w.shape[0])
        gemm(x.reshape(THIRDS * n, s.hidden), w.router.w,
             logits.reshape(THIRDS * n, logits.shape[2]), stream)
        choose_cuda(logits, w.bias, s.routed_scaling, seats, chosen, weights, stream)
        space = Space(take("visits", n * picks, dtype=np.int32),
                      take("tiles", n * picks // 64 + s.experts, 3, dtype=np.int32),
                      take("expert out", n * picks, s.hidden))
        act = take("expert act", n * picks, columns, dtype=np.uint16)
        experts(x[0], chosen, weights, w.gate_up.w, w.down.w, s.swiglu_limit, y, act, stream,
                w.gate_up.scales, w.down.scales, space)

    def _head(self, streams, pick, n):
        s, take, stream, head = self.shape, self.buffers.take, self.stream, self.weights.head
        x = take("head x", n, s.hidden, dtype=np.uint16)
        hyper_end_cuda(streams, pick, self.weights.norm, s.eps, x, stream)
        gemm(x, head.w, self._own_logits(n).array, stream, head.scales)

    def _own_logits(self, n):
        """This rank's logits [n, own vocabulary], written to the host as they come."""
        return self.buffers.crossing("logits", (n, self.weights.head.w.shape[0]), np.float32, True)

    def _logits(self, n, bucket):
        """Everyone's logits on rank 0, [n, vocab]; they travel row by row, straight into place."""
        world, mine = self.world, self._own_logits(bucket).wire
        if world.size == 1:
            return mine[:n]
        rest = [None] * (world.size - 1)
        if world.rank:
            world.exchange(*(([row, *rest], [None, *rest]) for row in mine[:n]), stage="logits")
            return None
        whole = self.buffers.pinned("everyone's logits", (bucket, self.shape.vocab))[:n]
        world.exchange(*(([row, *rest], [into[a:b] for a, b in self.vocab])
                         for row, into in zip(mine, whole)), stage="logits")
        return whole

    def _fetch_faults(self):
        copy(self.attention.faults, self.buffers.crossing("faults", (1,), np.int32, True).array,
             self.stream)

    def _check_faults(self):
        """FaultError where stage 2 met a score that is no number."""
        faults = int(self.buffers.pinned("faults", (1,), np.int32)[0])
        if faults:
            raise FaultError(f"{faults} scores of the sparse attention are not numbers",
                             "The checkpoint may be damaged; if it is not, please report this.",
                             rank=self.world.rank)


def _zeros(shape, dtype=np.float32):
    return cuda.to_device(np.zeros(shape, dtype))
