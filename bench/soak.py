"""Load on a running engine: many replies at once, cut, refused, continued; each must be the reply
that the same request gets alone.

    python bench/soak.py --url http://127.0.0.1:8114 --seconds 60 --streams 8 --seed 1

Streams ask for cases drawn from a catalogue, the same ones again and again beside other neighbours:
token ids, text and chat from 1 token to thousands, greedy and seeded, with stop strings and shared
beginnings, as events and whole. Some are left while they wait, are read or are answered. The load
comes and goes: at low tide conversations are kept and continued, at high tide they are dropped, the
pool is full, and bursts overfill the queue (429 is counted and asked again after Retry-After). Two
agents grow a conversation each beside all this, and then once more without it, where each turn must
be continued from the last.

At the end every case is asked alone on the idle engine, read afresh, and compared: text, tokens,
log-probabilities (every bit), finish reason and usage; of a reply that was left, what came of it.
Afresh means: first as many other prompts as there are seats, so that nothing is kept; then the
longest prompt first, so that none goes on where an earlier one ended.

Standard library only. Ends with 1 where a reply differed or did not come, /health said no, a rank's
memory grew by more than GROWTH, or pages were not given back. A small --pages of the engine makes
its pool fill, a small --queue its queue.
"""

import argparse
import collections
import http.client
import itertools
import json
import pathlib
import random
import select
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench.soak_client import (  # noqa: E402
    MARK, MOST_PROMPT, PATIENCE, QUESTIONS, WORDS, Case, ask, catalogue, difference, json_of,
    loopback, sent, telemetry, text)

SIGHT = 4.0             # seconds that a client which wants to leave in some state waits to see it
BURST = 200             # requests at once, at most
GROWTH = 24 << 20       # resident bytes that a rank may gain once it is warm
TURNS = 6               # of an agent before it begins anew
TIDES = 4               # parts of the load: low, high, low, high
MOST_FAULTS = 50        # after which the load ends


