# python -m pytest tests/test_config.py
"""The command line: every value checked, every refusal with its number and its remedy."""

import io
import os
import pathlib
import stat
import subprocess
import sys
import types

import pytest

from engine import config as front
from engine.config import Config, HelpWanted, fit, parse, parse_ids, read_prompt
from engine.errors import EngineError, RequestError, UsageError
from engine.release import named_shape

ROOT = pathlib.Path(__file__).resolve().parent.parent


def refusal(*argv):
    with pytest.raises(EngineError) as caught:
        parse(list(argv))
    return caught.value


def test_nothing_said_is_the_default():
    assert parse([]) == Config()
    assert not parse([]).one_reply
    assert Config().context is None and Config().split is True


def test_every_option_arrives():
    got = parse("--prompt hello --system be-short --effort low --max-tokens 7 --temperature 0.5 "
                "--top-p 0.9 --seed 18446744073709551615 --json --model m --context 100 "
                "--parallel 2 --pages 9 --page-rows 128 --placement striped --replicate 256 "
                "--split off --kv-dtype float32 --chunk 3 --backend host --poison "
                "--shuffle-pages --drop-page-cache".split())
    assert got == Config(
        prompt="hello", system="be-short", effort="low", max_tokens=7, temperature=0.5, top_p=0.9,
        seed=2 ** 64 - 1, json=True, model="m", context=100, parallel=2, pages=9, page_rows=128,
        placement="striped", replicate=256, split=False, kv_dtype="float32", chunk=3,
        backend="host", poison=True, shuffle_pages=True, drop_page_cache=True)
    assert got.one_reply


def test_random_weights():
    got = parse("bench --weights random --shape glm-5.3-flash --layers 4".split())
    assert got == Config(command="bench", weights="random", shape="glm-5.3-flash", layers=4,
                         print_ids=True)
    got = parse("--weights random --shape glm-5.3-flash --prompt-ids 5 --json".split())
    assert got.layers is None and got.json and not got.print_ids


def test_commands():
    assert parse(["plan", "--context", "4096"]).command == "plan"
    assert parse(["--context", "4096", "bench"]).command == "bench"
    assert "plam" in str(refusal("plam")) and "plan" in refusal("plam").hint
    assert refusal("plan", "--prompt", "x").exit_code == 2


@pytest.mark.parametrize("text", ["-5 + 3?", "-x", "--x y", "=", "a\nb", "✓"])
def test_a_prompt_may_look_like_anything(text):
    assert parse(["--prompt", text]).prompt == text
    assert parse(["--prompt=" + text]).prompt == text


def test_a_forgotten_value_is_not_the_next_option():
    assert "--prompt" in str(refusal("--prompt", "--json"))
    assert "--max-tokens" in str(refusal("--max-tokens"))
    assert "-- is not a value" in str(refusal("--prompt", "--"))


