"""The command line and the environment, checked once: argv -> one frozen `Config`.

`parse` is pure (argv in, Config out), so every rank gets the same Config from the same argv. What
only rank 0 can read (its standard input, an ids file) is read later by `read_prompt`; what needs
the model's numbers is checked by `fit`. Each refusal names the option, the value and the remedy.

`prepare_environment` is the only writer of environment variables. It must run before numpy or numba
is imported: both read theirs once, at import.
"""

import argparse
import dataclasses
import difflib
import hashlib
import importlib.metadata
import math
import os
import pathlib
import re
import sys
import tempfile

from engine.errors import RequestError, UsageError

ENGINE = pathlib.Path(__file__).resolve().parent
EMBEDDED = str(ENGINE.parent / "models" / "mini")
COMMANDS = ("plan", "bench")
PAGE_ROWS = (64, 128, 256, 512)  # a page holds whole pools of 4 and is dealt out whole
LISTING = "python -m engine -h lists the options"


@dataclasses.dataclass(frozen=True)
class Config:
    """What the user asked for. Tokens and rows are counts of positions; None means "not said"."""

    command: str = ""               # "" answers prompts; else one of COMMANDS
    model: str = EMBEDDED
    prompt: str | None = None       # "-" until read_prompt has read standard input
    prompt_ids: tuple | None = None
    ids_file: str | None = None     # path of an ids file that read_prompt has not read yet
    system: str | None = None
    effort: str | None = None       # "low" | "high" | "max"
    print_ids: bool = False
    json: bool = False
    max_tokens: int | None = None   # None: up to the end of the context
    temperature: float | None = None  # None: the model's generation_config.json
    top_p: float | None = None
    seed: int = 0
    kv_dtype: str = "bf16"          # "bf16" | "float32"
    placement: str = "striped"      # "striped" | "owner"
    replicate: int = 0              # R: the first R tokens stay on every rank
    split: bool = True
    page_rows: int = 64
    pages: int | None = None        # None: enough for `parallel` windows of `context`
    context: int | None = None      # None until `fit`: the model's window
    parallel: int = 4               # conversations at a time
    chunk: int = 2048               # prompt tokens a prefill chunk
    poison: bool = False
    shuffle_pages: bool = False
    backend: str = "auto"           # "auto" | "host" | "cuda"
    transport: str = "auto"         # "auto" | "pinned" | "device": between ranks on cuda
    layers: int | None = None       # bench a random model of that many real layers

    def replaced(self, **values):
        """A copy with some values changed."""
        return dataclasses.replace(self, **values)

    @property
    def one_reply(self):
        """True where the command line itself holds the prompt."""
        return not (self.prompt is None and self.prompt_ids is None and self.ids_file is None)


class HelpWanted(Exception):
    """-h was given; `text` is what to print."""

    def __init__(self, text):
        super().__init__(text)
        self.text = text


# --- argv ---------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message.replace("argument ", "", 1), LISTING)


