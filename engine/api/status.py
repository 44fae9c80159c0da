"""/health, /metrics and /telemetry: how the engine is, for a probe, a Prometheus, a console.

/health is 200 only while every rank has been heard of within its time, rank 0's loop moves, and
requests are taken; else 503 with the reason, the rank where it is one's, and since when.
"""

import asyncio
import json
import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.hub import SERVING
from engine.telemetry import ROUND_SECONDS, patch

STUCK = 30.0            # seconds of one round after which the loop counts as stuck
EVERY = 0.25            # seconds between two telemetry events
KEEPALIVE = 10.0        # seconds without a change after which a comment is sent


def status_routes(hub, board):
    """The three routes of an engine. hub: engine.hub.Hub. board: engine.telemetry.Board."""
    registry = CollectorRegistry()
    registry.register(_Collector(board))

    async def health(request):
        healthy, found = judge(hub, board)
        return JSONResponse(found, 200 if healthy else 503,
                            None if healthy else {"Retry-After": "2"})

    async def metrics(request):
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def telemetry(request):
        if request.method == "HEAD":    # a body without an end would hold the connection
            return Response(media_type="text/event-stream")
        return StreamingResponse(_events(board), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    return [Route("/health", health), Route("/metrics", metrics), Route("/telemetry", telemetry)]


def judge(hub, board):
    """(healthy, what /health answers)."""
    found = {"status": "ok", "state": hub.state, "time": time.time()}
    if board.fault:
        error, since = board.fault
        found |= {"status": "failed", "reason": error.message, "since": since,
                  "rank": error.rank, "hint": error.hint}
        return False, found
    late = board.silent()
    if late:
        rank, seconds = max(late.items(), key=lambda item: item[1])
        found |= {"status": "late", "rank": rank, "since": time.time() - seconds,
                  "reason": f"rank {rank} has not answered for {seconds:.1f} s"}
        return False, found
    behind = board.behind()
    if behind:
        rank, last = min(behind.items(), key=lambda item: item[1])
        found |= {"status": "late", "rank": rank, "since": time.time() - ROUND_SECONDS,
                  "reason": f"rank {rank} is alive but has not computed a round for "
                  f"{ROUND_SECONDS:g} s; its last is {last}"}
        return False, found
    still = time.monotonic() - board.moved
    if still > STUCK:
        found |= {"status": "stuck", "rank": 0, "since": time.time() - still,
                  "reason": f"the round has taken {still:.0f} s so far"}
        return False, found
    if hub.state != SERVING:
        found |= {"status": hub.state, "reason": hub.reason}
        return False, found
    return True, found


async def _events(board):
    """A snapshot, then merge patches, as server-sent events."""
    board.watchers += 1
    try:
        shown = board.latest
        yield _event("snapshot", shown)
        spoke = time.monotonic()
        while True:
            await asyncio.sleep(EVERY)
            new = board.latest
            change = patch(shown, new) if new is not shown else {}
            if change:
                yield _event("patch", change)
                shown, spoke = new, time.monotonic()
            elif time.monotonic() - spoke > KEEPALIVE:
                yield ": alive\n\n"
                spoke = time.monotonic()
    finally:
        board.watchers -= 1


def _event(kind, value):
    return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"


class _Collector:
    """The newest tree in Prometheus' terms."""

    def __init__(self, board):
        self._board = board

    def collect(self):
        t = self._board.latest
        if "rounds" not in t:       # before the first round
            return
        yield _counter("sparkgrid_rounds", "Rounds computed by all ranks together", t["rounds"])
        tokens = CounterMetricFamily("sparkgrid_tokens", "Tokens by what was done with them",
                                     labels=["kind"])
        for kind, count in t["tokens"].items():
            tokens.add_metric([kind], count)
        yield tokens
        ended = CounterMetricFamily("sparkgrid_replies", "Replies ended, by finish reason",
                                    labels=["reason"])
        for reason, count in t["ended"].items():
            ended.add_metric([reason], count)
        yield ended
        yield _counter("sparkgrid_refusals", "Requests refused by the engine", t["refused"])
        yield _gauge("sparkgrid_queue_length", "Requests that wait", t["queue"]["waiting"])
        yield _gauge("sparkgrid_queue_limit", "Requests that may wait", t["queue"]["limit"])
        running = GaugeMetricFamily("sparkgrid_requests", "Requests by state", labels=["state"])
        for state in ("queued", "prefill", "decode"):
            running.add_metric([state], sum(r["state"] == state for r in t["requests"]))
        yield running
        yield _gauge("sparkgrid_kept_conversations", "Ended conversations that may be continued",
                     len(t["kept"]))
        pool = GaugeMetricFamily("sparkgrid_pool_tokens",
                                 "Tokens of the pool, counted once for the cluster",
                                 labels=["state"])
        for state, name in (("total", "tokens"), ("leased", "tokens_leased"),
                            ("kept", "tokens_kept")):
            pool.add_metric([state], t["pool"][name])
        yield pool
        pages = GaugeMetricFamily("sparkgrid_pages", "Pages by class and state",
                                  labels=["class", "state"])
        for c in t["classes"]:
            for state in ("free", "leased", "kept"):
                pages.add_metric([str(c["class"]), state], c[state])
        yield pages
        yield _histogram("sparkgrid_time_to_first_token_seconds",
                         "From a request's arrival to its first token", t["first_token_seconds"])
        yield _histogram("sparkgrid_inter_token_seconds", "Between two tokens of a reply",
                         t["token_gap_seconds"])
        yield from self._ranks(t["ranks"])

    @staticmethod
    def _ranks(ranks):
        rounds = GaugeMetricFamily("sparkgrid_rank_round", "Last round a rank has computed",
                                   labels=["rank"])
        memory = GaugeMetricFamily("sparkgrid_rank_memory_bytes", "Memory of a rank",
                                   labels=["rank", "kind"])
        waits = CounterMetricFamily("sparkgrid_collective_seconds",
                                    "Time a rank spent in exchanges, by stage",
                                    labels=["rank", "stage"])
        for r in ranks:
            rank = str(r["rank"])
            if "round" in r:
                rounds.add_metric([rank], r["round"])
            for kind, size in r.get("memory", {}).items():
                memory.add_metric([rank, kind], size)
            for stage, seconds in r.get("collectives", {}).items():
                waits.add_metric([rank, stage], seconds)
        return rounds, memory, waits


def _counter(name, text, value):
    return CounterMetricFamily(name, text, value)


def _gauge(name, text, value):
    return GaugeMetricFamily(name, text, value)


def _histogram(name, text, tree):
    total, buckets = 0, []
    for bound, count in zip((*map(str, tree["bounds"]), "+Inf"), tree["counts"]):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=tree["sum"])
