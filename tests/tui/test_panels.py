# pytest tests/tui/test_panels.py
"""The dashboard's panels one by one: map, window, plots, tables, and how they change.

The window is held against the pool's arithmetic by trying every length, the plot against rates
worked out by hand.
"""

import copy
import random

import pytest
from textual.widget import Widget

from canned_server import tree
from dashboard_host import SIZES, SIZE_NAMES, Host, past, rows_of, show
from engine.pool.owner import needed
from tui.dashboard import Dashboard, pagemap
from tui.dashboard.engine import Engine
from tui.dashboard.kept import Kept
from tui.dashboard.livetable import clock
from tui.dashboard.panel import clean
from tui.dashboard.plot import Plot, ceiling, draw, stretches
from tui.dashboard.rank import Rank, Ranks
from tui.dashboard.requests import MOST, Requests
from tui.dashboard.window import class_windows, largest_window
from tui.state import History

pytestmark = pytest.mark.anyio


# ---- the page map --------------------------------------------------------------------------------

def test_each_state_has_a_shape_of_its_own():
    shapes = [shape for shape, _, _ in (*pagemap.KINDS.values(), pagemap.STRANGE)]
    assert len(set(shapes)) == len(shapes) and all(len(s) == 1 for s in shapes)


@pytest.mark.parametrize("width", [20, 45, 64, 76, 128, 200])
@pytest.mark.parametrize("cells", [1, 32, 255, 256])
def test_a_map_that_fits_shows_each_cell(width, cells):
    text = "".join(random.Random(cells).choices(".#k", k=cells))
    rank = {"map": text, "pages": {"total": cells}}
    lines = pagemap.picture(rank, width, lines=100).plain.split("\n")
    assert all(len(line) <= width for line in lines)
    shapes = {"·": ".", "■": "#", "□": "k"}
    assert "".join(shapes[c] for c in "".join(lines)) == text


def test_a_map_of_a_million_cells_is_what_most_of_each_are():
    text = "#" * 300_000 + "." * 500_000 + "k" * 200_000
    lines = pagemap.picture({"map": text}, 100, 2).plain.split("\n")
    assert [len(x) for x in lines] == [64, 64]
    whole = "".join(lines)
    assert [whole.count(s) for s in "■·□"] == pytest.approx([38.4, 64, 25.6], abs=1)
    assert pagemap.resample("#.#.", 2) == "##"      # of equals the busier
    assert pagemap.resample("k.k.", 2) == "kk"


def test_replicated_pages_are_cells_of_the_same_scale():
    rank = {"map": "." * 256, "pages": {"total": 2560},
            "replicated": {"free": 30, "leased": 60, "kept": 10, "total": 100}}
    split, region, scale = pagemap.cells_of(rank)
    assert scale == 10 and region == "R" * 7 + "r" * 3
    *_, last = pagemap.picture(rank, 64, 4).plain.split("\n")
    assert last == "◆" * 7 + "◇" * 3
    rank["replicated"].update(leased=1, kept=0)
    assert pagemap.cells_of(rank)[1].count("R") == 1        # one page in use does show


async def test_the_legend_says_how_many_pages_a_cell_is():
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        for state, words in ((tree(pages=32), "a cell is 1 page "),
                             (tree(world=2, pages=1024), "a cell is 4 pages ")):
            await show(pilot, state)
            assert words in app.query_one(pagemap.Legend).render().plain + " "
        state["ranks"][1]["pages"]["total"] = 2560
        await show(pilot, copy.deepcopy(state))
        assert "a cell is 4 to 10 pages" in app.query_one(pagemap.Legend).render().plain


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_maps_of_many_pages_keep_their_height(size):
    app = Host()
    async with app.run_test(size=size) as pilot:
        await pilot.press("3")
        heights = set()
        for pages in (1_000_000, 999_999, 256):
            await show(pilot, tree(world=8, pages=pages))
            heights.add(tuple(r.size.height for r in app.query(Rank)))
        assert len(heights) == 1
        if size == (240, 60):
            assert app.query_one(Ranks).max_scroll_y == 0      # all eight are in sight


# ---- the window ----------------------------------------------------------------------------------

