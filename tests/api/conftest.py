"""What the API's tests share: the chat of the embedded model, a fake engine behind a real port, and
one real server of two ranks."""

import json
import socket

import pytest

from engine.chat import Chat
from engine.config import EMBEDDED
from fake_engine import Fake


@pytest.fixture(scope="session")
def chat():
    return Chat(EMBEDDED)


@pytest.fixture(scope="session")
def cases(mini):
    """The embedded model's reference replies, by name."""
    return {c["name"]: c for c in json.loads((mini / "expected.json").read_text())["cases"]}


@pytest.fixture
def fake(chat):
    served = Fake(chat)
    yield served
    served.close()


@pytest.fixture(scope="session")
def send():
    return exchange


def exchange(url, data, timeout=10, half=False):
    """Raw bytes to a server, all that it answers until it closes. half: close our side first."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout) as s:
        s.sendall(data)
        if half:
            s.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while piece := s.recv(1 << 16):
                found += piece
        except ConnectionResetError:
            pass
    return found
