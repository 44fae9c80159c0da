# python -m pytest tests/faults/test_supervise.py
"""mpi_launch.sh --supervise: the port stays, the engine comes back, what is hopeless is not tried.

Real ranks; what the front does with bytes is in test_front.py.
"""

import os
import signal
import socket

import pytest

from serving import Serve, until

pytestmark = pytest.mark.mpi

LONG = "x" * 50         # the embedded model goes on with it as long as it may


def test_it_starts_again_and_clients_are_told_meanwhile():
    with Serve(2, "--supervise", "--drain", "1") as engine:
        url = engine.url
        stream = engine.stream(LONG, 30_000).begun()
        os.kill(engine.pids[1], signal.SIGKILL)
        how, error = stream.ended()
        assert how == "closed" and "rank 1 is lost" in error        # the engine said so itself
        down = until(lambda: [a for a in [engine.ask("GET", "/v1/models")]
                              if a[0] == 503 and "starts again" in str(a[2])], "503")[0]
        assert down[1]["Retry-After"] and down[2]["error"]["type"] == "server_error"
        assert "exit code 6" in down[2]["error"]["message"]
        until(lambda: engine.health()[0] == 200, "the engine's return")

        stream = engine.stream(LONG, 30_000).begun()
        os.kill(engine.pids[0], signal.SIGKILL)
        how, error = stream.ended()
        assert how == "closed" and "rank 0 of the engine ended in the middle of this" in error
        assert engine.ask("GET", "/v1/models")[0] == 503
        until(lambda: engine.health()[0] == 200, "the engine's return")
        assert "starting again in 1 s" in engine.log and "starting again in 2 s" in engine.log

        stream = engine.stream(LONG, 30_000).begun()
        assert engine.url == url
        engine.process.send_signal(signal.SIGTERM)
        how, error = stream.ended()
        assert how == "closed" and "cut after 1 s of grace" in error
        assert engine.wait() == 0


@pytest.mark.parametrize("options, code, what", [
    (("--model", "/no/such/folder"), 3, "no such folder"),
    (("--host", "0.0.0.0"), 2, "--host 0.0.0.0 is open to other machines, and no key is set"),
    (("plan",), 2, "nothing to supervise"),
    (("--prompt", "a"), 2, "nothing to supervise"),
])
def test_what_will_not_get_better_is_not_tried_again(options, code, what):
    with Serve(2, "--supervise", *options, ready=False, env={"SPARKGRID_API_KEY": ""}) as engine:
        assert engine.wait() == code
        assert what in engine.log and "starting again" not in engine.log


def test_a_taken_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Serve(2, "--supervise", "--port", port, ready=False) as engine:
            assert engine.wait() == 4
            assert f"port {port} of 127.0.0.1 cannot be served: Address already in use" \
                in engine.log
