# pytest tests/tui/test_dashboard.py
"""The dashboard on trees of every size and of every kind of wrong: what it shows, and its keys.

Figures are held against the tree's own counts.
"""

import copy
import random

import pytest
from textual.app import App
from textual.content import Content
from textual.widget import Widget

from canned_server import tree, wrong
from dashboard_host import PAGES, SIZES, SIZE_NAMES, Host, show
from tui.dashboard import Dashboard
from tui.dashboard.collectives import Collectives
from tui.dashboard.engine import Engine, quantile
from tui.dashboard.extra import Extra
from tui.dashboard.hint import Hint
from tui.dashboard.kept import Kept
from tui.dashboard.log import EventLog
from tui.dashboard.pagestrip import PageStrip
from tui.dashboard.panel import Panel, figure, flow
from tui.dashboard.plot import Plot
from tui.dashboard.rank import Rank, Ranks
from tui.dashboard.requests import Requests
from tui.state import History

pytestmark = pytest.mark.anyio


# ---- what is shown -------------------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
@pytest.mark.parametrize("world", [1, 2, 8])
async def test_every_page_is_there(size, world, screen_text):
    state = tree(world=world, pages=1026)
    app = Host()
    async with app.run_test(size=size) as pilot:
        await show(pilot, state)
        if size == (120, 40):
            await pilot.press("z")              # alone, a page has the room for all its lines
        seen = ""
        for key in PAGES:
            await pilot.press(key)
            await pilot.pause()
            seen += screen_text(app)
            app.focused.scroll_end(animate=False)
            await pilot.pause()
            seen += screen_text(app)
        for sign in ("context 4,096 tokens", "tok/s", "-5 min", "now", "▶ decode", "… queued",
                     "Kept conversations  1", "rank 0  spark0  host  process 4000",
                     "■ leased", "□ kept", "· free", "fits tokens", "ms waited", "project",
                     "5,001 tokens"):
            assert sign in seen, sign
        await pilot.press("3")
        ranks = app.query(Rank)
        assert [r.index for r in ranks] == list(range(world))
        ranks.last().scroll_visible(animate=False)
        await pilot.pause()
        assert f"rank {world - 1}  spark{world - 1}" in screen_text(app)


@pytest.mark.parametrize("world, pages", [(1, 32), (2, 1026), (6, 333_333), (8, 1_000_000)])
async def test_occupancy_in_pages_tokens_and_bytes(world, pages):
    state = tree(world=world, pages=pages)
    state["pool"]["page_bytes"] = 1 << 20
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, state)
        lines = app.query_one(Engine).render().plain.splitlines()
        shown = {line.split()[0]: line[6:] for line in lines if line}
        wide = {"pages": 1, "tokens": 64}
        for row, each in wide.items():
            cells = [shown[row][i * 10 + 1:i * 10 + 11] for i in range(4)]
            for cell, state_ in zip(cells, ("leased", "kept", "free", "total")):
                true = each * sum(c[state_] for c in state["classes"])
                assert about(cell) == pytest.approx(true, rel=0.006), (row, state_)
        assert shown["bytes"].count("iB") == 4
        bar = lines[1]
        total = world * pages
        assert bar.count("█") == pytest.approx(
            len(bar) * sum(c["leased"] for c in state["classes"]) / total, abs=1)
        del state["pool"]["page_bytes"]
        await show(pilot, state)
        assert "bytes" not in app.query_one(Engine).render().plain


def about(cell):
    """The number in "12,345" or "1.05M"."""
    cell = cell.strip().replace(",", "")
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(cell[-1], 1)
    return float(cell.rstrip("kMG")) * scale


async def test_the_smallest_share_still_shows_in_the_bar():
    state = tree(pages=1_000_000, busy=False)
    state["classes"][0].update(leased=1, free=999_999)
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, state)
        assert app.query_one(Engine).render().plain.splitlines()[1].count("█") == 1


async def test_collectives_are_ms_in_each_second(screen_text):
    before, after = tree(world=2), tree(world=2)
    after["time"] += 4.0
    after["ranks"][0]["collectives"]["merge"] += 1.0
    after["ranks"][1]["collectives"]["merge"] += 0.1
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        history = await show(pilot, before)
        await show(pilot, after, history)
        line = next(x for x in app.query_one(Collectives).render().plain.splitlines()
                    if x.startswith("merge"))
        assert line.split() == ["merge", "250.0", "25.0", "5.1", "s"]


