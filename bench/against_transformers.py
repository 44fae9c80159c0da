"""The embedded model on the CPU: this engine on one rank against Hugging Face transformers.

    pip install -e '.[mpi]' -r bench/requirements.txt
    python bench/against_transformers.py

Both read the same prompts (models/mini/expected.json) and then generate the same number of tokens,
greedily, with a KV cache, eos or not. Each side is a process of its own, since the engine sets its
thread count before NumPy is imported; they run by turns, never at once. Transformers is taken at
its best: every dtype and expert path is tried on one thread, and for each prompt the quickest at
prefill and the quickest at decode are then measured on one thread and on all cores.

Prefill is prompt tokens over the time to the first token; transformers' clock starts after its own
`generate` has set up. Decode is the tokens after the first over the time they took. Prints a
Markdown table, mean and standard deviation of the runs after one warm-up, and the ratios. Exits 1
where two runs differ in an id up to the first eos; after it the model was never trained to go on.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MINI = ROOT / "models" / "mini"
PROMPTS = ("count", "long_3000")
DTYPES = ("float32", "bfloat16")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
TRIALS = 2          # runs, the better counts, of TRIAL_TOKENS to find transformers' quickest
TRIAL_TOKENS = 16
TESTS = ("prefill", "decode")
ENGINE = "engine, 1 rank, 1 thread"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="counted runs (default 3)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N",
                        help="tokens generated (default 64)")
    parser.add_argument("--side", choices=("engine", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return _answer(_engine_side() if args.side == "engine" else _transformers_side())
    if args.runs < 2 or args.tokens < 2:
        parser.error("a standard deviation needs --runs 2, decode speed --tokens 2, or more")
    expected = json.loads((MINI / "expected.json").read_text(encoding="utf-8"))
    cases = {case["name"]: case["prompt_ids"] for case in expected["cases"]}
    print(f"load average {_load()} on {os.cpu_count()} cores at the start", flush=True)
    with _Side("engine") as engine, _Side("transformers") as transformers:
        measured = {}
        for name in PROMPTS:
            rows = {ENGINE: (engine, {})}
            for setting in _quickest(transformers, name, cases[name]):
                for threads in sorted({1, os.cpu_count()}):
                    label = f"transformers, {', '.join(setting)}, threads {threads}"
                    rows[label] = (transformers, dict(zip(("dtype", "experts"), setting),
                                                      threads=threads))
            measured[name] = _measure(rows, cases[name], args)
    print(f"load average {_load()} at the end\n")
    _print_table(measured, cases)
    agree = [_compare(name, runs, expected["eos_token_id"]) for name, runs in measured.items()]
    return 0 if all(agree) else 1


def _load():
    return f"{os.getloadavg()[0]:.1f}"


def _quickest(transformers, name, prompt):
    """The settings (dtype, experts) that are first in prefill or decode: the trials by turns."""
    best = {(dtype, experts): dict.fromkeys(TESTS, 0.0) for dtype in DTYPES for experts in EXPERTS}
    for _ in range(TRIALS):
        for (dtype, experts), speeds in best.items():
            run = transformers.run(prompt, TRIAL_TOKENS,
                                   {"dtype": dtype, "experts": experts, "threads": 1})
            speeds.update({test: max(speeds[test], run[test]) for test in TESTS})
    for setting, speeds in best.items():
        print(f"trial {name}, {', '.join(setting)}: "
              + ", ".join(f"{test} {speeds[test]:.1f}" for test in TESTS), flush=True)
    return sorted({max(best, key=lambda setting: best[setting][test]) for test in TESTS})


def _measure(rows, prompt, args):
    """{label: [run]}: one warm-up of all rows, then all rows by turns, args.runs times."""
    runs = {label: [] for label in rows}
    for turn in range(args.runs + 1):
        for label, (side, asked) in rows.items():
            run = side.run(prompt, args.tokens, asked)
            assert len(run["ids"]) == args.tokens, f"{label} gave {len(run['ids'])} tokens"
            if turn:
                runs[label].append(run)
    return runs


def _print_table(measured, cases):
    print("| prompt (tokens) | measured | prefill t/s | decode t/s |\n|---|---|---|---|")
    for name, runs in measured.items():
        for label, done in runs.items():
            speeds = [[run[test] for run in done] for test in TESTS]
            print(f"| {name} ({len(cases[name])}) | {label} | " + " | ".join(
                f"{statistics.mean(s):.1f} ± {statistics.stdev(s):.1f}" for s in speeds) + " |")
    print()
    for name, runs in measured.items():
        for test in TESTS:
            means = {label: statistics.mean(run[test] for run in done)
                     for label, done in runs.items()}
            ours = means.pop(ENGINE)
            best = max(means, key=means.get)
            print(f"- {name}: {test} {ours / means[best]:.2f} times {best}")


def _compare(name, runs, eos):
    """Whether every run of every side gave the engine's ids up to and with the first eos."""
    ids = [run["ids"] for done in runs.values() for run in done]
    ours = runs[ENGINE][0]["ids"]
    ends = [i + 1 for i, token in enumerate(ours) if token in eos]
    compared = ends[0] if ends else len(ours)
    agree = all(other[:compared] == ours[:compared] for other in ids)
    reach = min(next((i for i, pair in enumerate(zip(ours, other)) if pair[0] != pair[1]),
                     len(ours)) for other in ids)
    print(f"- {name}: {len(ids)} runs, ids {'equal' if agree else 'DIFFER'} over the {compared} "
          f"tokens compared; all runs are the same for {reach} of {len(ours)}")
    return agree