@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("placement", ["striped", "owner"])
def test_the_largest_window_is_the_last_length_that_the_pool_could_grant(world, placement):
    rng = random.Random(world)
    for _ in range(30):
        free = [rng.randint(0, 9) for _ in range(world)]
        replicated = rng.choice([0, 0, 3, 7]) if placement == "striped" else 0
        room = rng.randint(0, replicated)
        state = {"placement": placement, "replicate": replicated * 64, "context": 10**9,
                 "classes": [{"class": c, "windows_free": n} for c, n in enumerate(free)],
                 "pool": {"page_rows": 64, "replicated": {"free": room, "kept": 0}}}
        fits = []
        for pages in range(200):
            for owner in range(world if placement == "owner" else 1):
                counts = needed(placement, pages, replicated, world, owner)
                if min(pages, replicated) <= room and all(
                        n <= have for n, have in zip(counts, free)):
                    fits.append(pages)
        assert largest_window(state) == 64 * max(fits), state
        state["context"] = 100
        assert largest_window(state) == min(100, 64 * max(fits))
    assert len(class_windows(state)) == world
    assert largest_window({}) is None


# ---- plots ---------------------------------------------------------------------------------------

def test_a_stretch_has_the_rate_of_its_own_time():
    samples = [(float(t), {"n": 10.0 * min(t, 60) + 2.0 * max(t - 60, 0)}) for t in range(121)]
    assert stretches(samples, "n", 13, 130) == pytest.approx([10] * 6 + [2] * 7)
    assert stretches(samples[:66], "n", 4, 40) == pytest.approx([10, 10, 10, 6])
    assert stretches(samples, "n", 15, 150) == [None, None, *[pytest.approx(10)] * 6,
                                                *[pytest.approx(2)] * 7]
    assert stretches(samples, "other", 4, 100) == [None] * 4
    assert stretches(samples[:1], "n", 3, 30) == [None] * 3


