"""The panel of the engine as a whole: how it was started, what its pool holds, how long replies
take."""

from textual.content import Content, Span

from tui import units
from tui.dashboard.panel import Panel, clean, figure, flow
from tui.dashboard.window import largest_window
from tui.state import number, rows, table, text

STATES = (("leased", "█", "$text-primary"), ("kept", "▒", "$text-warning"),
          ("free", "·", "$foreground-muted"))
COLUMN = 10             # columns of a figure


class Engine(Panel):
    """Facts, occupancy in pages, tokens and bytes, queue, times."""

    BORDER_TITLE = "1 Engine"
    HELP = ("What the pool holds: leased to running conversations (█), kept by ended ones that may"
            " go on (▒), free (·). Times are since the engine started.")

    def picture(self, state, history, width):
        return Content("\n").join([flow(_started(state), width), *_occupancy(state, width),
                                   flow(_now(state), width)])


def _started(state):
    """(text, columns) of how it was started."""
    kind = " ".join(clean(word, 16) for key in ("backend", "kv_dtype", "placement")
                    if (word := text(state, key)))
    if state.get("split") is False:
        kind += ", not split"
    return [(kind, max(17, len(kind))),
            (f"context {units.count(number(state, 'context'))} tokens", 24),
            (f"{units.count(number(state, 'parallel'))} at a time", 13)]


def _sum(state, key):
    found = [number(row, key) for row in rows(state, "classes")]
    return sum(found) if found and None not in found else None


def _occupancy(state, width):
    """A bar and a table of the pool. Lines of Content."""
    pages = {k: _sum(state, k) for k in ("leased", "kept", "free", "total")}
    total, leased, kept = (number(state, "pool", k)
                           for k in ("tokens", "tokens_leased", "tokens_kept"))
    free = None if None in (total, leased, kept) else total - leased - kept
    tokens = {"leased": leased, "kept": kept, "free": free, "total": total}
    lines = [_bar(pages, width),
             Content.styled(" " * 7 + "".join(k.rjust(COLUMN) for k in pages), "$foreground-muted"),
             Content("pages  " + "".join(figure(n, COLUMN) for n in pages.values())),
             Content("tokens " + "".join(figure(n, COLUMN) for n in tokens.values()))]
    if size := number(state, "pool", "page_bytes"):
        lines.append(Content("bytes  " + "".join(
            units.size(None if n is None else n * size).rjust(COLUMN) for n in pages.values())))
    return lines


def _bar(pages, width):
    """The pool's pages as a bar: what is leased or kept shows at least one column."""
    total = pages["total"]
    if not total or total < 0 or None in pages.values():
        return Content.styled("?" * width, "$foreground-muted")
    plain, spans, left = "", [], width
    for name, shape, colour in STATES:
        part = max(0.0, min(1.0, pages[name] / total)) * width
        columns = left if name == "free" else min(left, max(round(part), part > 0))
        spans.append(Span(len(plain), len(plain) + columns, colour))
        plain += shape * columns
        left -= columns
    return Content(plain, spans)


def _now(state):
    """(text, columns) of the queue, what came of requests, and times."""
    ended = table(state, "ended")
    why = ", ".join(f"{clean(k, 12)} {n:,.0f}" for k, n in sorted(ended.items())[:4])
    found = [(f"largest new conversation {figure(largest_window(state), 11).strip()} tokens", 41),
             (f"waiting {units.count(number(state, 'queue', 'waiting'))} of"
              f" {units.count(number(state, 'queue', 'limit'))}", 16),
             (f"refused {units.short(number(state, 'refused'))}", 13),
             (f"ended {why or 'none'}", 24)]
    for title, key in (("first token", "first_token_seconds"), ("token gap", "token_gap_seconds")):
        half, most = (quantile(state.get(key), q) for q in (0.5, 0.95))
        found.append((f"{title}: half {_time(half)}, 95 % {_time(most)}", len(title) + 30))
    return found


def _time(bound):
    """"<= 0.5 s" of a bound in seconds; above the last bound ">"."""
    if bound is None:
        return "?"
    sign, seconds = bound
    return f"{sign}{seconds * 1000:.0f} ms" if seconds < 1 else f"{sign}{seconds:g} s"


def quantile(histogram, q):
    """("≤", bound) of the bucket that the q-th observation is in, (">", last bound), or None."""
    if not isinstance(histogram, dict):
        return None
    bounds = [number(histogram, "bounds", i) for i in range(_length(histogram, "bounds"))]
    counts = [number(histogram, "counts", i) for i in range(_length(histogram, "counts"))]
    if not bounds or None in bounds or None in counts or len(counts) != len(bounds) + 1:
        return None
    total = sum(counts)
    if total <= 0:
        return None
    for bound, so_far in zip(bounds, _running(counts)):
        if so_far >= q * total:
            return "≤", bound
    return ">", bounds[-1]


def _length(histogram, key):
    value = histogram.get(key)
    return min(len(value), 64) if isinstance(value, list) else 0


def _running(counts):
    total = 0
    for n in counts:
        total += n
        yield total
