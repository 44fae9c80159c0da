# pytest tests/tui/test_once.py
"""`--once`: one snapshot as text, one line and exit code 1 without an engine; the command line."""

import os
import subprocess
import sys

import pytest

from canned_server import tree, wrong
from tui.__main__ import main, parse
from tui.once import plain, report


def once(*options, **env):
    return subprocess.run([sys.executable, "-m", "tui", "--once", *options], text=True, timeout=30,
                          capture_output=True, stdin=subprocess.DEVNULL, env={**os.environ, **env})


def test_a_snapshot(server):
    found = once("--connect", server.url)
    assert found.returncode == 0 and found.stderr == ""
    assert found.stdout == report(tree(), server.url) + "\n"


def test_what_a_snapshot_says():
    lines = report(tree(6, 300), "http://x").splitlines()
    assert lines[0] == "sparkgrid 0.1.0 at http://x: mini, 6 ranks, up 10 min 00 s"
    assert "rank 5  spark5, host, 245 MiB resident, round 1,000" in lines
    assert "  pages: 120 free, 120 leased, 60 kept of 300" in lines
    assert sum(line.startswith("  [###") and len(line) == 68 for line in lines) == 6
    assert "pool: 115,200 tokens; 46,080 leased (40 %), 23,040 kept (20 %)" in lines
    assert "decode: 5,000 tokens in 1 min 40 s, 50 tok/s while it computed" in lines
    assert ("  40  decode: 100 prompt tokens (0 cached), 20 of 1,024 generated, 12.5 tok/s, "
            "3.5 s old") in lines
    assert lines[-1].endswith("refusal: the prompt of 5,001 tokens is longer than the window of "
                              "4,096")
    assert "FAULT: rank 2 is lost" in report({**tree(), "fault": "rank 2 is lost"}, "x")


@pytest.mark.parametrize("lie", [{}, wrong(tree()), {**tree(), "log": [{"time": 1e300}]}])
def test_lies_show_as_question_marks(lie):
    assert "?" in report(lie, "http://x")


def test_a_snapshot_has_no_control_characters():
    evil = "\x1b]0;x\x07\x1b[2J\r\n\u202e\u2028"
    lie = {**tree(), "model": evil, "fault": evil, "log": [{"text": evil, "level": evil}]}
    lie["ranks"][0] |= {"map": evil, "host": evil}
    lie["requests"][0]["state"] = evil
    assert {c for c in report(lie, "x") if not c.isprintable()} == {"\n"}
    assert plain("a\tb") == "a b"


@pytest.mark.parametrize("mode, words", [("500", "rank 1 is lost"), ("html", "like an engine"),
                                         ("json", "not JSON"), ("401", "SPARKGRID_API_KEY")])
def test_no_snapshot_is_one_line_and_exit_code_1(server, capsys, mode, words):
    server.mode = mode
    assert main(["--once", "--connect", server.url]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tui: ") and words in err and err.count("\n") == 1


def test_nobody_there():
    found = once("--connect", "127.0.0.1:9")
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr == "tui: no engine answers at http://127.0.0.1:9: Connection refused\n"


def test_the_key_comes_from_the_command_line_or_the_environment(server):
    server.key = "secret"
    assert once("--connect", server.url).returncode == 1
    assert once("--connect", server.url, "--api-key", "secret").returncode == 0
    assert once("--connect", server.url, SPARKGRID_API_KEY="secret").returncode == 0


def test_the_command_line(capsys):
    found = parse([])
    assert (found.connect, found.api_key, found.once) == ("http://127.0.0.1:8114", None, False)
    for wrong_one in (["--replay", "a", "--record", "b"], ["--replay", "a", "--once"],
                      ["--once", "--record", "b"], ["--conect", "x"]):
        with pytest.raises(SystemExit) as info:
            parse(wrong_one)
        assert info.value.code == 2
    capsys.readouterr()
    assert main(["--once", "--connect", "ftp://x"]) == 2
    assert "is not an address" in capsys.readouterr().err


def test_without_a_terminal_it_says_so():
    found = subprocess.run([sys.executable, "-m", "tui"], text=True, timeout=30,
                           capture_output=True, stdin=subprocess.DEVNULL)
    assert found.returncode == 2 and found.stdout == ""
    assert "needs a terminal; --once" in found.stderr
