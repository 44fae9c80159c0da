"""The command line and the environment, checked once: argv -> one frozen `Config`.

`parse` is pure (argv in, Config out), so every rank gets the same Config from the same argv. What
only rank 0 can read (its standard input, an ids file) is read later by `read_prompt`; what needs
the model's numbers is checked by `fit`. Each refusal names the option, the value and the remedy.
The options themselves are in engine/options.py.

`prepare_environment` is the only writer of environment variables. It must run before numpy or numba
is imported: both read theirs once, at import.
"""

import dataclasses
import hashlib
import importlib.metadata
import math
import os
import pathlib
import re
import sys
import tempfile

from engine.errors import RequestError, UsageError
from engine.options import (COMMANDS, choice, count, join_values, make_parser, nearest, real,
                            shown, unknown_option)

ENGINE = pathlib.Path(__file__).resolve().parent
EMBEDDED = str(ENGINE.parent / "models" / "mini")
LOOPBACK = ("localhost", "::1")
PAGE_ROWS = (64, 128, 256, 512)  # a page holds whole pools of 4 and is dealt out whole


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
    host: str = "127.0.0.1"
    port: int = 8114                # 0: a free one
    api_key: str | None = None
    served_name: str | None = None  # None: the model folder's name
    queue: int = 64                 # requests that may wait for one to end
    round_ms: int = 250             # a round's time while others wait for its prefill chunk
    serve: bool = False             # bench over HTTP
    drain: int = 10                 # seconds that replies may go on when the engine is stopped
    chunk: int = 2048               # prompt tokens a prefill chunk
    poison: bool = False
    shuffle_pages: bool = False
    backend: str = "auto"           # "auto" | "host" | "cuda"
    transport: str = "auto"         # "auto" | "pinned" | "device": between ranks on cuda
    weights: str = "file"           # "file" | "random": of the released model `shape`, made here
    shape: str | None = None        # a name of engine.release.SHAPES
    layers: int | None = None       # the first so many layers of it; None: all
    drop_page_cache: bool = False   # the system forgets a checkpoint's pages once they are read

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


def parse(argv):
    """argv (without the program) -> Config. UsageError, RequestError (empty prompt), HelpWanted."""
    parser = make_parser()
    given, unknown = parser.parse_known_args(join_values(parser, argv))
    if given.help:
        raise HelpWanted(parser.format_help())
    if unknown:
        raise unknown_option(parser, unknown[0])
    if given.command is not None and given.command not in COMMANDS:
        raise UsageError(f"{given.command!r} is not a command",
                         nearest(given.command, COMMANDS) or
                         f"commands: {', '.join(COMMANDS)}; a prompt needs --prompt")
    config = _checked(given)
    _refuse_contradictions(config)
    _refuse_half_random(config, given.model)
    if config.weights == "random" and not config.json:
        return config.replaced(print_ids=True)      # there is no text to print
    return config


# --- values -------------------------------------------------------------------------------------


def _checked(given):
    known = {f.name: f.default for f in dataclasses.fields(Config)}
    values = {name: value for name, value in vars(given).items()
              if value is not None and name in known}
    choices = {"effort": ("low", "high", "max"), "kv_dtype": ("bf16", "float32"),
               "placement": ("striped", "owner"), "split": ("on", "off"),
               "backend": ("auto", "host", "cuda"), "weights": ("file", "random"),
               "transport": ("auto", "pinned", "device")}
    counts = {"max_tokens": 1, "pages": 1, "context": 2, "parallel": 1, "chunk": 1,
              "replicate": 0, "page_rows": 1, "seed": 0, "layers": 1, "queue": 1, "round_ms": 1,
              "drain": 0, "port": 0}
    for name in values:
        option = "--" + name.replace("_", "-")
        if name in choices:
            values[name] = choice(option, values[name], choices[name])
        elif name in counts:
            most = {"seed": 2 ** 64 - 1, "port": 65535}.get(name, 2 ** 31 - 1)
            values[name] = count(option, values[name], counts[name], most)
        elif name in ("temperature", "top_p"):
            values[name] = real(option, values[name], 1.0 if name == "top_p" else math.inf)
        elif name in ("prompt", "system", "model", "host", "api_key", "served_name"):
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
    values.setdefault("api_key", os.environ.get("SPARKGRID_API_KEY") or None)
    return Config(**values)


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
    if c.serve and c.command != "bench":
        raise UsageError("--serve belongs to bench; without a command the engine serves anyway",
                         "python -m engine bench --serve")
    if c.api_key == "":
        raise UsageError("--api-key is empty", "leave it out to need no key, or give one")
    loopback = c.host in LOOPBACK or re.fullmatch(r"127(\.[0-9]{1,3}){3}", c.host)
    if not loopback and c.api_key is None:
        raise UsageError(f"--host {shown(c.host)} is open to other machines, and no key is set",
                         "add --api-key KEY, or set SPARKGRID_API_KEY")
    if c.command and c.one_reply:
        raise UsageError(f"{c.command} takes no prompt", f"python -m engine {c.command}")
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


def _refuse_half_random(c, model):
    """model: the folder of the command line, None where it names none."""
    if c.weights == "file":
        for option, value in (("--shape", c.shape), ("--layers", c.layers)):
            if value is not None:
                raise UsageError(f"{option} {shown(str(value))} is for weights that are made, not "
                                 "read", "--weights random --shape glm-5.3-flash")
        return
    if model is not None:
        raise UsageError(f"--weights random reads no files, --model {shown(model)} names some",
                         "leave one of them out")
    if c.shape is None:
        raise UsageError("--weights random: of which model?",
                         "--weights random --shape glm-5.3-flash --layers 4")
    if not c.command and c.prompt_ids is None and c.ids_file is None:
        raise UsageError("--weights random makes a model without a tokenizer: it reads and writes "
                         "token ids only", "--prompt-ids 5,17,42, or bench, or plan")


def parse_ids(text, source):
    """"5,17,..." (commas, spaces or newlines between) -> tuple of ids; `source` for the message."""
    ids = []
    for item in text.replace(",", " ").split():
        if not re.fullmatch(r"[0-9]{1,9}", item):
            raise UsageError(f"{source}: item {len(ids) + 1} is {shown(item)!r}, not a token id",
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
            raise UsageError(f"--prompt-ids @{shown(config.ids_file, 200)}: {why}",
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
