"""A model of released dimensions and storage formats, made of random bits on the device.

For measuring without the release's 328 GB: `random_device_weights` gives for a Shape of
engine/release.py what `load_device_weights` would give for the release, in the same layout and
dtypes. Its replies mean nothing, but activations keep the size they have in a trained model
(matrices have variance 1 / K, norms are 1), so that routing spreads over the experts and nothing
overflows.

Matrices are filled in place: word i of a matrix is a hash of i and the matrix's own number, itself
drawn from `seed`. FP8: any code but the two NaNs; BF16: evenly spread over both signs.
"""

import numpy as np

from engine.device import INLINE, KERNEL, U32, cuda, narrow
from engine.device_weights import Matrix, upload
from engine.host import to_bf16
from engine.shape import SCALE_BLOCK
from engine.weights import Dsa, Hyper, Kda, Layer, Mlp, Moe, Weights

EMBED_STEP = 8                  # values between the embeddings of two tokens
BLOCKS, THREADS = 2048, 256     # fill 132 SMs and 48 alike
CODE_RMS = 107.2                # of e4m3 codes drawn evenly from all but NaN, 448 twice


# ---- random bits -------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def _hashed(i, number):
    """32 random bits of a counter and a matrix's number (two rounds of multiply and shift)."""
    x = U32(U32(i) * U32(0x9E3779B1) + number)
    x = U32(U32(x ^ (x >> U32(16))) * U32(0x7FEB352D))
    x = U32(U32(x ^ (x >> U32(15))) * U32(0x846CA68B))
    return U32(x ^ (x >> U32(16)))


@cuda.jit(**KERNEL)
def _codes_kernel(words, number):
    # grid-stride; a word is four e4m3 codes
    for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
        bits = _hashed(i, number)
        nan = U32(U32((bits & U32(0x7F7F7F7F)) + U32(0x01010101)) & U32(0x80808080))
        words[i] = U32(bits ^ (nan >> U32(7)))      # a NaN loses its lowest bit: 448


@cuda.jit(**KERNEL)
def _bf16_kernel(values, number, size):
    # grid-stride; evenly spread over -size .. size
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        whole = np.int32(_hashed(i, number) >> U32(8)) - np.int32(1 << 23)
        values[i] = narrow(np.float32(whole) * np.float32(size * np.float32(2.0 ** -23)))


def fill_codes(array, number):
    """Random e4m3 codes, none a NaN, in a uint8 device array of a multiple of 4 bytes."""
    assert array.dtype == np.uint8 and array.size % 4 == 0, (array.dtype, array.size)
    words = array.reshape(array.size).view(np.uint32)
    _codes_kernel[BLOCKS, THREADS](words, np.uint32(number))


def fill_bf16(array, number, deviation):
    """Random BF16 of a standard deviation in a uint16 device array."""
    assert array.dtype == np.uint16, array.dtype
    _bf16_kernel[BLOCKS, THREADS](array.reshape(array.size), np.uint32(number),
                                  np.float32(deviation * 3 ** 0.5))


# ---- the tree ----------------------------------------------------------------------------------