def _parser():
    p = _Parser(prog="python -m engine", allow_abbrev=False, add_help=False,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                usage="mpirun -np RANKS python -m engine [plan | bench] [options]",
                description="Answers prompts from the command line, or line by line from "
                            "standard input.\n\n"
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
    g.add_argument("--layers", metavar="N", help="bench: N layers of GLM-5.3-Flash with random "
                   "weights, no files (cuda)")
    g = p.add_argument_group("checks")
    g.add_argument("--poison", action="store_true", help="fill fresh pages with NaN")
    g.add_argument("--shuffle-pages", action="store_true", help="hand pages out in mixed order")
    g.add_argument("-h", "--help", action="store_true", help="print this and stop")
    return p


def parse(argv):
    """argv (without the program) -> Config. UsageError, RequestError (empty prompt), HelpWanted."""
    parser = _parser()
    given, unknown = parser.parse_known_args(_join_values(parser, argv))
    if given.help:
        raise HelpWanted(parser.format_help())
    if unknown:
        raise _unknown_option(parser, unknown[0])
    if given.command is not None and given.command not in COMMANDS:
        raise UsageError(f"{given.command!r} is not a command",
                         _nearest(given.command, COMMANDS) or
                         f"commands: {', '.join(COMMANDS)}; a prompt needs --prompt")
    config = _checked(given)
    _refuse_contradictions(config)
    return config


def _join_values(parser, argv):
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


def _unknown_option(parser, word):
    name = word.split("=", 1)[0]
    options = [s for a in parser._actions for s in a.option_strings]
    what = "unknown option" if name.startswith("-") else "unexpected argument"
    return UsageError(f"{what} {_shown(name)}",
                      _nearest(name.replace("_", "-"), options) or LISTING)


def _nearest(word, known):
    """A hint naming the closest known word, "" where none is close."""
    match = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {match[0]}?" if match else ""


def _shown(text, limit=60):
    """User text for a message: one line, escaped, not endless."""
    text = text.encode("unicode_escape", "backslashreplace").decode("ascii")
    return text if len(text) <= limit else text[:limit] + "..."


# --- values -------------------------------------------------------------------------------------


def _checked(given):
    known = {f.name: f.default for f in dataclasses.fields(Config)}
    values = {name: value for name, value in vars(given).items()
              if value is not None and name in known}
    choices = {"effort": ("low", "high", "max"), "kv_dtype": ("bf16", "float32"),
               "placement": ("striped", "owner"), "split": ("on", "off"),
               "backend": ("auto", "host", "cuda"), "transport": ("auto", "pinned", "device")}
    counts = {"max_tokens": 1, "pages": 1, "context": 2, "parallel": 1, "chunk": 1,
              "replicate": 0, "page_rows": 1, "seed": 0, "layers": 1}
    for name in values:
        option = "--" + name.replace("_", "-")
        if name in choices:
            values[name] = _choice(option, values[name], choices[name])
        elif name in counts:
            most = 2 ** 64 - 1 if name == "seed" else 2 ** 31 - 1
            values[name] = _count(option, values[name], counts[name], most)
        elif name in ("temperature", "top_p"):
            values[name] = _real(option, values[name], 1.0 if name == "top_p" else math.inf)
        elif name in ("prompt", "system", "model"):
            _refuse_invalid_utf8(option, values[name])
    if "split" in values:
        values["split"] = values["split"] == "on"
    ids = values.pop("prompt_ids", None)
    if ids is not None and ids.startswith("@"):
        values["ids_file"] = ids[1:]
    elif ids is not None:
        values["prompt_ids"] = parse_ids(ids, "--prompt-ids")
    if values.get("prompt") is not None:
        _refuse_empty(values["prompt"], "--prompt")
    return Config(**values)


def _choice(option, value, allowed):
    if value not in allowed:
        raise UsageError(f"{option} {_shown(value)!r}: not one of {', '.join(allowed)}",
                         _nearest(value, allowed) or f"{option} {allowed[0]}")
    return value


def _count(option, value, least, most):
    if not re.fullmatch(r"[0-9]{1,20}", value) or not least <= int(value) <= most:
        raise UsageError(f"{option} {_shown(value)!r}: not a whole number from {least} "
                         f"to {most}", f"{option} {max(least, 1)}")
    return int(value)


def _real(option, value, most):
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (0.0 <= number <= most and math.isfinite(number)):
        limit = f"from 0 to {most:g}" if most < math.inf else "of 0 or more"
        raise UsageError(f"{option} {_shown(value)!r}: not a number {limit}", f"{option} 0.95")
    return number


def _refuse_invalid_utf8(option, text):
    """argv bytes that are no UTF-8 arrive as lone surrogates U+DC80..U+DCFF (PEP 383)."""
    for i, c in enumerate(text):
        if 0xD800 <= ord(c) <= 0xDFFF:
            raise UsageError(f"{option} is not valid UTF-8: byte 0x{ord(c) & 0xFF:02x} after "
                             f"{i} characters", "give the text in UTF-8")


def _refuse_empty(text, source):
    if not text.strip():
        raise RequestError(f"the prompt is empty ({source})", '--prompt "What is a river?"')


def _refuse_contradictions(c):
    if c.prompt is not None and (c.prompt_ids is not None or c.ids_file is not None):
        raise UsageError("--prompt and --prompt-ids are two prompts", "give one of them")
    if c.json and c.print_ids:
        raise UsageError("--json and --print-ids are two forms of one reply",
                         "--json alone: it holds the ids too")
    if (c.prompt_ids is not None or c.ids_file is not None) and (c.system or c.effort):
        raise UsageError("--system and --effort shape a chat, --prompt-ids is taken as it is",
                         "leave them out, or give --prompt")
    if c.command and c.one_reply:
        raise UsageError(f"{c.command} takes no prompt", f"python -m engine {c.command}")
    if c.layers and c.command != "bench":
        raise UsageError("--layers makes a random model, which is for bench only",
                         f"python -m engine bench --layers {c.layers}")
    if c.page_rows not in PAGE_ROWS:
        raise UsageError(f"--page-rows {c.page_rows}: not one of "
                         f"{', '.join(map(str, PAGE_ROWS))}", "--page-rows 64")
    if c.replicate % c.page_rows:
        up = -(-c.replicate // c.page_rows) * c.page_rows
        raise UsageError(f"--replicate {c.replicate} is not a multiple of the {c.page_rows} rows "
                         "of a page", f"--replicate {up}")
    if c.replicate and c.placement == "owner":
        raise UsageError(f"--replicate {c.replicate} needs striped placement: under owner a "
                         "conversation's pages all belong to one rank", "--placement striped")


def parse_ids(text, source):
    """"5,17,..." (commas, spaces or newlines between) -> tuple of ids; `source` for the message."""
    ids = []
    for item in text.replace(",", " ").split():
        if not re.fullmatch(r"[0-9]{1,9}", item):
            raise UsageError(f"{source}: item {len(ids) + 1} is {_shown(item)!r}, not a token id",
                             "--prompt-ids 5,17,42")
        ids.append(int(item))
    if not ids:
        raise RequestError(f"the prompt is empty ({source})", "--prompt-ids 5,17,42")
    return tuple(ids)


# --- what rank 0 reads, what the model decides --------------------------------------------------


def read_prompt(config, stdin):
    """Config whose prompt is read: `--prompt -` from stdin (binary file), `@FILE` from disk.

    Only rank 0 calls it: neither its input nor the file need exist elsewhere.
    """
    if config.prompt == "-":
        text = utf8(stdin.read(), "standard input")
        _refuse_empty(text, "standard input")
        return dataclasses.replace(config, prompt=text)
    if config.ids_file is not None:
        try:
            text = pathlib.Path(config.ids_file).read_bytes().decode("ascii", "replace")
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or e
            raise UsageError(f"--prompt-ids @{_shown(config.ids_file, 200)}: {why}",
                             "give the path of a file with ids: 5,17,...") from None
        ids = parse_ids(text, config.ids_file)
        return dataclasses.replace(config, prompt_ids=ids, ids_file=None)
    return config


def utf8(data, source):
    """bytes -> str; RequestError naming `source`, the byte and its offset where it is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise RequestError(f"{source} is not valid UTF-8: byte 0x{data[e.start]:02x} at offset "
                           f"{e.start}", "give the text in UTF-8") from None


def fit(config, shape):
    """Config with `context` filled in from, and held to, the model's window (tokens)."""
    if config.context is not None and config.context > shape.window:
        raise UsageError(f"--context {config.context} is more than the model's window of "
                         f"{shape.window} tokens", f"--context {shape.window}")
    return dataclasses.replace(config, context=config.context or shape.window)


# --- environment --------------------------------------------------------------------------------


def prepare_environment():
    """Sets what numpy and numba read at import, wherever the user has not set it himself.

    One thread a rank, and no Intel SVML: bits must not depend on a vendor's vector library.
    Numba's cache is keyed on one source file's date, while kernels inline code of other files: so
    its folder is named by a hash of all of them.
    """
    wanted = {"NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
              "NUMBA_DISABLE_INTEL_SVML": "1"}
    assert "numba" not in sys.modules or all(name in os.environ for name in wanted)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if "NUMBA_CACHE_DIR" not in os.environ:
        os.environ["NUMBA_CACHE_DIR"] = _kernel_cache(_kernel_digest())


def under_mpirun():
    """Whether a launcher started this process as one of several ranks (or as one alone)."""
    return any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))


def _kernel_digest():
    files = [*(ENGINE / f"{name}.py" for name in ("device", "host", "linear", "shape")),
             *sorted(ENGINE.glob("gemm*.py")),
             *sorted((ENGINE / "model").glob("*.py")), *sorted((ENGINE / "stages").glob("*.py"))]
    digest = hashlib.sha256(importlib.metadata.version("numba").encode())
    for f in files:
        digest.update(f.relative_to(ENGINE).as_posix().encode() + b"\0" + f.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _kernel_cache(digest):
    """A writable folder for compiled kernels: the user's cache, else one of his own under /tmp."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for base in (pathlib.Path(home, "sparkgrid"),
                 pathlib.Path(tempfile.gettempdir(), f"sparkgrid-{os.getuid()}")):
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = base / digest
            folder.mkdir(mode=0o700, exist_ok=True)
            # Compiled code is run as found: a folder that others can write is not ours.
            safe = base.stat().st_uid == os.getuid() and not base.stat().st_mode & 0o022
            if safe and os.access(folder, os.W_OK | os.X_OK):
                return str(folder)
        except OSError:
            continue
    return tempfile.mkdtemp(prefix="sparkgrid-")
