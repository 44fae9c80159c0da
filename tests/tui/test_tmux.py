# pytest tests/tui/test_tmux.py
"""The console in a real terminal (tmux): real keys, the picture as tmux has it."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from canned_server import CannedServer, tree

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
PATIENCE = 40.0


class Terminal:
    """A tmux server of its own with one window, running the console."""

    def __init__(self, tmp_path, *options, size=(80, 24)):
        self._tmux = ["tmux", "-f", "/dev/null", "-L", f"sparkgrid-{uuid.uuid4().hex[:8]}"]
        self.code = tmp_path / "code"
        command = shlex.join([sys.executable, "-m", "tui", *options])
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "LC_ALL": "C.UTF-8"}
        for name in ("COLUMNS", "LINES"):       # Textual takes them for the terminal's own size
            env.pop(name, None)
        command += f"; echo $? >{self.code}; echo console left; sleep 60"
        subprocess.run([*self._tmux, "-u", "new-session", "-d", "-x", str(size[0]), "-y",
                        str(size[1]), command], check=True, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run([*self._tmux, "kill-server"], check=False, stderr=subprocess.DEVNULL)

    def ask(self, *words):
        return subprocess.run([*self._tmux, *words], check=True, capture_output=True,
                              text=True).stdout

    def keys(self, *keys):
        self.ask("send-keys", *keys)

    def type(self, text):
        self.ask("send-keys", "-l", text)

    @property
    def screen(self):
        return self.ask("capture-pane", "-p")

    @property
    def cooked(self):
        """Whether the terminal is as before: no second screen, a cursor, no mouse."""
        return self.ask("display-message", "-p",
                        "#{alternate_on} #{cursor_flag} #{mouse_any_flag}") == "0 1 0\n"

    @property
    def pid(self):
        """The console's process id."""
        shell = self.ask("display-message", "-p", "#{pane_pid}").strip()
        child, = pathlib.Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        return int(child)

    def see(self, *words):
        """Wait until all the words are on the screen: the screen."""
        give_up = time.monotonic() + PATIENCE
        while not all(word in (screen := self.screen) for word in words):
            assert time.monotonic() < give_up, f"{words} not seen in:\n{screen}"
            time.sleep(0.05)
        return screen


@pytest.fixture
def terminal(server, tmp_path):
    with Terminal(tmp_path, "--connect", server.url) as found:
        yield found


def until(condition, what):
    """The first true value of condition(), asked again and again."""
    give_up = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < give_up, what
        time.sleep(0.05)
    return found


def replies(tmp_path):
    """Replies in the files of conversations."""
    return [m for path in (tmp_path / "state").rglob("*.json")
            for m in json.loads(path.read_text())["messages"] if m["role"] == "assistant"]


def test_start_chat_stop_quit(server, terminal):
    terminal.see("● live", "mini", "2 ranks", "Engine")
    server.say("word " * 2000 + "END", pace=0.02)
    terminal.keys("F3")
    terminal.see("Enter sends")
    terminal.type("Grüße, 東京!")
    terminal.see("Grüße, 東京!")
    terminal.keys("Enter")
    terminal.see("word word word")
    terminal.keys("Escape")
    until(lambda: server.left, "the reply's end at the server")
    assert server.asked[0]["messages"][-1] == {"role": "user", "content": "Grüße, 東京!"}
    terminal.keys("F1")
    terminal.see("Help", "Everywhere")
    terminal.keys("F1")
    terminal.keys("F2")
    terminal.see("decode")
    terminal.keys("C-q")
    terminal.see("console left")
    assert terminal.code.read_text() == "0\n" and terminal.cooked


def test_a_reply_is_copied_to_the_terminals_clipboard(server, terminal):
    """By OSC 52: all of it, as Markdown, also what is above the screen."""
    text = "# Grüße\n\n" + "A *line* of 東京.\n\n" * 60 + "```python\nx = 1\n```\n"
    server.say(text)
    terminal.ask("set-option", "-g", "set-clipboard", "on")
    terminal.see("● live")
    terminal.keys("F3")
    terminal.see("Enter sends")
    terminal.keys("x", "Enter")
    terminal.see("x = 1", "complete")
    terminal.keys("BTab")           # from the message to the reply
    terminal.see("c Copy reply")
    terminal.keys("c")
    terminal.see("characters copied")
    assert until(lambda: terminal.ask("list-buffers"), "a buffer")
    assert terminal.ask("show-buffer") == text


def test_a_resize(terminal):
    terminal.see("● live", "Engine")
    for width, height in ((140, 45), (60, 18), (200, 50)):
        terminal.ask("resize-window", "-x", str(width), "-y", str(height))
        give_up = time.monotonic() + PATIENCE
        while True:     # the last line is the footer's, which reaches to the right edge
            lines = terminal.screen.rstrip("\n").splitlines()
            if len(lines) == height and "Commands" in lines[-1] and (
                    len(lines[-1].rstrip()) > width - 4):
                break
            assert time.monotonic() < give_up, terminal.screen
            time.sleep(0.05)


def test_an_engine_that_comes_late_and_goes(tmp_path):
    server = CannedServer(tree(6, 300))
    server._socket.close()
    server._socket = None
    with Terminal(tmp_path, "--connect", server.url, size=(120, 40)) as terminal:
        terminal.see("no engine answers", "Connection refused", "next try in")
        server.start()
        try:
            terminal.keys("F5")
            terminal.see("● live", "6 ranks")
            server.stop()
            terminal.see("✗ lost", "next try in")
        finally:
            server.stop()


def test_ctrl_c_does_not_end_it_and_a_signal_restores_the_terminal(terminal):
    terminal.see("● live")
    terminal.keys("C-c")
    terminal.keys("F1")
    terminal.see("Everywhere")
    os.kill(terminal.pid, signal.SIGTERM)
    terminal.see("console left")
    assert terminal.code.read_text() == "143\n" and terminal.cooked


@pytest.mark.parametrize("view", ["F2", "F3"])
def test_a_terminal_that_is_closed_ends_it(server, terminal, tmp_path, view):
    server.say("word " * 2000, pace=0.005)
    terminal.see("● live")
    terminal.keys("F3")
    terminal.see("Enter sends")
    terminal.keys("x", "Enter")
    terminal.see("word word")
    terminal.keys(view)             # a view that is drawn all the time, or one that is not
    pid = terminal.pid
    terminal.ask("kill-server")
    give_up = time.monotonic() + PATIENCE
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < give_up, os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    (reply,) = replies(tmp_path)
    assert reply["content"].startswith("word word") and reply["figures"]["reason"] == "stopped"


def test_a_killed_console_leaves_what_came_of_a_reply(server, terminal, tmp_path):
    server.say("one two three", hold=2)
    terminal.see("● live")
    terminal.keys("F3")
    terminal.see("Enter sends")
    terminal.keys("x", "Enter")
    terminal.see("one two")
    until(lambda: replies(tmp_path), "what came, in its file")
    os.kill(terminal.pid, signal.SIGKILL)
    terminal.see("console left")
    assert terminal.code.read_text() == "137\n"
    server.say("all of it")
    with Terminal(tmp_path, "--connect", server.url) as again:
        again.see("● live")
        again.keys("F3")
        again.see("one two", "✗ its end was not kept", "ctrl+r retries")
        again.keys("C-r")
        again.see("all of it", "complete")
        again.keys("C-q")
        again.see("console left")
    assert [m["content"] for m in replies(tmp_path)] == ["all of it"]
