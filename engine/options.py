"""The options and how their words are read: argv -> strings by name, a string -> a checked value.

What the values mean together is engine/config.py's. Each refusal is a UsageError that names the
option, the value and the remedy.
"""

import argparse
import difflib
import math
import re

from engine.errors import UsageError

COMMANDS = ("plan", "bench")
LISTING = "python -m engine -h lists the options"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message.replace("argument ", "", 1), LISTING)


def make_parser():
    """The argparse parser of all options; every value stays a string."""
    p = _Parser(prog="python -m engine", allow_abbrev=False, add_help=False,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                usage="mpirun -np RANKS python -m engine [plan | bench] [options]",
                description="Serves the OpenAI API on http://127.0.0.1:8114, and answers lines of "
                            "standard input;\nor one prompt from the command line.\n\n"
                            "  plan   print what every rank needs, before anything is allocated\n"
                            "  bench  measure prefill and decode")
    p.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    g = p.add_argument_group("prompt and reply")
    g.add_argument("--prompt", metavar="TEXT", help="one reply to TEXT; - reads standard input")
    g.add_argument("--prompt-ids", metavar="IDS", help="token ids: 5,17,... or @FILE")
    g.add_argument("--system", metavar="TEXT", help="system message")
    g.add_argument("--effort", metavar="low|high|max", help="reasoning effort, where the "
                   "model's template has it")
    g.add_argument("--max-tokens", metavar="N", help="tokens a reply (default: what the context "
                   "leaves)")
    g.add_argument("--temperature", metavar="T", help="0 is greedy (default: the model's own)")
    g.add_argument("--top-p", metavar="P", help="nucleus, 0 to 1 (default: the model's own)")
    g.add_argument("--seed", metavar="N", help="seed of sampled replies (default 0)")
    g.add_argument("--print-ids", action="store_true", help="print token ids instead of text")
    g.add_argument("--json", action="store_true", help="print one JSON object a reply")
    g = p.add_argument_group("model and memory")
    g.add_argument("--model", metavar="PATH", help="model folder (default: the embedded model)")
    g.add_argument("--context", metavar="N", help="tokens a conversation can hold (default: the "
                   "model's window)")
    g.add_argument("--parallel", metavar="N", help="conversations at a time (default 4)")
    g.add_argument("--pages", metavar="N", help="pages of the pool (default: parallel x context)")
    g.add_argument("--page-rows", metavar="N", help="rows a page: 64, 128, 256 or 512 (default 64)")
    g.add_argument("--placement", metavar="striped|owner", help="where a conversation's pages go "
                   "(default striped)")
    g.add_argument("--replicate", metavar="R", help="keep the first R tokens on every rank "
                   "(striped; default 0)")
    g.add_argument("--split", metavar="on|off", help="spread the KV over the ranks (default on)")
    g.add_argument("--kv-dtype", metavar="bf16|float32", help="type of the KV (default bf16)")
    g.add_argument("--chunk", metavar="N", help="prompt tokens a prefill chunk (default 2048)")
    g.add_argument("--backend", metavar="auto|host|cuda", help="where it computes (default auto)")
    g.add_argument("--transport", metavar="auto|pinned|device", help="how device arrays cross the "
                   "ranks (cuda; default auto: the faster)")
    g.add_argument("--drop-page-cache", action="store_true", help="give up a checkpoint's pages "
                   "once they are read (a Spark's page cache takes memory of the GPU)")
    g.add_argument("--weights", metavar="file|random", help="random: no files, weights made on the "
                   "device (cuda; ids in, ids out; default file)")
    g.add_argument("--shape", metavar="NAME", help="of random weights: glm-5.3-flash")
    g.add_argument("--layers", metavar="N", help="of random weights: the first N layers (default: "
                   "all)")
    g = p.add_argument_group("serving")
    g.add_argument("--host", metavar="ADDRESS", help="where to serve HTTP (default 127.0.0.1; "
                   "another needs a key)")
    g.add_argument("--port", metavar="N", help="its port; 0 takes a free one (default 8114)")
    g.add_argument("--api-key", metavar="KEY", help="what clients must send (default: the "
                   "environment's SPARKGRID_API_KEY, else none)")
    g.add_argument("--served-name", metavar="NAME", help="the model's name in requests (default: "
                   "its folder's)")
    g.add_argument("--queue", metavar="N", help="requests that may wait (default 64)")
    g.add_argument("--round-ms", metavar="MS", help="how long a prompt may hold up the others "
                   "(default 250)")
    g.add_argument("--serve", action="store_true", help="bench: replies over HTTP, many at once")
    g.add_argument("--drain", metavar="S", help="seconds that replies may go on when the engine is "
                   "stopped (default 10)")
    g = p.add_argument_group("checks")
    g.add_argument("--poison", action="store_true", help="fill fresh pages with NaN")
    g.add_argument("--shuffle-pages", action="store_true", help="hand pages out in mixed order")
    g.add_argument("-h", "--help", action="store_true", help="print this and stop")
    return p


def join_values(parser, argv):
    """`--option value` -> `--option=value`, so that a value may begin with a dash.

    A value that is itself an option of ours stays apart: the value was forgotten.
    """
    actions = {name: a for a in parser._actions for name in a.option_strings}
    joined, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        takes_value = word in actions and actions[word].nargs is None
        if takes_value and rest and rest[0].split("=", 1)[0] not in actions:
            word += "=" + rest.pop(0)
        if word.endswith("=--") and word[:-3] in actions:   # argparse loses this one value
            raise UsageError(f"{word[:-3]}: -- is not a value", LISTING)
        joined.append(word)
    return joined


def unknown_option(parser, word):
    """The UsageError for a word that no option takes."""
    name = word.split("=", 1)[0]
    options = [s for a in parser._actions for s in a.option_strings]
    what = "unknown option" if name.startswith("-") else "unexpected argument"
    return UsageError(f"{what} {shown(name)}",
                      nearest(name.replace("_", "-"), options) or LISTING)


def nearest(word, known):
    """A hint naming the closest known word, "" where none is close."""
    match = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {match[0]}?" if match else ""


def shown(text, limit=60):
    """User text for a message: one line, escaped, not endless."""
    text = text.encode("unicode_escape", "backslashreplace").decode("ascii")
    return text if len(text) <= limit else text[:limit] + "..."


# --- values ---------------------------------------------------------------------------------------


def choice(option, value, allowed):
    """The value where it is one of `allowed`."""
    if value not in allowed:
        raise UsageError(f"{option} {shown(value)!r}: not one of {', '.join(allowed)}",
                         nearest(value, allowed) or f"{option} {allowed[0]}")
    return value


def count(option, value, least, most):
    """The whole number of a string of digits, from least to most."""
    if not re.fullmatch(r"[0-9]{1,20}", value) or not least <= int(value) <= most:
        raise UsageError(f"{option} {shown(value)!r}: not a whole number from {least} "
                         f"to {most}", f"{option} {max(least, 1)}")
    return int(value)


def real(option, value, most):
    """The float of a string, from 0 to most."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (0.0 <= number <= most and math.isfinite(number)):
        limit = f"from 0 to {most:g}" if most < math.inf else "of 0 or more"
        raise UsageError(f"{option} {shown(value)!r}: not a number {limit}", f"{option} 0.95")
    return number