def test_a_bar_does_not_change_once_its_stretch_is_over():
    rng = random.Random(1)
    samples, count = [], 0
    seen = {}
    for i in range(800):
        count += rng.randint(0, 40)
        samples.append((i / 4, {"n": count}))
        rates = stretches(samples, "n", 20, 100)
        end = samples[-1][0]
        for k, rate in enumerate(rates[:-1]):
            first = (int(end // 5) - 19 + k) * 5
            if rate is not None and first + 5 < end:
                assert seen.setdefault(first, rate) == rate


def test_the_axis_ends_at_a_round_number():
    assert [ceiling(v) for v in (0, 0.3, 1, 1.5, 4, 7, 11, 480, 501)] == [
        1, 1, 1, 2, 5, 10, 20, 500, 1000]


def test_bars_are_as_high_as_their_values():
    lines, top = draw([None, 0, 25, 50, 100], 4)
    assert top == 100
    assert lines == ["    █", "    █", "   ██", " _███"]
    assert draw([12.5, 100], 2)[0] == [" █", "▂█"]


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_plots_have_axes_and_rates(size, screen_text):
    state = tree()
    app = Host()
    async with app.run_test(size=size) as pilot:
        await show(pilot, state, past(state, rate=33.0))
        text = screen_text(app)
        assert "decode 33 tok/s" in text and "prefill 100 tok/s" in text
        assert "rounds 2 /s" in text
        assert text.count("-5 min") == 3 and text.count("now") >= 3
        plot = app.query_one("#plot-decode", Plot).render().plain.splitlines()
        assert plot[1].startswith("   50┤") and plot[-2].startswith("    0┤")
        assert plot[-2][6:].strip("█") == ""


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_a_young_history_fills_its_plot(size):
    """The window grows with what is known of the past, and its label with it."""
    state = tree()
    app = Host()
    async with app.run_test(size=size) as pilot:
        for seconds, window, label in ((12, 30, "-30 s"), (30, 30, "-30 s"), (31, 60, "-1 min"),
                                       (61, 120, "-2 min"), (125, 300, "-5 min"),
                                       (400, 300, "-5 min")):
            await show(pilot, state, past(state, seconds=seconds))
            *_, bars, axis = app.query_one("#plot-decode", Plot).render().plain.splitlines()
            assert axis.strip().startswith(label + " ") and axis.endswith("now")
            known = len(bars[6:].strip()) / len(bars[6:])
            assert known == pytest.approx(min(1, seconds / window), abs=1.01 / len(bars[6:]))
            assert bars.endswith("█")


async def test_an_unknown_rate_is_blank_and_none_is_zero(screen_text):
    state = tree()
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, state, History())
        assert "decode ? tok/s" in screen_text(app)
        await show(pilot, state, past(state, seconds=100, rate=0.0))
        bars = app.query_one("#plot-decode", Plot).render().plain.splitlines()[-2][6:]
        assert bars.startswith(" ") and set(bars) == {" ", "_"}


# ---- tables --------------------------------------------------------------------------------------

async def test_requests_change_in_place(monkeypatch):
    app = Host()
    async with app.run_test(size=(240, 60)) as pilot:
        state = tree(requests=6)
        history = await show(pilot, state)
        table = app.query_one(Requests)
        assert [row[0] for row in rows_of(table)] == ["40", "41", "42", "43", "44", "45"]
        assert rows_of(table)[0] == ["40", "▶ decode", "100", "0", "20", "1,024", "12.5", "4 s",
                                     "all"]
        monkeypatch.setattr(Requests, "clear", None)            # it is never built anew
        table.move_cursor(row=3)
        keys = list(table.rows)
        state = copy.deepcopy(state)
        del state["requests"][1]
        state["requests"].append({**state["requests"][0], "id": 99, "owner": 1, "rate": 7.25})
        state["requests"][0].update(generated=21, rate=13.25)
        await show(pilot, state, history)
        assert [row[0] for row in rows_of(table)] == ["40", "42", "43", "44", "45", "99"]
        assert rows_of(table)[0][4:7] == ["21", "1,024", "13.2"]
        assert rows_of(table)[-1][-1] == "1"
        assert list(table.rows)[:5] == [keys[0], *keys[2:]]
        assert table.selected == "43"


async def test_nothing_is_drawn_where_nothing_changed(monkeypatch):
    app = Host()
    async with app.run_test(size=(240, 60)) as pilot:
        state = tree(world=3)
        history = await show(pilot, state)
        await show(pilot, state, history)
        drawn = []
        plain = Widget.refresh

        def refresh(self, *args, **kwargs):
            drawn.append(self)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(Widget, "refresh", refresh)
        app.query_one(Dashboard).update(copy.deepcopy(state), history)
        assert drawn == []
        state["kept"][0]["idle"] = 43.0
        app.query_one(Dashboard).update(copy.deepcopy(state), history)
        assert set(drawn) == {app.query_one(Kept)}


async def test_figures_do_not_move_when_they_grow():
    small, large = tree(world=2, pages=50), tree(world=2, pages=999_999)
    large["ended"] = {"stop": 123}
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        places = []
        for state in (small, large):
            state["ranks"][0]["round"] = state["ranks"][1]["round"] = len(places) * 99_999 + 1
            await show(pilot, state)
            rank = app.query(Rank).first().render().plain
            engine = app.query_one(Engine).render().plain
            places.append([[(y, line.find(word)) for y, line in enumerate(text.splitlines())
                            if word in line]
                           for text, words in ((rank, ("resident", "free", "leased", "kept")),
                                               (engine, ("leased", "waiting", "refused", "ended",
                                                         "first token", "token gap")))
                           for word in words])
        assert places[0] == places[1] and all(places[0])


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_a_thousand_requests(size, screen_text):
    app = Host()
    async with app.run_test(size=size) as pilot:
        await pilot.press("2")
        await show(pilot, tree(requests=MOST))
        assert app.query_one(Requests).row_count == MOST
        assert "2 Requests  1,000" in screen_text(app)
        await show(pilot, tree(requests=MOST + 5))
        assert app.query_one(Requests).row_count == MOST
        assert "1,005, the first 1,000 shown" in screen_text(app)
        await show(pilot, tree(busy=False))
        assert app.query_one(Requests).row_count == 0


async def test_x_twice_ends_the_selected_request(screen_text):
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        state = tree(requests=3)
        history = await show(pilot, state)
        await pilot.press("2", "down", "x")
        await pilot.pause()
        assert app.cancelled == [] and "x again ends request 41" in screen_text(app)
        await pilot.press("escape", "x")
        assert app.cancelled == []
        await pilot.press("down", "x")              # another row asks again
        await pilot.pause()
        assert app.cancelled == [] and "x again ends request 42" in screen_text(app)
        await pilot.press("x")
        await pilot.pause()
        assert app.cancelled == [42] and "✗ ending" in screen_text(app)
        await pilot.press("x", "x")                 # it is on its way
        assert app.cancelled == [42]
        state = copy.deepcopy(state)
        del state["requests"][2]
        await show(pilot, state, history)
        assert "ending" not in screen_text(app) and "x again" not in screen_text(app)


async def test_x_without_requests_does_nothing():
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, tree(busy=False))
        await pilot.press("2", "x", "x")
        assert app.cancelled == []


@pytest.mark.parametrize("seconds, text", [
    (None, "?"), (0.4, "0 s"), (99.4, "99 s"), (100, "1:40 min"), (3599, "59:59 min"),
    (3660, "1:01 h"), (86399, "23:59 h"), (4 * 86400 + 7200, "4 d 2 h")])
def test_clock(seconds, text):
    assert clock(seconds) == text and len(text) <= 9


# ---- words of others ----------------------------------------------------------------------------

def test_what_a_server_says_is_harmless():
    assert clean("a\x1b[31mb\r\nc\x07") == "a [31mb  c "
    assert clean("x" * 300, 10) == "x" * 10 + "…"
