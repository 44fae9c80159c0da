"""The release's first layers on one CUDA device: this engine against Hugging Face transformers, the
same random weights in both.

    pip install -e '.[cuda,mpi]' -r bench/requirements.txt
    python bench/against_transformers_cuda.py --layers 4 8

The engine holds FP8 matrices as the release does; transformers gets each of them multiplied out
and rounded to BF16 (its own FP8 path needs kernels from a hub). Both read the same prompt and are
then fed the same tokens, the engine's greedy ones, one conversation. Prints for each context:
seconds of the prompt, milliseconds a token (median of wall time, the argmax read by the host
included), and how near the logits are: cosine after the prompt, and in how many of the tokens the
argmax is the same. Transformers runs as it comes ("eager") and with the expert paths it offers.
"""

import argparse
import statistics
import time

import numpy as np

from engine.backend import DeviceBackend, make_pool
from engine.config import Config
from engine.forward import Rows
from engine.random_weights import random_device_weights
from engine.release import release_shape
from engine.shape import part
from engine.world import World

EXPERTS = ("eager", "batched_mm", "grouped_mm")
CHUNK = 2048            # prompt tokens that either side takes at a time


# ---- the engine --------------------------------------------------------------------------------

class Ours:
    """One conversation on the engine's device backend."""

    def __init__(self, world, shape, weights, context):
        config = Config(context=context, parallel=1, chunk=CHUNK, backend="cuda")
        self.backend = DeviceBackend(config, world, shape, weights)
        pool = make_pool(config, world.size)
        self.backend.open(0, pool.grant(-(-context // config.page_rows)))

    def prompt(self, tokens):
        """Logits [vocab] after the prompt."""
        for first in range(0, len(tokens), CHUNK):
            piece = tokens[first:first + CHUNK]
            last = first + len(piece) == len(tokens)
            logits = self.backend.prefill(Rows.of(
                piece, np.zeros(len(piece)), np.arange(first, first + len(piece))), last)
        return logits[0].copy()

    def token(self, token, position):
        """Logits [vocab] after one more token, in a buffer that the next call overwrites."""
        return self.backend.decode(Rows.of([token], [0], [position]))[0]


# ---- transformers ------------------------------------------------------------------------------

class Theirs:
    """Transformers' text model with the engine's weights, layer by layer on the same device."""

    def __init__(self, shape, weights):
        import torch
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel
        self.torch = torch
        config = Glm5NextTextConfig(
            num_hidden_layers=shape.layers, index_kpool=shape.index_kpool,
            layer_types=["linear_attention" if kind == "kda" else "indexed_attention"
                         for kind in shape.layer_types],
            mlp_layer_types=list(shape.mlp_types), indexer_types=["full"] * shape.layers)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            self.model = Glm5NextTextModel(config).eval()
            torch.set_default_dtype(before)
        self.config = config
        for name, value in named(weights, shape, self._tensor):
            self._set(name, value)
        left = [name for name, p in (*self.model.named_parameters(), *self.model.named_buffers())
                if p.is_meta]
        assert not left, left
        self.head = self._tensor(weights.head)

    def _tensor(self, value):
        """A torch tensor on the device: BF16 of a Matrix, float32 of a vector."""
        torch = self.torch
        if isinstance(value, np.ndarray):       # the embedding
            return torch.from_numpy(np.array(value).view(np.int16)).cuda().view(torch.bfloat16)
        if not hasattr(value, "scales"):
            return torch.as_tensor(value, device="cuda")
        if value.scales is None:
            return torch.as_tensor(value.w.view(np.int16), device="cuda").view(torch.bfloat16)
        codes = torch.as_tensor(value.w, device="cuda").view(torch.float8_e4m3fn)
        scales = torch.as_tensor(value.scales, device="cuda")
        if codes.ndim == 2:
            codes, scales = codes[None], scales[None]
        found = torch.empty(codes.shape, dtype=torch.bfloat16, device="cuda")
        for one, by, out in zip(codes, scales, found):      # an expert at a time: bounded memory
            rows, columns = one.shape
            wide = by.repeat_interleave(-(-rows // by.shape[0]), 0)[:rows]
            wide = wide.repeat_interleave(128, 1)[:, :columns]
            out.copy_(one.float() * wide)
        return found if value.w.ndim == 3 else found[0]

    def _set(self, name, value):
        *path, last = name.split(".")
        owner = self.model
        for step in path:
            owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
        old = getattr(owner, last)
        value = value.to(old.dtype).reshape(old.shape)
        if last in owner._parameters:
            value = self.torch.nn.Parameter(value, requires_grad=False)
        setattr(owner, last, value)

    def start(self, experts):
        """Forget the conversation; take this expert path from now on."""
        from transformers import DynamicCache
        self.config._experts_implementation = experts
        self.cache = DynamicCache(config=self.config)

    def feed(self, tokens):
        """Logits [vocab], on the device, after these tokens."""
        torch = self.torch
        with torch.no_grad():
            ids = torch.tensor([list(map(int, tokens))], device="cuda")
            hidden = self.model(input_ids=ids, cache=self.cache, use_cache=True).last_hidden_state
            return (hidden[0, -1] @ self.head.T).float()

    def prompt(self, tokens):
        """Logits [vocab] after the prompt."""
        for first in range(0, len(tokens), CHUNK):
            logits = self.feed(tokens[first:first + CHUNK])
        return logits


def named(weights, shape, tensor):
    """(name in transformers, tensor) of every parameter. tensor(value): of a Matrix or a vector."""
    yield "embed_tokens.weight", tensor(weights.embed)
    yield "norm.weight", tensor(weights.norm)
    for i, layer in enumerate(weights.layers):
        at = f"layers.{i}."
        yield at + "input_layernorm.weight", tensor(layer.attn_norm)
        yield at + "post_attention_layernorm.weight", tensor(layer.ffn_norm)
        for site, hyper in (("attn_hc", layer.attn_hyper), ("ffn_hc", layer.ffn_hyper)):
            for name in ("fn", "base", "scale"):
                yield f"{at}{site}.{name}", tensor(getattr(hyper, name))
        attention = _kda if layer.kind == "kda" else _dsa
        for name, value in attention(layer.attn, shape, tensor):
            yield f"{at}self_attn.{name}", value
        if hasattr(layer.mlp, "router"):
            yield at + "mlp.gate.weight", tensor(layer.mlp.router)
            yield at + "mlp.gate.e_score_correction_bias", tensor(layer.mlp.bias)
            yield at + "mlp.experts.gate_up_proj", tensor(layer.mlp.gate_up)
            yield at + "mlp.experts.down_proj", tensor(layer.mlp.down)
            yield from _mlp(at + "mlp.shared_experts.", layer.mlp.shared, tensor)
        else:
            yield from _mlp(at + "mlp.", layer.mlp, tensor)


def _mlp(at, mlp, tensor):
    gate, up = tensor(mlp.gate_up).chunk(2)
    yield at + "gate_proj.weight", gate
    yield at + "up_proj.weight", up
    yield at + "down_proj.weight", tensor(mlp.down)


def _kda(w, shape, tensor):
    wide, d = shape.kda_heads * shape.kda_dim, shape.kda_dim
    rows = tensor(w.inp).split((wide, wide, wide, d, d, shape.kda_heads))
    names = ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj")
    for name, value in zip(names, rows):
        yield name + ".weight", value
    yield "conv1d.weight", tensor(w.conv)
    yield "forget_gate.f_b_proj.weight", tensor(w.f_b)
    yield "forget_gate.dt_bias", tensor(w.dt_bias)
    yield "forget_gate.A_log", tensor(w.decay).log()
    yield "g_b_proj.weight", tensor(w.g_b)
    yield "o_norm.weight", tensor(w.o_norm)
    yield "o_proj.weight", tensor(w.out)


def _dsa(w, shape, tensor):
    q_a, kv_a = tensor(w.down).split((shape.q_lora, shape.kv_lora))
    yield "q_a_proj.weight", q_a
    yield "kv_a_proj_with_mqa.weight", kv_a
    yield "q_a_layernorm.weight", tensor(w.q_norm)
    yield "kv_a_layernorm.weight", tensor(w.kv_norm)
    yield "q_b_proj.weight", tensor(w.q_up)
    keys, values = tensor(w.key_up), tensor(w.value_up)     # [heads, kv_lora, qk_nope], [.., v, ..]
    both = keys.new_empty((len(keys), shape.qk_nope + shape.v_head, shape.kv_lora))
    both[:, :shape.qk_nope], both[:, shape.qk_nope:] = keys.transpose(1, 2), values
    yield "kv_b_proj.weight", both
    yield "o_proj.weight", tensor(w.out)
    key, gate, weight = tensor(w.index_in).split((shape.index_dim, shape.index_dim,
                                                  shape.index_heads))
    yield "indexer.wk.weight", key
    yield "indexer.index_kpool_compress_gate", gate
    yield "indexer.weights_proj.weight", weight
    yield "indexer.wq_b.weight", tensor(w.index_q)
    yield "indexer.k_norm.weight", tensor(w.k_norm_w)
    yield "indexer.k_norm.bias", tensor(w.k_norm_b)
    yield "indexer.index_kpool_compress_ape", tensor(w.ape)


# ---- all ---------------------------------------------------------------------------------------

def timed(work, *args):
    """(what work gave, its seconds by the host's clock; the device has finished)."""
    begin = time.perf_counter()
    found = work(*args)
    return found, time.perf_counter() - begin


def ours(world, shape, weights, prompt, count):
    """(logits after the prompt, tokens, argmaxes, seconds of the prompt, ms a token)."""
    chat = Ours(world, shape, weights, len(prompt) + count + 2)
    chat.prompt(prompt)                         # compiles; the second reading overwrites the first
    chat.backend.device.clear(0)
    logits, seconds = timed(chat.prompt, prompt)
    tokens, times, found = [int(logits.argmax())], [], []
    for i in range(count):
        token, took = timed(lambda: int(chat.token(tokens[-1], len(prompt) + i).argmax()))
        times.append(took)
        found.append(token)
        tokens.append(token)
    return logits, tokens[:count], found, seconds, statistics.median(times) * 1e3


def theirs(model, prompt, tokens):
    """The same of transformers, fed `tokens`."""
    logits, seconds = timed(lambda: model.prompt(prompt).cpu().numpy())
    times, found = [], []
    for token in tokens:
        best, took = timed(lambda: int(model.feed([token]).argmax()))
        times.append(took)
        found.append(best)
    return logits, found, seconds, statistics.median(times) * 1e3


def compare(world, layers, contexts, count):
    """Print one table of `layers` layers."""
    shape = release_shape(layers)
    weights = random_device_weights(shape, part(shape, 0, 1), layers, 1)
    prompts = [np.random.default_rng(n).integers(0, shape.vocab, n) for n in contexts]
    done = [ours(world, shape, weights, prompt, count) for prompt in prompts]
    model = Theirs(shape, weights)
    print(f"\n{layers} layers\n\n| context | side | prompt, s | ms a token | over the engine's | "
          "cosine | same argmax |\n|---|---|---|---|---|---|---|", flush=True)
    for prompt, (logits, tokens, found, seconds, ms) in zip(prompts, done):
        print(f"| {len(prompt):,} | engine | {seconds:.3f} | {ms:.2f} | 1 | | |", flush=True)
        for experts in EXPERTS:
            try:
                model.start(experts)
                model.prompt(prompt[:64])       # warms up
                model.start(experts)
                other, argmaxes, took, each = theirs(model, prompt, tokens)
            except Exception as error:          # a path that this GPU or version lacks
                print(f"| {len(prompt):,} | transformers, {experts}: {type(error).__name__}: "
                      f"{str(error)[:120]} |", flush=True)
                continue
            cosine = float(logits @ other / np.linalg.norm(logits) / np.linalg.norm(other))
            same = sum(a == b for a, b in zip(found, argmaxes))
            print(f"| {len(prompt):,} | transformers, {experts} | {took:.3f} | {each:.2f} | "
                  f"{each / ms:.1f} | {cosine:.5f} | {same} of {count} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="timed (default 16)")
    options = parser.parse_args()
    for layers in options.layers:
        compare(World.join(), layers, options.contexts, options.tokens)


if __name__ == "__main__":
    main()