async def test_collectives_of_many_ranks_name_the_extremes():
    before, after = tree(world=8), tree(world=8)
    after["time"] += 2.0
    for r, rank in enumerate(after["ranks"]):
        rank["collectives"]["score"] += [0.4, 0.3, 0.02, 0.3, 0.3, 1.0, 0.3, 0.3][r]
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        history = await show(pilot, before)
        await show(pilot, after, history)
        line = next(x for x in app.query_one(Collectives).render().plain.splitlines()
                    if x.startswith("score"))
        assert line.split()[:6] == ["score", "10.0", "2", "182.5", "500.0", "5"]


async def test_more_panels_only_where_the_engine_reports_more(screen_text):
    state = tree()
    app = Host()
    async with app.run_test(size=(240, 60)) as pilot:
        await show(pilot, state)
        assert not any(panel.display for panel in app.query(Extra))
        state = {**state, "draft": {"proposed": 1234, "accepted": 1000, "rate": 2.5},
                 "images": {"written": {"files": 3}}}
        await show(pilot, state)
        text = screen_text(app)
        assert "Drafting" in text and "proposed 1,234" in text and "rate 2.5" in text
        assert "Images" in text and "written files 3" in text and "Carries" not in text
        del state["draft"]
        await show(pilot, state)
        assert "Drafting" not in screen_text(app)


async def test_a_rank_that_lags_is_named(screen_text):
    state = tree(world=3)
    state["ranks"][1]["round"] = 900
    app = Host()
    async with app.run_test(size=(240, 60)) as pilot:
        await show(pilot, state)
        assert screen_text(app).count("rounds behind") == 1
        assert "process 4001  ! 100 rounds behind" in screen_text(app)
        state["ranks"][1]["round"] = 998
        await show(pilot, copy.deepcopy(state))
        assert "rounds behind" not in screen_text(app)


# ---- odd trees -----------------------------------------------------------------------------------

ODD = [None, True, 0, -1, 1e308, float("inf"), float("nan"), 10**400, "", "\x1b[31mred\x07",
       "[bold]x[/bold][/]", "日本語" * 60, "x" * 5000, [], {}, [None], [[1]], {"a": {"b": [{}]}},
       "#k.?z", [{"id": {}}, {"id": "[/x]"}, {"id": None}, {"id": [1]}], {"bounds": [1, "x"]}]


@pytest.mark.parametrize("size", [(80, 24), (240, 60), (20, 6)], ids=lambda s: f"{s[0]}x{s[1]}")
async def test_no_tree_is_too_odd(size, screen_text):
    rng, base, history = random.Random(size[0]), tree(), History()
    places = list(paths(base))
    app = Host()
    async with app.run_test(size=size) as pilot:
        for i, state in enumerate([{}, wrong(base), *(
                twisted(base, rng, places) for _ in range(50)), {}]):
            history.add(state, float(i))
            if i % 4 == 0:
                await pilot.press(rng.choice([*PAGES, "z", "x", "h", "[", "]"]))
            app.query_one(Dashboard).update(state, history)
            await pilot.pause()
        assert "\x1b" not in screen_text(app)
        await show(pilot, base)
        await pilot.press("1")
        assert size == (20, 6) or "2,560" in screen_text(app)       # and it is well again


def paths(tree_, at=()):
    yield at
    items = tree_.items() if isinstance(tree_, dict) else enumerate(tree_[:3]) if isinstance(
        tree_, list) else ()
    for key, value in items:
        yield from paths(value, (*at, key))


def twisted(base, rng, places):
    """A copy with a few members odd or gone."""
    state = copy.deepcopy(base)
    for path in rng.choices(places[1:], k=rng.randint(1, 6)):
        inside = state
        try:
            for key in path[:-1]:
                inside = inside[key]
            if isinstance(inside, dict) and rng.random() < 0.3:
                inside.pop(path[-1])
            else:
                inside[path[-1]] = copy.deepcopy(rng.choice(ODD))
        except (KeyError, IndexError, TypeError):
            pass                                # an earlier one took its place away
    return state


def test_quantiles_of_odd_histograms():
    good = {"bounds": [0.1, 1.0], "counts": [1, 8, 1]}
    assert quantile(good, 0.5) == ("≤", 1.0) and quantile(good, 0.95) == (">", 1.0)
    for odd in ODD:
        assert quantile(odd, 0.5) is None
    assert quantile({"bounds": [1], "counts": [0, 0]}, 0.5) is None


# ---- layout and keys -----------------------------------------------------------------------------

@pytest.mark.parametrize("size, name, groups", [
    ((80, 24), "small", 1), ((111, 60), "small", 1), ((120, 40), "medium", 5),
    ((240, 60), "large", 5)], ids=["80x24", "111x60", "120x40", "240x60"])
