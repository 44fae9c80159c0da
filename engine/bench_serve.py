"""`python -m engine bench --serve`: replies over HTTP, 1 to 16 streams at once, and what a warm
prefix saves.

A client in a process of its own (engine.api.load) keeps every stream asking for SECONDS: prompts of
PROMPT random tokens, up to TOKENS of reply, sampled. Printed for each number of streams: tokens a
second of all and of one, seconds to the first token (TTFT) and milliseconds between tokens (ITL),
median and 95th percentile, and rounds a second. Then the same with the KV not split. Warm: a prompt
of PREFIX tokens that goes on by 16, against a new one.
"""

import json
import statistics
import subprocess
import sys
import threading
import time

from engine.api.app import Api, Server, listen
from engine.backend import choose, load
from engine.chat import Chat
from engine.engine import Engine
from engine.hub import Hub
from engine.loop import Loop
from engine.sample import Sampling
from engine.telemetry import Board
from engine.weights import open_model

STREAMS = (1, 2, 4, 8, 16)
SECONDS, PROMPT, TOKENS = 6, 128, 64
PREFIX, RUNS = 1500, 5
HEADER = ("| ranks | KV | streams | tok/s | each | TTFT p50, s | p95 | ITL p50, ms | p95 | "
          "rounds/s |\n|---|---|---|---|---|---|---|---|---|---|")


class Unwatched:
    """In place of a pulse: a bench does not last, and nobody asks how its ranks are."""

    error, silent, everyone = (staticmethod(lambda: None), staticmethod(dict), staticmethod(dict))


def main(config, world):
    """Measure config's model with the KV split and not; rank 0 prints."""
    config = choose(config)
    shape, checkpoint = open_model(config.model)
    weights = load(config, checkpoint, shape, world)
    for split in (True, False) if world.size > 1 else (False,):
        asked = config.replaced(split=split, parallel=max(STREAMS), queue=64,
                                context=min(config.context, PREFIX + 200))
        engine = Engine(asked, world, shape, weights)
        if world.rank:
            engine.follow()
        else:
            _measure(engine, shape)


def _measure(engine, shape):
    """Serve to the client until it has asked for everything."""
    config = engine.config
    hub, board = Hub(engine.meters), Board({"model": "bench"}, Unwatched)
    chat = Chat(config.model)
    api = Api(hub, chat, board, Sampling(max_tokens=TOKENS), ("bench",), config.context,
              int(time.time()))
    server = Server(api, listen("127.0.0.1", 0))
    loop = Loop(engine, hub, Unwatched, board, 0, lambda text: None)
    failed = []

    def ask():
        try:
            _ask(engine, f"http://127.0.0.1:{server.port}", shape.vocab)
        except Exception as error:      # told below, on the thread that must go on
            failed.append(error)
        loop.end()
    client = threading.Thread(target=ask)
    client.start()
    loop.run()
    client.join()
    server.stop(3)
    engine.stop()
    if failed:
        raise failed[0]


def _ask(engine, url, vocab):
    kv = "split" if engine.config.split and engine.world.size > 1 else "whole"
    print(HEADER, flush=True)
    for count in STREAMS:
        before = engine.ledger.number
        found = _client(url, {"streams": count, "seconds": SECONDS, "prompt": PROMPT,
                              "tokens": TOKENS, "vocab": vocab})
        rounds = (engine.ledger.number - before) / found["seconds"]
        rate = found["tokens"] / found["seconds"]
        first, gaps = found["first"], [1e3 * g for g in found["gaps"]]
        print(f"| {engine.world.size} | {kv} | {count} | {rate:.1f} | {rate / count:.1f} | "
              f"{statistics.median(first):.3f} | {_p95(first):.3f} | {statistics.median(gaps):.1f} "
              f"| {_p95(gaps):.1f} | {rounds:.0f} |", flush=True)
    found = _client(url, {"runs": RUNS, "prompt": PREFIX, "vocab": vocab})
    cold, warm = (statistics.median(found[name]) for name in ("cold", "warm"))
    print(f"\nTTFT of {PREFIX} tokens, {engine.world.size} ranks, KV {kv}: cold {cold:.3f} s, "
          f"warm {warm:.3f} s ({cold / warm:.1f} times)\n", flush=True)


def _client(url, asked):
    done = subprocess.run([sys.executable, "-m", "engine.api.load", url, json.dumps(asked)],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the client ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def _p95(values):
    return sorted(values)[int(0.95 * (len(values) - 1))]