@pytest.mark.parametrize("argv, message, hint", [
    (["--no-such-option"], "--no-such-option", "-h"),
    (["--max_tokens", "5"], "--max_tokens", "--max-tokens"),
    (["--plcement=owner"], "--plcement", "--placement"),
    (["--placement", "stripd"], "'stripd'", "striped"),
    (["--split", "yes"], "'yes'", "--split on"),
    (["--max-tokens", "0"], "'0'", "--max-tokens 1"),
    (["--max-tokens", "-3"], "'-3'", "--max-tokens"),
    (["--chunk", "1e3"], "'1e3'", "--chunk"),
    (["--pages", "１２"], "not a whole number", "--pages"),
    (["--context", "1_000"], "'1_000'", "--context"),
    (["--context", "1"], "'1'", "--context 2"),
    (["--parallel", "9" * 30], "9999", "--parallel"),
    (["--seed", "18446744073709551616"], "18446744073709551616", "--seed"),
    (["--temperature", "nan"], "'nan'", "--temperature"),
    (["--temperature", "inf"], "'inf'", "--temperature"),
    (["--temperature", "-1"], "'-1'", "--temperature"),
    (["--top-p", "1.01"], "'1.01'", "--top-p"),
    (["--page-rows", "96"], "96", "--page-rows 64"),
    (["--page-rows", "1024"], "1024", "--page-rows 64"),
    (["--replicate", "100"], "100", "--replicate 128"),
    (["--replicate", "64", "--placement", "owner"], "owner", "striped"),
    (["--json", "--print-ids"], "--json", "--json"),
    (["--prompt", "x", "--prompt-ids", "1"], "two prompts", "one of them"),
    (["--prompt-ids", "1", "--system", "x"], "--system", "--prompt"),
    (["--prompt-ids", "5,x"], "item 2", "5,17"),
    (["--prompt-ids", "5,-1"], "'-1'", "5,17"),
    (["--prompt", "ab\udcffc"], "0xff after 2", "UTF-8"),
    (["--model", "\udcfe"], "--model", "UTF-8"),
    (["--weights", "ranodm"], "'ranodm'", "random"),
    (["--layers", "4"], "--layers 4 is for weights that are made", "--weights random"),
    (["bench", "--shape", "glm-5.3-flash"], "--shape glm-5.3-flash is for", "--weights random"),
    (["bench", "--weights", "random"], "of which model", "--shape glm-5.3-flash"),
    (["bench", "--weights", "random", "--shape", "glm-5.3-flash", "--model", "m"], "--model m",
     "one of them"),
    (["bench", "--weights", "random", "--shape", "glm-5.3-flash", "--layers", "0"], "'0'",
     "--layers 1"),
    (["--weights", "random", "--shape", "glm-5.3-flash"], "without a tokenizer", "--prompt-ids"),
    (["--weights", "random", "--shape", "glm-5.3-flash", "--prompt", "x"], "without a tokenizer",
     "--prompt-ids"),
])
def test_refused_with_numbers_and_remedy(argv, message, hint):
    error = refusal(*argv)
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert message in str(error) and hint in error.hint
    str(error).encode("utf-8")      # a message can always be printed


@pytest.mark.parametrize("argv", [["--prompt", ""], ["--prompt", " \n"], ["--prompt-ids", ""],
                                  ["--prompt-ids", " , "], ["--prompt="]])
def test_an_empty_prompt_is_refused(argv):
    error = refusal(*argv)
    assert isinstance(error, RequestError) and "empty" in str(error) and error.hint


def test_released_models_are_known_by_name():
    assert named_shape("glm-5.3-flash").layers == 45 and named_shape("glm-5.3-flash", 1).layers == 1
    for name, layers, message, hint in (("glm", None, "--shape glm", "--shape glm-5.3-flash"),
                                        ("glm-5.3-flash", 46, "45 layers", "--layers 45")):
        with pytest.raises(UsageError, match=message) as caught:
            named_shape(name, layers)
        assert caught.value.hint.endswith(hint)


def test_a_long_wrong_value_is_cut_short_in_the_message():
    assert len(str(refusal("--chunk", "x" * 10 ** 6))) < 200


def test_help_is_not_an_exit():
    for argv in (["-h"], ["--help"], ["plan", "-h"]):
        with pytest.raises(HelpWanted) as wanted:
            parse(argv)
        named = [f.name for f in front.dataclasses.fields(Config)
                 if f.name not in ("command", "ids_file")]
        for name in named:
            assert "--" + name.replace("_", "-") in wanted.value.text
        assert max(map(len, wanted.value.text.splitlines())) <= 100


def test_ids():
    assert parse(["--prompt-ids", "5, 17,42"]).prompt_ids == (5, 17, 42)
    assert parse_ids("1 2\n3,\n4\n", "f") == (1, 2, 3, 4)


def test_ids_from_a_file(tmp_path):
    path = tmp_path / "a.ids"
    path.write_text(",".join(map(str, range(50000))))
    asked = parse(["--prompt-ids", f"@{path}"])
    assert asked.one_reply and asked.prompt_ids is None
    assert read_prompt(asked, None).prompt_ids == tuple(range(50000))
    for data, kind, message in ((b"", RequestError, "empty"), (b"1,\xff", UsageError, "item 2")):
        path.write_bytes(data)
        with pytest.raises(kind, match=message):
            read_prompt(asked, None)
    with pytest.raises(UsageError, match="No such file"):
        read_prompt(parse(["--prompt-ids", f"@{tmp_path}/none"]), None)
    with pytest.raises(UsageError, match="null"):
        read_prompt(parse(["--prompt-ids", "@a\0b"]), None)