async def test_as_much_as_fits(size, name, groups):
    app = Host()
    async with app.run_test(size=size) as pilot:
        await show(pilot, tree())
        dashboard = app.query_one(Dashboard)
        assert dashboard.has_class(name)
        shown = [g for g in dashboard.query(".group") if g.display and g.size.height > 3]
        assert len(shown) == groups
        await pilot.press("3", "z")
        shown = [g.id for g in dashboard.query(".group") if g.display]
        assert shown == ["ranks"]
        await pilot.press("z")
        assert len([g for g in dashboard.query(".group") if g.display]) == groups


async def test_pages_by_key_by_click_and_in_turn(screen_text):
    app = Host()
    async with app.run_test(size=(80, 24)) as pilot:
        await show(pilot, tree())
        for key, name in PAGES.items():
            await pilot.press(key)
            assert f"[{key} {name}]" in screen_text(app)
            assert app.focused is not None
            assert all(node.display for node in app.focused.ancestors_with_self
                       if isinstance(node, Widget))
        await pilot.press("right_square_bracket")
        assert "[1 Engine]" in screen_text(app)
        await pilot.press("left_square_bracket")
        assert "[5 Log]" in screen_text(app)
        at = screen_text(app).splitlines()[0].index("3 Ranks")
        await pilot.click(PageStrip, offset=(at, 0))
        await pilot.pause()
        assert "[3 Ranks]" in screen_text(app)
        for _ in range(8):                      # Tab finds nothing that is hidden
            await pilot.press("tab")
            assert app.focused in app.query("#ranks, #ranks *")


async def test_from_wide_to_narrow_and_back():
    app = Host()
    async with app.run_test(size=(240, 60)) as pilot:
        await show(pilot, tree(world=8))
        for size, name in (((80, 24), "small"), ((120, 40), "medium"), ((240, 60), "large"),
                           ((1, 1), "small"), ((240, 60), "large")):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert app.query_one(Dashboard).has_class(name)
        assert len(app.query(Rank)) == 8


async def test_pictures_follow_the_size():
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        await show(pilot, tree(pages=1026))
        await pilot.press("2")
        await pilot.resize_terminal(80, 24)
        await pilot.press("3")
        await pilot.pause()
        await pilot.pause()
        assert [r.size.height for r in app.query(Rank)] == [2 + 4, 2 + 4]   # 256 cells of 64 a line
        await pilot.press("1")
        await pilot.pause()
        await pilot.pause()
        for plot in app.query(Plot):
            assert len(plot.render().plain.splitlines()) == plot.size.height


async def test_a_panel_is_as_high_as_its_picture():
    """Whatever width the last one was drawn for: a wider one would have to be wrapped."""
    class Line(Panel):
        def picture(self, state, history, width):
            return Content("x" * width)

    class Narrow(App):
        def compose(self):
            yield Line()

    app = Narrow()
    async with app.run_test(size=(30, 10)) as pilot:
        await pilot.pause()
        line = app.query_one(Line)
        assert line.content_size == (28, 1)
        assert line.get_content_height(app.size, app.size, 14) == 1


async def test_another_engine_with_fewer_ranks():
    app = Host()
    async with app.run_test(size=(240, 60)) as pilot:
        for world in (8, 2, 6, 1):
            await show(pilot, tree(world=world))
            await pilot.pause()
            assert [r.index for r in app.query_one(Ranks).panels()] == list(range(world))


async def test_every_panel_says_what_it_means(screen_text):
    app = Host()
    async with app.run_test(size=(240, 60), notifications=True) as pilot:
        await show(pilot, tree())
        for panel in (*app.query(Panel), *app.query(Requests), *app.query(Kept),
                      app.query_one(EventLog)):
            assert panel.tooltip == panel.HELP and len(panel.HELP) > 20
        for widget in app.query("*"):       # brackets in a tooltip are not taken for markup
            told = widget.tooltip or ""
            assert not isinstance(told, str) or Content.from_markup(told).plain == told
        await pilot.press("2")
        assert "cached" in app.query_one(Hint).line
        assert app.query_one(Hint).line[:100] in screen_text(app)
        await pilot.press("h")
        await pilot.pause()
        assert "What is this" in screen_text(app)


@pytest.mark.parametrize("theme", ["textual-light", "nord"])
async def test_themes_change_colours_only(theme, screen_text):
    state = tree()
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        history = await show(pilot, state)
        before = screen_text(app)
        app.theme = theme
        await pilot.pause()
        await show(pilot, state, history)
        assert screen_text(app) == before


def test_figures_have_a_width():
    assert figure(1234567, 10) == " 1,234,567" and figure(12345678, 10) == "     12.3M"
    assert figure(None, 5) == "    ?"
    assert flow([("a", 4), ("b", 4), ("c", 4)], 11).plain == "a      b   \nc   "
