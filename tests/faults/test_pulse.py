# python -m pytest tests/faults/test_pulse.py
"""The pulse between ranks of one process: goodbyes, losses, told errors, strangers."""

import queue
import socket
import threading

import pytest

from engine.errors import FaultError, WorldError
from engine.pulse import Pulse
from serving import until

SIZE = 3


class Ranks:
    """A world's part that a Pulse needs."""

    def __init__(self, rank, post):
        self.rank, self.size, self.local_size, self.alarm = rank, SIZE, SIZE, None
        self._post = post

    def broadcast(self, message=None):
        if self.rank == 0:
            for box in self._post[1:]:
                box.put(message)
            return message
        return self._post[self.rank].get(timeout=30)


@pytest.fixture
def pulses():
    """[Pulse of rank 0, 1, 2]."""
    post = [queue.Queue() for _ in range(SIZE)]
    found = [None] * SIZE

    def join(rank):
        found[rank] = Pulse(Ranks(rank, post))
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    until(lambda: all("pid" in facts for _, facts in found[0].heard.values()), "every rank's line")
    yield found
    for pulse in reversed(found):
        pulse.close()


def test_a_goodbye_is_no_loss(pulses):
    pulses[2].close()
    until(lambda: 2 not in pulses[0].heard, "the goodbye")
    assert pulses[0].error() is None and set(pulses[0].everyone()) == {0, 1}
    pulses[0].close()
    until(lambda: not pulses[1].heard, "rank 0's goodbye")
    assert pulses[1].error() is None


def test_an_end_without_one_is(pulses):
    pulses[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)      # as the system does at its end
    error = until(pulses[0].error, "the loss")
    assert isinstance(error, WorldError) and error.rank == 1
    assert error.message.startswith("rank 1 is lost: its connection closed")
    assert pulses[2].error() is None


def test_a_silent_rank_is_late_then_lost(pulses, monkeypatch):
    monkeypatch.setattr("engine.pulse.SILENT", 0.8)
    monkeypatch.setattr("engine.pulse.LOST", 4.0)
    monkeypatch.setattr(pulses[2], "_beat", lambda: None)
    pulses[0].serves(lambda: {"round": 7})
    until(lambda: 2 in pulses[0].silent(), "silence")
    until(lambda: pulses[1].heard[0][1].get("round") == 7, "rank 0's facts")
    error = until(pulses[0].error, "the loss")
    assert error.rank == 2 and "has not answered for " in error.message


def test_what_a_rank_has_met_is_said_by_rank_0(pulses, monkeypatch):
    monkeypatch.setattr("engine.pulse.TOLD", 0.1)
    pulses[2].tell(FaultError("NaN in layer 7", "look"))
    error = until(pulses[0].error, "the error")
    assert type(error) is FaultError and error.rank == 2
    assert error.told == "rank 2: NaN in layer 7" and error.hint == "look"


@pytest.mark.parametrize("data", [
    b"hello\n", b"{}\n", b"[]\n", b'{"rank": 1, "secret": "guess"}\n', b'{"bye": true}\n',
    b'{"error": ["FaultError", "a", "b"]}\n', b""])
def test_a_stranger_is_shown_out(pulses, data):
    with socket.create_connection(pulses[0]._listening.getsockname(), timeout=30) as stranger:
        if data:
            stranger.sendall(data)
            assert stranger.recv(1) == b""
    assert pulses[0].error() is None and set(pulses[0].heard) == {1, 2}