class _Maker:
    """Makes one rank's layers; matrices on the device, small vectors on the host."""

    def __init__(self, shape, part, seed):
        self.shape, self.part = shape, part
        self.rng = np.random.default_rng(seed)

    def _number(self):
        return int(self.rng.integers(1 << 32))

    def bf16(self, *size):
        """A BF16 Matrix [.., N, K] on the device."""
        array = cuda.device_array(size, np.uint16)
        if array.size:
            fill_bf16(array, self._number(), size[-1] ** -0.5)
        return Matrix(array, None)

    def fp8(self, *size):
        """An FP8 Matrix [.., N, K] on the device, with a scale for each 128 x 128."""
        array = cuda.device_array(size, np.uint8)
        if array.size:
            fill_codes(array, self._number())
        *groups, rows, columns = size
        blocks = (*groups, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        scales = self.rng.uniform(0.5, 1.5, blocks) / (CODE_RMS * max(columns, 1) ** 0.5)
        return Matrix(array, cuda.to_device(scales.astype(np.float32)))

    def vector(self, size, low, high):
        return self.rng.uniform(low, high, size).astype(np.float32)

    def layer(self, i):
        s, ones = self.shape, np.ones(self.shape.hidden, np.float32)
        kind = s.layer_types[i]
        feed = self.moe() if s.mlp_types[i] == "sparse" else self.mlp(self.part.dense)
        made = Layer(kind, self.dsa() if kind == "dsa" else self.kda(), self.hyper(), self.hyper(),
                     ones, ones, feed)
        return upload(made)

    def hyper(self):
        s = self.shape
        return Hyper(self.bf16(s.hyper_rows, s.hc_mult * s.hidden),
                     self.vector(s.hyper_rows, -0.1, 0.1), np.ones(3, np.float32))

    def kda(self):
        s, heads = self.shape, _length(self.part.kda_heads)
        d, own = s.kda_dim, heads * s.kda_dim
        return Kda(self.bf16(3 * own + 2 * d + heads, s.hidden),
                   self.vector((3 * own, s.conv), -0.5, 0.5), self.bf16(own, d), self.bf16(own, d),
                   self.vector(heads, 0.5, 2.0), self.vector(own, -4.0, 0.0),
                   np.ones(d, np.float32), self.bf16(s.hidden, own))

    def dsa(self):
        s, h = self.shape, _length(self.part.heads)
        return Dsa(self.fp8(s.q_lora + s.kv_lora, s.hidden), np.ones(s.q_lora, np.float32),
                   np.ones(s.kv_lora, np.float32), self.fp8(h * s.qk_nope, s.q_lora),
                   self.bf16(h, s.kv_lora, s.qk_nope), self.bf16(h, s.v_head, s.kv_lora),
                   self.fp8(s.hidden, h * s.v_head),
                   self.bf16(2 * s.index_dim + s.index_heads, s.hidden),
                   self.bf16(s.index_heads * s.index_dim, s.q_lora),
                   np.ones(s.index_dim, np.float32), np.zeros(s.index_dim, np.float32),
                   self.vector((s.index_kpool, s.index_dim), -1.0, 1.0))

    def mlp(self, span):
        c, hidden = _length(span), self.shape.hidden
        return Mlp(self.fp8(2 * c, hidden), self.fp8(hidden, c))

    def moe(self):
        s, c = self.shape, _length(self.part.expert)
        return Moe(self.bf16(s.experts, s.hidden), self.vector(s.experts, -0.01, 0.01),
                   self.fp8(s.experts, 2 * c, s.hidden), self.fp8(s.experts, s.hidden, c),
                   self.mlp(self.part.shared))


def _length(span):
    return span[1] - span[0]


def random_device_weights(shape, part, layers, seed):
    """Weights of one rank on the device: the first `layers` layers of shape, and the head.

    shape: of engine.release, or any without a draft block whose slices start on multiples of 128.
    The embedding is BF16 in host memory, each token's row EMBED_STEP values on from the last one's
    in one long random array: rows differ, and 155,000 of them take 2.5 MB.
    """
    assert not shape.mtp and layers <= shape.layers, (shape.mtp, layers)
    make = _Maker(shape, part, seed)
    made = tuple(make.layer(i) for i in range(layers))
    head = make.bf16(_length(part.vocab), shape.hidden)
    line = to_bf16(make.rng.standard_normal((shape.vocab - 1) * EMBED_STEP + shape.hidden,
                                            np.float32))
    embed = np.lib.stride_tricks.sliding_window_view(line, shape.hidden)[::EMBED_STEP]
    norm = cuda.to_device(np.ones(shape.hidden, np.float32))
    cuda.synchronize()
    return Weights(embed, made, norm, head, None, {})
