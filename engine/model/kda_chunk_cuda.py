"""KDA for many rows: factors of 16 rows a block, states of 64 value channels a block, outputs.

One arithmetic with kda_cuda, which launches these three and has the table of arrays; the pieces of
a row and their order are in kda_row_cuda.

| kernel | grid | a block |
|---|---|---|
| prepare | heads x tiles of TILE rows | convolution of q, k, v; f_b product; factors of each row |
| recur | heads x slices | SLICE value channels of a head's state through its rows |
| finish | heads x tiles of TILE rows | g_b product; norm and gate of each row |

A run is the rows of one seat, and a chunk is one run: recur walks runs in turn, so that its grid
is spread over the SMs whatever the number of seats. It has factors copied STAGE rows at a time into
one of two stages of shared memory while it works on the other; a row's o is put together and stored
while the next row is under way.

factors, flat, a row: [hl][q, k, e^g, v][D], then [hl][beta, q.k, -, -]: each starts on 32 bytes
where hl is even.
"""

from functools import lru_cache

from numba import float32, int32, int64, uint16, uint32, uint64

from engine.device import (INLINE, KERNEL, U32, add_rn, copy16, copy_commit, copy_wait, cuda, fma,
                           lds32, mul_rn, narrow, shared_address, sigmoid)
from engine.model.kda_row_cuda import (COLUMNS, GROUPS, convolved, correct_state, decay_state,
                                       finish, kept, load_keys, load_state, load_window, load_words,
                                       over_keys, own_column, product, rows_behind, spread,
                                       store_state, unit_factors)

SLICE = 64              # value channels a block of recur: 128 blocks for 64 heads of 128
STAGE = 8               # rows of one of the two stages that recur copies ahead
TILE = 16               # rows a block of prepare and finish
PAD = 8                 # BF16 between rows of a tile of f_a or g_a: no bank conflict
THREE_BLOCKS = {**KERNEL, "max_registers": 80} if KERNEL else {}  # of 256 threads on an SM


# ---- tiles of TILE rows ------------------------------------------------------------------------

