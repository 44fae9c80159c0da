# pytest tests/tui/test_record.py
"""Recordings: what is written can be replayed, and what is no recording is refused by name."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from canned_server import tree
from tui import link
from tui.__main__ import main
from tui.messages import Link, Telemetry
from tui.record import Recorder, RecordError, read

EVENTS = [("snapshot", tree()), ("patch", {"rounds": 1001}), ("patch", {"fault": "Grüße 東京"})]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    with Recorder(path) as record:
        for kind, data in EVENTS:
            record(kind, data)
            time.sleep(0.02)
        assert len(read(path)) == 3         # at once, not at the end
    found = read(path)
    assert [event[1:] for event in found] == EVENTS
    assert found[0][0] == 0 and 0.02 <= found[1][0] < found[2][0] < 5
    assert {tuple(json.loads(line)) for line in path.read_text().splitlines()} == {
        ("t", "event", "data")}


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "a").write_text("precious")
    with pytest.raises(RecordError, match="exists"):
        Recorder(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "precious"
    with pytest.raises(RecordError, match="No such file"):
        Recorder(tmp_path / "none" / "a")


def test_a_full_disk_ends_the_recording_not_the_console(tmp_path):
    with Recorder(tmp_path / "a") as record:
        record._file.close()
        record._file = open("/dev/full", "w")
        record("snapshot", tree())
        record("patch", {})
    assert record.failed == f"{tmp_path}/a cannot be written any more: No space left on device"


@pytest.mark.parametrize("lines, words", [
    ([], "no snapshot at its beginning"), (["{"], "line 1: not JSON"), (["[1]"], "not an object"),
    (['{"t": 0, "event": "patch", "data": {}}'], "no snapshot at its beginning"),
    (['{"t": 0, "event": "snapshot", "data": {}}', '{"t": "1", "event": "patch", "data": {}}'],
     "line 2: not {"),
    (['{"t": true, "event": "snapshot", "data": {}}'], "line 1: not {"),
    (['{"t": -1, "event": "snapshot", "data": {}}'], "line 1: not {"),
    (['{"t": 0, "event": "snapshot", "data": []}'], "line 1: not {"),
    (["[" * 100_000], "line 1: not JSON")])
def test_what_is_no_recording(tmp_path, lines, words):
    path = tmp_path / "a"
    path.write_text("\n".join(lines))
    with pytest.raises(RecordError) as info:
        read(path)
    assert words in str(info.value) and str(path) in str(info.value)


def test_bytes_are_no_recording(tmp_path, capsys):
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    assert main(["--replay", str(tmp_path / "a")]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert main(["--replay", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_a_replay_keeps_time_and_merges(monkeypatch):
    """On a clock of its own: one tick of it passes while a tree is shown."""
    clock, posted, at = [100.0], [], []

    async def sleep(seconds):
        clock[0] += seconds

    def post(message):
        posted.append(message)
        at.append(clock[0])
        clock[0] += 1 / 64
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(link, "asyncio", SimpleNamespace(sleep=sleep))
    events = [(0.0, *EVENTS[0]), (0.1, *EVENTS[1]), (0.3, *EVENTS[2])]
    asyncio.run(link.replay(events, post))
    assert [t for t, m in zip(at, posted) if isinstance(m, Telemetry)] == pytest.approx(
        [100 + 1 / 64, 100.1, 100.3])       # a Link is before the first
    assert [(m.seconds, m.state) for m in posted if isinstance(m, Telemetry)] == [
        (0.0, tree()), (0.1, {**tree(), "rounds": 1001}),
        (0.3, {**tree(), "rounds": 1001, "fault": "Grüße 東京"})]
    assert posted[-1] == Link(False, "the recording has ended", 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_it_records_until_a_signal(server, tmp_path, number):
    path = tmp_path / "a.jsonl"
    command = [sys.executable, "-m", "tui", "--connect", server.url, "--record", str(path)]
    work = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        give_up = time.monotonic() + 30
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < give_up and work.poll() is None
            time.sleep(0.02)
        server.change({"rounds": 7})
        while not path.read_text().endswith("\n") or len(path.read_text().splitlines()) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        work.send_signal(number)
        _, err = work.communicate(timeout=30)
    assert work.returncode == 0 and err == "tui: the engine answers\n"
    assert [event[1:] for event in read(path)] == [("snapshot", tree()), ("patch", {"rounds": 7})]