def test_a_prompt_from_standard_input():
    asked = parse(["--prompt", "-"])
    assert read_prompt(asked, io.BytesIO("é\nb\n".encode())).prompt == "é\nb\n"
    with pytest.raises(RequestError, match="empty"):
        read_prompt(asked, io.BytesIO(b" \n"))
    with pytest.raises(RequestError, match="0xff at offset 2"):
        read_prompt(asked, io.BytesIO(b"ab\xff"))


def test_the_context_is_held_to_the_models_window():
    shape = types.SimpleNamespace(window=32768)
    assert fit(Config(), shape).context == 32768
    assert fit(Config(context=100), shape).context == 100
    with pytest.raises(UsageError, match="32769.*32768") as caught:
        fit(Config(context=32769), shape)
    assert caught.value.hint == "--context 32768"


# --- environment: in a process of its own, the tests' own has numba already ---------------------

NAMES = ("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_DISABLE_INTEL_SVML",
         "NUMBA_CACHE_DIR")


def environment(tmp_path, **given):
    """What prepare_environment leaves in NAMES, in a fresh process with `given` set."""
    code = ("import os, sys; from engine.config import prepare_environment; "
            "assert not {'numpy', 'numba'} & set(sys.modules); prepare_environment(); "
            "assert not {'numpy', 'numba'} & set(sys.modules); "
            f"print('\\n'.join(os.environ[n] for n in {NAMES}))")
    base = {k: v for k, v in os.environ.items() if k not in NAMES and k != "XDG_CACHE_HOME"}
    base.update({"HOME": str(tmp_path), "TMPDIR": str(tmp_path), **given})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=base, text=True,
                          capture_output=True, check=True)
    return dict(zip(NAMES, done.stdout.split("\n")))


def test_environment(tmp_path):
    got = environment(tmp_path)
    assert [got[n] for n in NAMES[:4]] == ["1"] * 4
    folder = pathlib.Path(got["NUMBA_CACHE_DIR"])
    assert folder.parent == tmp_path / ".cache" / "sparkgrid" and folder.is_dir()
    assert environment(tmp_path) == got
    elsewhere = environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "x"))
    assert elsewhere["NUMBA_CACHE_DIR"] == str(tmp_path / "x" / "sparkgrid" / folder.name)


def test_the_users_own_environment_stays(tmp_path):
    given = {"OMP_NUM_THREADS": "3", "NUMBA_CACHE_DIR": str(tmp_path / "mine")}
    got = environment(tmp_path, **given)
    assert {n: got[n] for n in given} == given and got["NUMBA_NUM_THREADS"] == "1"


def test_a_cache_that_others_could_write_is_not_used(tmp_path):
    shared = tmp_path / ".cache" / "sparkgrid"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    folder = pathlib.Path(environment(tmp_path)["NUMBA_CACHE_DIR"])
    assert folder.parent == tmp_path / f"sparkgrid-{os.getuid()}"
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077


def test_a_cache_that_cannot_be_made_is_not_used(tmp_path):
    (tmp_path / ".cache").write_text("a file in the way")
    folder = pathlib.Path(environment(tmp_path)["NUMBA_CACHE_DIR"])
    assert folder.parent == tmp_path / f"sparkgrid-{os.getuid()}"


def test_the_kernel_digest_covers_every_file_that_kernels_inline(tmp_path, monkeypatch):
    kernels = ("device.py", "host.py", "linear.py", "shape.py", "gemm.py", "model/a.py",
               "stages/b.py")
    for name in (*kernels, "chat.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    monkeypatch.setattr(front, "ENGINE", tmp_path)
    before = front._kernel_digest()
    for name in kernels:
        (tmp_path / name).write_text("y")
        assert front._kernel_digest() != before, name
        before = front._kernel_digest()
    (tmp_path / "chat.py").write_text("y")
    assert front._kernel_digest() == before