@cuda.jit(**INLINE)
def _tile_product(words, low, width, found):
    """found [TILE, D] (shared, flat): words of `load_words` times the BF16 rows of low (shared)."""
    thread = cuda.threadIdx.x
    group, pair, output = (thread & 31) >> 2, thread & 3, thread >> 5 << 4
    base = shared_address(low)
    for eight in range(TILE // 8):
        at = base + 2 * ((8 * eight + group) * (width + PAD) + 8 * pair)
        sums = product(words, at, width // 32)
        place = (8 * eight + 2 * pair) * width + output + group
        found[place] = sums[0]
        found[place + width] = sums[1]
        found[place + 8] = sums[2]
        found[place + width + 8] = sums[3]


@cuda.jit(**INLINE)
def _load_low(rows, first, column, width, values):
    """values [TILE / 2] of a thread: f_a or g_a of the tile's rows, two rows at a time."""
    thread = cuda.threadIdx.x
    for j in range(TILE // 2):
        row = min(first + 2 * j + thread // width, rows.shape[0] - 1)
        values[j] = rows[row, column + thread % width]


@cuda.jit(**INLINE)
def _store_low(values, width, low):
    thread = cuda.threadIdx.x
    for j in range(TILE // 2):
        low[(2 * j + thread // width) * (width + PAD) + thread % width] = narrow(values[j])


@cuda.jit(**INLINE)
def _remember(rows, history, seat, first, last, head, width):
    """history of this head's channels after rows first .. last - 1 of its seat."""
    depth = int32(history.shape[1])
    own = int32(history.shape[2] // 3)
    for i in range(cuda.threadIdx.x, 3 * width, cuda.blockDim.x):
        channel = i // width * own + head * width + i % width
        for t in range(depth):
            source = last - depth + t
            if source >= first:
                history[seat, t, channel] = rows[source, channel]
            else:
                history[seat, t, channel] = history[seat, t + last - first, channel]


@lru_cache(None)
def prepare_kernel(width, depth):
    """The kernel for heads of `width` channels and convolutions of `depth` rows."""
    parts, words_held, half_tile = width // 32, width // 4, TILE // 2
    low_held, tile, tile_qkv = TILE * (width + PAD), TILE * width, TILE * 3 * width

    @cuda.jit(**THREE_BLOCKS)
    def _prepare_kernel(rows, f_b, taps, decay, dt_bias, bound, history, seats, factors):
        # grid (hl, ceil(n / TILE)), 2 D threads; first a thread a channel, then a warp a row
        low = cuda.shared.array(low_held, uint16)
        forget = cuda.shared.array(tile, float32)
        qkv = cuda.shared.array(tile_qkv, float32)
        seat_of = cuda.shared.array(TILE, int32)
        logit = cuda.shared.array(TILE, float32)
        behind_of = cuda.shared.array(half_tile, int32)
        words = cuda.local.array(words_held, uint32)
        few = cuda.local.array(half_tile, float32)
        loaded = cuda.local.array(8, float32)
        values = cuda.local.array(depth, float32)
        tap = cuda.local.array(depth, float32)
        bias = cuda.local.array(parts, float32)
        q = cuda.local.array(parts, float32)
        k = cuda.local.array(parts, float32)
        head, heads = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        first, n = int32(cuda.blockIdx.y) * TILE, int32(seats.shape[0])
        thread, own = int32(cuda.threadIdx.x), int32(taps.shape[0] // 3)
        lane = thread & 31
        count = min(TILE, n - first)
        _load_low(rows, first, 3 * own, width, few)
        output = (thread >> 5 << 4) + (lane >> 2)
        rate = decay[head]
        for c in range(parts):
            bias[c] = dt_bias[head * width + lane + 32 * c]
        if thread < count:
            seat_of[thread] = seats[first + thread]
            logit[thread] = rows[first + thread, rows.shape[1] - heads + head]
            if thread % 8 == 0:
                behind_of[thread // 8] = rows_behind(seats, first + thread, seats[first + thread],
                                                     depth)
        _store_low(few, width, low)
        cuda.syncthreads()
        for unit in range(3):               # eight rows of a channel each
            i = thread + 2 * width * unit
            start, i = i // (3 * width) * 8, i % (3 * width)
            channel = i // width * own + head * width + i % width
            for r in range(8):
                loaded[r] = rows[min(first + start + r, n - 1), channel]
            for t in range(depth):
                tap[t] = taps[channel, t]
            if start < count and seat_of[start] >= 0:
                load_window(rows, history, int64(seat_of[start]), first + start,
                            behind_of[start // 8], channel, depth, values)
            for r in range(8):
                qkv[(start + r) * 3 * width + i] = loaded[r]
            for r in range(start, min(start + 8, count)):
                seat = int64(seat_of[r])
                if r > start:
                    if seat_of[r - 1] == seat:
                        for t in range(depth - 1):
                            values[t] = values[t + 1]
                    elif seat >= 0:
                        for t in range(depth - 1):
                            values[t] = history[seat, t, channel]
                    values[depth - 1] = qkv[r * 3 * width + i]
                if seat >= 0:
                    qkv[r * 3 * width + i] = convolved(values, tap, depth)
        load_words(f_b, (int64(head) * width + output) * width + 8 * (lane & 3), parts, words)
        cuda.syncthreads()
        _tile_product(words, low, width, forget)
        cuda.syncthreads()
        for r in range(thread >> 5, count, width // 16):
            if seat_of[r] >= 0:
                for c in range(parts):
                    q[c] = qkv[r * 3 * width + lane + 32 * c]
                    k[c] = qkv[r * 3 * width + width + lane + 32 * c]
                by_q, by_k, qk = unit_factors(q, k, parts, width)
                step = int64(heads) * (4 * width + 4)
                at = (first + r) * step + head * 4 * width
                for c in range(parts):
                    i = lane + 32 * c
                    factors[at + i] = mul_rn(q[c], by_q)
                    factors[at + width + i] = mul_rn(k[c], by_k)
                    factors[at + 2 * width + i] = kept(forget[r * width + i], rate, bias[c], bound)
                    factors[at + 3 * width + i] = qkv[r * 3 * width + 2 * width + i]
                if lane == 0:
                    at = (first + r + 1) * step - 4 * (heads - head)
                    factors[at] = sigmoid(logit[r])
                    factors[at + 1] = qk

    return _prepare_kernel


@cuda.jit(**INLINE)
def _ahead(where, factors, source, step, rows, threads, pieces, size):
    """Start this thread's copies of the next `rows` rows, STAGE at most, to shared `where`.

    source, `step` further each row: the thread's piece of 16 bytes in flat factors, and after it
    those `threads` pieces further, below `pieces` of a shared row of `size` bytes.
    """
    for r in range(STAGE):
        if r < rows:
            at = where + r * size
            for j in range((pieces + threads - 1) // threads):
                if cuda.threadIdx.x + j * threads < pieces:
                    copy16(U32(at + j * 16 * threads), factors, source[j] + r * step, U32(16))
    copy_commit()


@lru_cache(None)
def recur_kernel(width):
    """The kernel for heads of `width` channels."""
    keys, columns = width // GROUPS, min(width, SLICE)
    held, threads = 4 * keys, 32 * columns // COLUMNS
    stride = 3 * width + columns + 4            # of a shared row
    size, pieces, ring_held = 4 * stride, stride // 4, 2 * STAGE * stride
    rounds = -(-pieces // threads)

    @cuda.jit(**KERNEL)
    def _recur_kernel(rows, factors, seats, state, history, o):
        # grid (hl slices): a block takes the runs one after the other
        ring = cuda.shared.array(ring_held, float32)
        end = cuda.shared.array(1, int32)
        s = cuda.local.array(held, float32)
        sums = cuda.local.array(4, float32)
        q = cuda.local.array(keys, float32)
        k = cuda.local.array(keys, float32)
        e = cuda.local.array(keys, float32)
        errors = cuda.local.array(4, float32)
        source = cuda.local.array(rounds, int64)
        slices = width // columns
        head, heads = int32(cuda.blockIdx.x) // slices, int32(cuda.gridDim.x) // slices
        block_column = int32(cuda.blockIdx.x) % slices * columns
        thread = int32(cuda.threadIdx.x)
        n = int32(seats.shape[0])
        lane, warp = thread & 31, thread >> 5
        base = int32(shared_address(ring))
        step = int64(heads) * (4 * width + 4)
        column = warp * COLUMNS + own_column(lane)
        answers = lane & GROUPS // 4 - 1 == 0
        first = int32(0)
        while first < n:
            seat = int64(seats[first])
            # ---- the run's end
            if thread == 0:
                end[0] = n
            cuda.syncthreads()
            i = first + 1 + thread
            while i < n and seats[i] == seat:
                i += threads
            if i < n:
                cuda.atomic.min(end, 0, int32(i))
            cuda.syncthreads()
            last = int32(end[0])
            begin, first = first, last
            if seat < 0:
                cuda.syncthreads()
                continue
            # ---- state into registers, first rows into shared memory
            for j in range(rounds):
                piece = thread + j * threads
                source[j] = begin * step + head * 4 * width + 4 * piece
                if piece >= 3 * width // 4:
                    source[j] += block_column
                if piece == pieces - 1:
                    source[j] = (begin + 1) * step - 4 * (heads - head)
            for stage in range(2):
                _ahead(base + stage * STAGE * size + 16 * thread, factors, source, step,
                       last - begin - stage * STAGE, threads, pieces, size)
                for j in range(rounds):
                    source[j] += STAGE * step
            place = (seat * heads + head) * width * width + block_column + warp * COLUMNS
            load_state(state, place, lane, keys, width, s)
            answer_step = uint64(heads * width)
            answer_at = uint64(begin) * answer_step + uint64(head * width + block_column + column)
            copy_wait(1)
            cuda.syncthreads()
            load_keys(base, lane, keys, q)
            load_keys(base + 4 * width, lane, keys, k)
            load_keys(base + 8 * width, lane, keys, e)
            where = base                            # the shared row of i
            at = 0                                  # and its number
            # an answer is put together and stored a row late: nothing waits for its last step
            one, other, qk, error = float32(0), float32(0), float32(0), float32(0)
            answer_at -= answer_step
            for i in range(begin, last):
                v = lds32(U32(where + 4 * (3 * width + column)))
                beta = lds32(U32(where + size - 16))
                next_qk = lds32(U32(where + size - 12))
                decay_state(s, e, keys)
                at += 1
                where += size
                if at == STAGE or at == 2 * STAGE:  # the rest of a stage is in registers: refill
                    copy_wait(0)
                    cuda.syncthreads()
                    where = base + (at & STAGE) * size
                    at &= STAGE
                    _ahead(base + (STAGE - at) * size + 16 * thread, factors, source, step,
                           last - i - 1 - STAGE, threads, pieces, size)
                    for j in range(rounds):
                        source[j] += STAGE * step
                load_keys(where + 8 * width, lane, keys, e)
                cuda.syncwarp()                     # or the loads are put off to the row's end
                if answers and i > begin:
                    o[answer_at] = fma(qk, error, add_rn(one, other))
                answer_at += answer_step
                qk = next_qk
                one, other = over_keys(s, k, keys, lane, sums)
                error = mul_rn(beta, add_rn(v, -add_rn(one, other)))
                one, other = over_keys(s, q, keys, lane, sums)
                spread(error, lane, errors)
                load_keys(where, lane, keys, q)
                cuda.syncwarp()
                correct_state(s, k, keys, errors)
                load_keys(where + 4 * width, lane, keys, k)
            if answers:
                o[answer_at] = fma(qk, error, add_rn(one, other))
            store_state(state, place, lane, keys, width, s)
            if block_column == 0:
                _remember(rows, history, seat, begin, last, head, width)
            cuda.syncthreads()

    return _recur_kernel


@lru_cache(None)
def finish_kernel(width):
    """The kernel for heads of `width` channels."""
    parts, low_held, tile = width // 32, TILE * (width + PAD), TILE * width
    words_held, half_tile, warps = 8 * parts, TILE // 2, width // 16
    own_held = TILE // warps * parts

    @cuda.jit(**KERNEL)
    def _finish_kernel(rows, g_b, o, o_norm, eps, seats, out):
        # grid (hl, ceil(n / TILE)), 2 D threads, a warp a row
        low = cuda.shared.array(low_held, uint16)
        gate = cuda.shared.array(tile, float32)
        words = cuda.local.array(words_held, uint32)
        few = cuda.local.array(half_tile, float32)
        answers = cuda.local.array(own_held, float32)
        own = cuda.local.array(parts, float32)
        norm = cuda.local.array(parts, float32)
        head, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        first, n = int32(cuda.blockIdx.y) * TILE, int32(seats.shape[0])
        lane, warp = thread & 31, thread >> 5
        _load_low(rows, first, 3 * o.shape[1] + width, width, few)
        output = warp * 16 + (lane >> 2)
        load_words(g_b, (int64(head) * width + output) * width + 8 * (lane & 3), parts, words)
        for j in range(TILE // warps):
            for c in range(parts):
                answers[j * parts + c] = o[min(first + warp + warps * j, n - 1),
                                           head * width + lane + 32 * c]
        for c in range(parts):
            norm[c] = o_norm[lane + 32 * c]
        _store_low(few, width, low)
        cuda.syncthreads()
        _tile_product(words, low, width, gate)
        cuda.syncthreads()
        for j in range(TILE // warps):
            r = warp + warps * j
            if first + r < n and seats[first + r] >= 0:
                for c in range(parts):
                    own[c] = answers[j * parts + c]
                finish(own, gate, r * width, parts, norm, eps, out, first + r, head * width)

    return _finish_kernel
