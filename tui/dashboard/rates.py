"""The panel of rates: tokens decoded, tokens prefilled, rounds; now and over the last minutes."""

from textual.containers import Horizontal

from tui.dashboard.plot import Plot


class Rates(Horizontal):
    """Three plots beside each other."""

    DEFAULT_CSS = """
    Rates { height: 1fr; min-height: 6; padding: 0 0 0 1; border-top: solid $panel;
            border-title-color: $text; }
    """
    BORDER_TITLE = "Rates"
    HELP = ("Rates a second, averaged over the last 3 s beside the title and over each column's"
            " stretch below. _ is zero, a blank is not known.")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tooltip = self.HELP

    def compose(self):
        yield Plot("decode", "decode", "tok/s", "$text-primary")
        yield Plot("prefill", "prefill", "tok/s", "$text-success")
        yield Plot("rounds", "rounds", "/s", "$text-accent")

    def update(self, state, history):
        for plot in self.query(Plot):
            plot.update(state, history)