class Soak:
    """A run. say(text): a line of progress. faults: what was wrong, in words."""

    def __init__(self, url, seconds, streams, seed, say=print):
        self.address = loopback(url)
        self.seconds, self.streams, self.seed, self.say = seconds, streams, seed, say
        self.facts = self.tree = telemetry(self.address)
        totals = [c["total"] for c in self.facts["classes"]]
        pages = min(totals) * (1 if self.facts["placement"] == "owner" else len(totals))
        self.fit = min(self.facts["context"], pages * self.facts["pool"]["page_rows"])
        self._large = min(MOST_PROMPT, self.fit // 3)
        status, found = json_of(self.address, "POST", "/tokenize", {"prompt": " ".join(WORDS * 2)})
        assert status == 200, found
        self.vocabulary = sorted(set(found["tokens"]))
        self.cases, self.beginnings = catalogue(seed, self.vocabulary, self.fit)
        self.wholes = collections.defaultdict(collections.Counter)      # Case -> replies as JSON
        self.parts = collections.defaultdict(list)                      # Case -> replies
        self.counts, self.peaks = collections.Counter(), collections.Counter()
        self.faults, self.memory = [], []
        self._lock, self._serial = threading.Lock(), itertools.count()
        self._resting = threading.Event()
        self.started = self.until = 0.0

    def run(self):
        """The whole of it; the exit code."""
        watch = threading.Thread(target=self._guarded, args=("watch", self._watch), daemon=True)
        watch.start()
        self._warm()
        started, before = time.monotonic(), telemetry(self.address)
        self.started, self.until = started, started + self.seconds
        self._all([(f"stream {i}", self._stream, i, random.Random(f"{self.seed} stream {i}"))
                   for i in range(self.streams)]
                  + [(f"agent {i}", self._agent, i, self.until) for i in range(2)]
                  + [("bursts", self._bursts)])
        self._rest()
        spent, after = time.monotonic() - started, telemetry(self.address)
        self._remember("after the load")
        self.say(f"load: {spent:.0f} s; agents alone")
        self._all([(f"agent {i}", self._agent, i, None) for i in range(2)])
        first, *others = self.beginnings[0]
        for other in others:
            self._whole(first, True)
            self._whole(other, False)
        self._rest()
        self.say(f"{len(self.wholes)} cases alone")
        self._alone()
        self._remember("at the end")
        self._resting.set()
        watch.join(PATIENCE)
        self._grown()
        self._print(spent, before, after)
        return 1 if self.faults else 0

    def _all(self, work):
        threads = [threading.Thread(target=self._guarded, args=w, daemon=True) for w in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, name, work, *args):
        try:
            work(*args)
        except Exception as e:      # a bug of ours counts too
            self._fault(f"{name}: {e!r}")

    def _fault(self, text):
        with self._lock:
            self.faults.append(text)
            if len(self.faults) >= MOST_FAULTS:
                self.until = 0.0
        self.say(f"fault: {text}")

    def _count(self, name, number=1):
        with self._lock:
            self.counts[name] += number

    # --- the load -------------------------------------------------------------------------------

    def _low(self):
        """Whether it is low tide."""
        return int((time.monotonic() - self.started) * TIDES / self.seconds) % 2 == 0

    def _stream(self, number, rng):
        """One client after another until the time is over; most streams pause at low tide."""
        goes_on = max(1, self.facts["parallel"] - 2)
        while time.monotonic() < self.until:
            if self._low() and number >= goes_on:
                time.sleep(0.05)
                continue
            kind = rng.choices(("whole", "pair", "decode", "state", "soon"),
                               (56, 10, 12, 14, 8))[0]
            case = rng.choice(self.cases)
            if kind == "whole":
                self._whole(case, rng.random() < 0.5)
            elif kind == "pair":        # the second goes on where the first ended, or seems to
                first, *more = rng.choice(self.beginnings)
                self._whole(first, rng.random() < 0.5)
                self._whole(rng.choice(more), rng.random() < 0.5)
            elif kind == "decode":
                self._whole(case, True, rng.randint(1, 12))
            elif kind == "state":
                self._leave_in(rng.choice(("queued", "prefill", "decode")), rng)
            else:
                with sent(self.address, "POST", case.path, case.data):
                    time.sleep(rng.random() * 0.05)
                self._count("left within 50 ms")

    def _whole(self, case, stream, leave_after=None):
        """Ask, again after each 429 while there is time; the Answer, None without a reply."""
        while True:
            try:
                answer = ask(self.address, case, stream, leave_after)
            except (OSError, ValueError, http.client.HTTPException) as e:
                self._fault(f"{case.name}, stream {stream}: {type(e).__name__} {e}")
                return None
            if answer.status == 200:
                break
            if not self._refused(case, answer):
                return None
            time.sleep(max(0.0, min(answer.retry, self.until - time.monotonic())))
            if time.monotonic() >= self.until:
                self._count("given up")
                return None
            self._count("asked again")
        if answer.reply["completion"] is None:
            with self._lock:
                self.parts[case].append(answer.reply)
            self._count("left in a reply")
            return None
        with self._lock:
            self.wholes[case][json.dumps(answer.reply)] += 1
            self.counts["replies"] += 1
            self.counts["continued"] += answer.cached > 0
            for name in ("prompt", "completion"):
                self.counts[f"{name} tokens"] += answer.reply[name]
        if answer.cached >= answer.reply["prompt"]:
            self._fault(f"{case.name}: {answer.cached} cached of {answer.reply['prompt']}")
        return answer

    def _refused(self, case, answer):
        """Whether a refusal is a full queue's."""
        if answer.status != 429 or not answer.retry:
            self._fault(f"{case.name}: HTTP {answer.status}, Retry-After {answer.retry}")
            return False
        self._count("429")
        return True

    def _leave_in(self, state, rng):
        """Close the connection once telemetry shows the request in a state."""
        size, stream = self._large + next(self._serial) % 50, rng.random() < 0.5
        data = json.dumps({"prompt": [rng.choice(self.vocabulary) for _ in range(size)],
                           "max_tokens": MARK, "stream": stream})
        end, seen = time.monotonic() + SIGHT, None
        with sent(self.address, "POST", "/v1/completions", data) as connection:
            if stream and connection.getresponse().status != 200:
                return self._count("429")
            while seen != state and time.monotonic() < end:
                if select.select([] if stream else [connection.sock], [], [], 0.02)[0]:
                    break       # refused, or answered already
                time.sleep(0.02)
                seen = next((r["state"] for r in self.tree.get("requests", ()) if (
                    r["prompt"], r["limit"]) == (size, MARK)), seen)
        self._count(f"left {seen or 'unseen'}")

    def _burst(self):
        """More short requests at once than the queue takes; nobody asks again."""
        count = self.facts["queue"]["limit"] + 2 * self.facts["parallel"] + self.streams
        case = next(c for c in self.cases if json.loads(c.data)["max_tokens"] > 8)

        def one():
            answer = ask(self.address, case, False)
            if answer.status == 200:
                with self._lock:
                    self.wholes[case][json.dumps(answer.reply)] += 1
                self._count("replies")
            else:
                self._refused(case, answer)
        self._all([("burst", one)] * min(count, BURST))

    def _bursts(self):
        """A burst in each high tide, and a look at memory between them."""
        for share in (0.3, 0.5, 0.8):
            time.sleep(max(0.0, self.started + share * self.seconds - time.monotonic()))
            if share == 0.5:
                self._remember("in the middle")
            elif time.monotonic() < self.until:
                self._burst()

    def _agent(self, number, until):
        """Grow a conversation, over and over until a time; without one, once, and each turn must
        have been continued from the last."""
        rng = random.Random(f"{self.seed} agent {number}")
        system = {"role": "system", "content": f"You are agent {number}. " + text(
            rng, min(120, self.fit // 24))}
        asked = [rng.choice(QUESTIONS) for _ in range(TURNS)]
        while True:
            messages, kept = [system], 0
            for turn, question in enumerate(asked):
                messages = [*messages, {"role": "user", "content": question}]
                case = Case(f"agent {number} turn {turn}", "/v1/chat/completions", json.dumps(
                    {"messages": messages, "max_tokens": 40, "temperature": 0, "logprobs": True},
                    sort_keys=True))
                answer = self._whole(case, turn % 2 == 0)
                if answer is None or until and time.monotonic() >= until:
                    return
                self._count("turns beside the load" if until else "turns alone")
                self._count("continued turns beside it" if until else "continued turns alone",
                            answer.cached > 0)
                if not until and answer.cached < kept:
                    self._fault(f"{case.name}: {answer.cached} cached, the last turn left {kept}")
                reply = answer.reply
                kept = reply["prompt"] + reply["completion"] - 1    # the last was never fed
                messages.append({"role": "assistant", "content": reply["text"]})
                if reply["prompt"] * 4 > self.fit:
                    break
            if not until:
                return

    # --- before and after it --------------------------------------------------------------------

    def _fresh(self, size, max_tokens):
        """A case of its own, that goes on nowhere."""
        rng = random.Random(f"{self.seed} fresh {next(self._serial)}")
        return Case("warm-up", "/v1/completions", json.dumps(
            {"prompt": [rng.choice(self.vocabulary) for _ in range(max(size, 8))],
             "max_tokens": max_tokens, "temperature": 0}))

    def _warm(self):
        """Touch every page and grow every buffer once, before memory is looked at."""
        seats = self.facts["parallel"]
        each = min(self.fit, MOST_PROMPT, self.fit * 2 // seats)
        self._all([("warm-up", ask, self.address, self._fresh(each - 16, 16), i % 2 == 0)
                   for i in range(seats + 1)])
        ask(self.address, self._fresh(min(self.fit, MOST_PROMPT) - 16, 1), False)
        self._rest()
        self._remember("warm")

    def _alone(self):
        """Ask every case again, read afresh, and compare."""
        for _ in range(self.facts["parallel"]):
            ask(self.address, self._fresh(8, 1), False)
        prompts = {case: json.loads(next(iter(found)))["prompt"]
                   for case, found in self.wholes.items()}
        for case in sorted(prompts, key=prompts.get, reverse=True):
            answer = ask(self.address, case, False)
            if answer.status != 200 or answer.cached:
                self._fault(f"{case.name}, alone: HTTP {answer.status}, cached {answer.cached}")
                continue
            found = [(json.loads(reply), n, True) for reply, n in self.wholes[case].items()]
            found += [(reply, 1, False) for reply in self.parts[case]]
            for reply, times, whole in found:
                self._count("compared" if whole else "beginnings compared", times)
                if what := difference(reply, answer.reply, whole):
                    self._count("different", times)
                    self._fault(f"{case.name}, {times} times: {what}; {case.data[:300]}")

    def _rest(self):
        """Wait until nothing runs; then every page must be free or kept."""
        end = time.monotonic() + PATIENCE
        while (tree := telemetry(self.address))["requests"] or tree["queue"]["waiting"]:
            if time.monotonic() > end:
                return self._fault(f"still running: {tree['requests']}")
            time.sleep(0.1)
        for c in (*tree["classes"], {"class": "replicated", **tree["pool"]["replicated"]}):
            if c["leased"] or c["free"] + c["kept"] != c["total"]:
                self._fault(f"pages at rest: {c}")
        pages = sum(c["kept"] for c in tree["classes"]) + tree["pool"]["replicated"]["kept"]
        if pages != sum(k["pages"] for k in tree["kept"]):
            self._fault(f"{pages} pages are kept, the kept conversations have {tree['kept']}")
        status, found = json_of(self.address, "GET", "/health")
        if status != 200:
            self._fault(f"/health at rest: {status} {found}")

    def _remember(self, when):
        ranks = telemetry(self.address)["ranks"]
        self.memory.append((when, [r["memory"]["resident"] for r in ranks]))

    def _grown(self):
        first = self.memory[0][1]
        for when, now in self.memory[1:]:
            for rank, (a, b) in enumerate(zip(first, now)):
                if b - a > GROWTH:
                    self._fault(f"rank {rank} has {(b - a) / 2**20:.1f} MiB more {when}")

    def _watch(self):
        """Telemetry and health while the load runs."""
        for i in itertools.count():
            if self._resting.wait(0.15):
                return
            tree = self.tree = telemetry(self.address)
            waiting = [r for r in tree["requests"] if r["seat"] is None]
            live = len(tree["requests"]) - len(waiting)
            self.peaks["waiting"] = max(self.peaks["waiting"], len(waiting))
            self.peaks["live"] = max(self.peaks["live"], live)
            if waiting and live < tree["parallel"]:
                rows = tree["pool"]["page_rows"]
                needed = -(-(waiting[0]["prompt"] + waiting[0]["limit"]) // rows)
                had = sum(c["free"] + c["kept"] for c in tree["classes"])
                self.peaks["full pool"] += needed > had
            if i % 5 == 0:
                status, found = json_of(self.address, "GET", "/health")
                self.peaks["health"] += 1
                if status != 200:
                    self._fault(f"/health: {status} {found}")

    def _print(self, spent, before, after):
        f = self.facts
        self.say(f"\n{f['model']}, {f['world']} ranks, {f['placement']}, backend {f['backend']}, "
                 f"{f['parallel']} at a time, {f['pool']['tokens']} tokens of pool, context "
                 f"{f['context']}; seed {self.seed}, {self.streams} streams, {spent:.0f} s")
        rows = [*sorted(self.counts.items()),
                ("rounds of the load", after["rounds"] - before["rounds"]),
                *((f"engine's {k} tokens", after["tokens"][k] - before["tokens"][k])
                  for k in after["tokens"]),
                *((f"seen: {k}", n) for k, n in sorted(self.peaks.items()))]
        for name, number in rows:
            self.say(f"  {name:28}{number:>10}")
        for when, ranks in self.memory:
            sizes = "  ".join(f"{n / 2**20:.1f}" for n in ranks)
            self.say(f"  {'MiB ' + when:28}{sizes}")
        self.say(f"  {'faults':28}{len(self.faults):>10}")


def main(argv):
    parser = argparse.ArgumentParser(description="load on a running engine; replies are compared")
    parser.add_argument("--url", required=True, help="http://127.0.0.1:PORT")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    try:
        return Soak(given.url, given.seconds, given.streams, given.seed).run()
    except (OSError, http.client.HTTPException) as e:
        print(f"{given.url} does not answer: {e!r}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
