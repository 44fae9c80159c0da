"""One snapshot of an engine as text, for scripts and for terminals that draw nothing."""

import time

from tui.state import number, rows, table, text
from tui.units import UNKNOWN, count, percent, rate, size, span

MAP = 64        # cells of a page map in a line


def report(tree, url):
    """The tree (docs/telemetry.md) in lines; a field that is missing shows as "?"."""
    lines = [*_head(tree, url), "", *_ranks(tree), "", *_pool(tree), "", *_requests(tree)]
    log = rows(tree, "log")[-5:]
    if log:
        lines += ["", "last refusals and faults:"]
        lines += [f"  {_clock(number(r, 'time'))} {plain(text(r, 'level'))}: "
                  f"{plain(text(r, 'text'))}" for r in log]
    return "\n".join(lines)


def plain(value):
    """A server's text in a terminal: one line, no control characters; "?" for None."""
    return UNKNOWN if value is None else "".join(
        c if c.isprintable() else " " for c in value)


def _head(tree, url):
    now, started = number(tree, "time"), number(tree, "started")
    up = None if now is None or started is None else now - started
    split = {True: "split", False: "whole on every rank"}.get(tree.get("split"), UNKNOWN)
    lines = [f"sparkgrid {plain(text(tree, 'version'))} at {url}: {plain(text(tree, 'model'))}, "
             f"{count(number(tree, 'world'))} ranks, up {span(up)}",
             f"KV {split}, {plain(text(tree, 'placement'))}, {plain(text(tree, 'kv_dtype'))}; "
             f"context {count(number(tree, 'context'))} tokens, "
             f"{count(number(tree, 'parallel'))} conversations at once"]
    if text(tree, "fault") is not None:
        lines.append(f"FAULT: {plain(text(tree, 'fault'))}")
    return lines


def _ranks(tree):
    for row in rows(tree, "ranks"):
        pages = table(row, "pages")
        memory = table(row, "memory")
        device = f", {size(memory['device'])} of its device" if "device" in memory else ""
        yield (f"rank {count(number(row, 'rank'))}  {plain(text(row, 'host'))}, "
               f"{plain(text(row, 'backend'))}, {size(memory.get('resident'))} resident{device}, "
               f"round {count(number(row, 'round'))}")
        yield (f"  pages: {count(pages.get('free'))} free, {count(pages.get('leased'))} leased, "
               f"{count(pages.get('kept'))} kept of {count(pages.get('total'))}")
        cells = text(row, "map")
        if cells:
            yield f"  [{plain(_thin(cells))}]"
    if rows(tree, "ranks"):
        yield "  map: . free  # leased  k kept"


def _thin(cells):
    """A map of at most MAP cells."""
    if len(cells) <= MAP:
        return cells
    return "".join(cells[i * len(cells) // MAP] for i in range(MAP))


def _pool(tree):
    pool, tokens, seconds = table(tree, "pool"), table(tree, "tokens"), table(tree, "seconds")
    total = pool.get("tokens")
    yield (f"pool: {count(total)} tokens; {count(pool.get('tokens_leased'))} leased "
           f"({percent(pool.get('tokens_leased'), total)}), {count(pool.get('tokens_kept'))} kept "
           f"({percent(pool.get('tokens_kept'), total)})")
    for kind in ("prefill", "decode"):
        spent = seconds.get(kind)
        average = tokens[kind] / spent if kind in tokens and spent else None
        yield (f"{kind}: {count(tokens.get(kind))} tokens in {span(spent)}, "
               f"{rate(average)} while it computed")
    yield f"taken from kept conversations: {count(tokens.get('hit'))} tokens"


def _requests(tree):
    found, kept = rows(tree, "requests"), rows(tree, "kept")
    yield (f"requests: {len(found)} ({count(number(tree, 'queue', 'waiting'))} of them wait, "
           f"{count(number(tree, 'queue', 'limit'))} may); kept conversations: {len(kept)}; "
           f"refused so far: {count(number(tree, 'refused'))}")
    for r in found:
        owner, pace = number(r, "owner"), number(r, "rate")
        place = "" if owner is None else f", class {count(owner)}"
        pace = "" if pace is None else f"{rate(pace)}, "
        yield (f"  {count(number(r, 'id'))}  {plain(text(r, 'state'))}{place}: "
               f"{count(number(r, 'prompt'))} prompt tokens ({count(number(r, 'cached'))} cached), "
               f"{count(number(r, 'generated'))} of {count(number(r, 'limit'))} generated, "
               f"{pace}{span(number(r, 'age'))} old")


def _clock(seconds):
    """Local time of day of seconds since 1970."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError, TypeError):
        return UNKNOWN