class _Side:
    """A process that measures: a JSON line in, a JSON line out, asleep in between."""

    def __init__(self, name):
        self._name = name
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})

    def run(self, prompt, tokens, asked):
        """{"ids": token ids, "prefill": t/s, "decode": t/s} of one generation."""
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens, **asked}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self._name} process ended with code {self._process.wait()}")
        done = json.loads(line)
        start, *times = done["times"]
        return {"ids": done["ids"], "prefill": len(prompt) / (times[0] - start),
                "decode": (tokens - 1) / (times[-1] - times[0])}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()


# --- in the measuring processes -----------------------------------------------------------------


def _answer(generate):
    """Serve `generate` until standard input ends; what libraries print goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        ids, times = generate(**json.loads(line))
        print(json.dumps({"ids": ids, "times": times}), file=answers, flush=True)
    return 0


def _engine_side():
    """generate(prompt, tokens) -> (ids, seconds at the start and at each token), on one rank."""
    from engine.config import fit, parse, prepare_environment
    prepare_environment()
    from engine.engine import Engine
    from engine.sample import Sampling
    from engine.shape import part
    from engine.weights import load_weights, open_model
    from engine.world import World

    world = World.join()
    shape, checkpoint = open_model(str(MINI))
    config = fit(parse(["--parallel", "1"]), shape)
    engine = Engine(config, world, shape, load_weights(checkpoint, shape, part(shape, 0, 1)))

    def generate(prompt, tokens):
        ids, times = [], [time.perf_counter()]
        engine.submit(prompt, Sampling(max_tokens=tokens))      # no stop_ids: eos does not end it
        while engine.busy:
            for event in engine.step():
                ids.append(event.token)
                times.append(time.perf_counter())
        return ids, times
    return generate


def _transformers_side():
    """generate(prompt, tokens, dtype, experts, threads) -> as the engine's."""
    import torch
    from transformers import Glm5NextForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()       # the mini model has no vision tower: a long warning
    logging.disable_progress_bar()
    models = {}
    for dtype in DTYPES:
        for experts in EXPERTS:
            model = Glm5NextForConditionalGeneration.from_pretrained(
                MINI, dtype=getattr(torch, dtype), attn_implementation="eager",
                experts_implementation=experts).eval()
            model.generation_config.eos_token_id = None         # eos does not end it
            models[dtype, experts] = model

    def generate(prompt, tokens, dtype, experts, threads):
        torch.set_num_threads(threads)
        clock, ids = _Clock(), torch.tensor([prompt])
        out = models[dtype, experts].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            use_cache=True, streamer=clock)
        return out[0, len(prompt):].tolist(), clock.times
    return generate


class _Clock:
    """A streamer: `generate` hands it the prompt, once it has set up, and then each token."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


if __name__ == "__main__":
    sys.exit(main())
