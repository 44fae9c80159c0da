"""Which ranks are alive: each tells rank 0 twice a second, over TCP, apart from MPI.

MPI waits for ever on a rank that was killed or stopped. So every rank has a thread here that holds
a connection to rank 0 and sends a line of JSON each BEAT seconds: its rank and whatever `facts`
says (round, memory). Rank 0 answers in kind, so that the others learn of its end.

| seen | meaning |
|---|---|
| the connection ends without a goodbye | the process is gone: lost at once |
| no line for SILENT seconds | stopped, or cut off: `silent` names it |
| no line for LOST seconds | lost; until the engine serves, for LOADING seconds |
| a line with an error | the rank has met it, and waits for rank 0 to end all |

A loss is told by `error()`, which World polls while it waits. Where all ranks are on one machine
the connection is on loopback. A stranger cannot pose as a rank: the first line holds a secret that
rank 0 has sent through MPI. The only place that opens sockets between ranks.
"""

import json
import os
import secrets
import selectors
import socket
import threading
import time

from engine import errors
from engine.errors import WorldError

BEAT = 0.5              # seconds between two lines
SILENT, LOST = 3.0, 8.0     # seconds without a line
LOADING = 120.0         # the same while compilers and reads of weights may hold up a rank's threads
TOLD = 10.0             # seconds that a rank with an error waits for rank 0 to end all
LINE = 1 << 16          # bytes of the longest line
HINT = "look at that rank's machine and its messages above; start the engine again"


class _Peer:
    """A connection: bytes in, lines out."""

    def __init__(self, connection):
        self.connection = connection
        self.rank = None            # until its first line has come
        self._data = b""
        connection.setblocking(False)

    def lines(self):
        """The JSON objects that have come; None where the connection has ended."""
        try:
            data = self.connection.recv(LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._data) > LINE:
            return None
        *whole, self._data = (self._data + data).split(b"\n")
        try:
            found = [json.loads(line) for line in whole]
        except ValueError:
            return None
        return found if all(isinstance(line, dict) for line in found) else None

    def send(self, value):
        """Best effort: a peer that takes no more is noticed by its silence."""
        try:
            self.connection.send(json.dumps(value).encode() + b"\n")
        except OSError:
            pass


class Pulse:
    """This rank's thread. Made by all ranks together, before anything that may take long.

    facts: () -> dict that goes with each line. patience: seconds without a line after which a rank
    is lost. heard: {rank: (time.monotonic of its last line, its facts)}; on rank 0 of every other
    rank, on the others of rank 0. lost: None, or the EngineError of the first lost rank.
    """

    def __init__(self, world):
        self._world, self.facts, self.patience = world, dict, LOADING
        self.heard, self.lost, self._since = {}, None, time.monotonic()
        self._peers, self._stop = [], threading.Event()
        self._here = {"rank": world.rank, "pid": os.getpid(), "host": socket.gethostname()}
        if world.size == 1:
            return
        self._selector = selectors.DefaultSelector()
        if world.rank == 0:
            alone = world.local_size == world.size
            self._listening = socket.create_server(("127.0.0.1" if alone else "", 0))
            self._listening.setblocking(False)
            self._selector.register(self._listening, selectors.EVENT_READ)
            host = "127.0.0.1" if alone else _address()
            self._secret = secrets.token_hex(16)
            world.broadcast(json.dumps([host, self._listening.getsockname()[1],
                                        self._secret]).encode())
        else:
            host, port, self._secret = json.loads(world.broadcast())
            try:
                peer = _Peer(socket.create_connection((host, port), timeout=10))
            except OSError as e:
                raise WorldError(f"rank 0 cannot be reached at {host}:{port}: {e}", "open the "
                                 "machines' firewalls to each other", rank=world.rank) from None
            peer.rank = 0
            self._add(peer)
        now = time.monotonic()
        others = range(1, world.size) if world.rank == 0 else (0,)
        self.heard = {r: (now, {}) for r in others}
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()
        world.alarm = self.error

    def serves(self, facts):
        """Loading is over: from now on each line carries `facts()`, and is missed after LOST."""
        self._since = time.monotonic()
        self.facts, self.patience = facts, LOST

    def error(self):
        """The EngineError of the first lost rank, None while there is none."""
        return self.lost

    def tell(self, error):
        """This rank has met an EngineError: rank 0 says it to all who wait, and ends every rank.

        Returns only where rank 0 did not in time, or is the one that is lost.
        """
        if self._world.size > 1 and self._world.rank and self.lost is None:
            line = {"error": [type(error).__name__, error.message[:1000], error.hint[:400]]}
            for peer in list(self._peers):
                peer.send({**self._here, "secret": self._secret, **line})
            self._stop.wait(TOLD)

    def silent(self):
        """{rank: seconds since it was last heard} of the ranks that are late with their line."""
        now = time.monotonic()
        late = {r: now - max(at, self._since) for r, (at, _) in list(self.heard.items())}
        return {r: seconds for r, seconds in late.items() if seconds > SILENT}

    def everyone(self):
        """{rank: facts} as last heard, this rank's own included."""
        found = {r: facts for r, (_, facts) in list(self.heard.items())}
        return {self._world.rank: {**self._here, **self.facts()}, **found}

    def close(self):
        """Say goodbye: this rank's end is no loss."""
        if self._world.size == 1:
            return
        self._world.alarm = None
        self._stop.set()
        self._thread.join(2)
        for peer in self._peers:
            peer.send({"bye": True})
            peer.connection.close()
        if self._world.rank == 0:
            self._listening.close()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self):
        due = 0.0
        while not self._stop.is_set():
            for key, _ in self._selector.select(BEAT / 2):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now >= due:
                due = now + BEAT
                self._beat()
            for rank, (at, facts) in self.heard.items():
                late = now - max(at, self._since)
                if late > self.patience:
                    where = f"process {facts.get('pid', '?')} on {facts.get('host', '?')}"
                    self._lose(rank, f"{where} has not answered for {late:.1f} s")

    def _beat(self):
        line = {**self._here, **self.facts(), "secret": self._secret}
        for peer in self._peers:
            if peer.rank is not None:
                peer.send(line)

    def _accept(self):
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        if len(self._peers) < 2 * self._world.size:
            self._add(_Peer(connection))
        else:
            connection.close()

    def _add(self, peer):
        self._peers.append(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _read(self, peer):
        lines = peer.lines()
        if lines is None:
            self._drop(peer)
            if peer.rank is not None:
                self._lose(peer.rank, "its connection closed: the process has ended")
            return
        for line in lines:
            if line.get("bye"):
                self.heard.pop(peer.rank, None)
                return self._drop(peer)
            if line.get("secret") != self._secret:
                return self._drop(peer)
            peer.rank = line["rank"]
            if "error" in line:
                kind, message, hint = line["error"]
                self.lost = self.lost or getattr(errors, kind)(message, hint, rank=peer.rank)
                continue
            del line["secret"]
            self.heard[peer.rank] = time.monotonic(), line

    def _drop(self, peer):
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        peer.connection.close()

    def _lose(self, rank, why):
        if self.lost is None:
            self.lost = WorldError(f"rank {rank} is lost: {why}", HINT, rank=rank)


def _address():
    """The address by which other machines reach this one: that of its way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))        # sends nothing: asks for the route
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())
