# pytest tests/api/test_fuzz.py    (starts two ranks; the long form is bench/fuzz.py)
"""Malformed requests against two real ranks: no 5xx, nobody waits, nothing dies."""

import pytest

from bench.fuzz import fuzz, made
from serving import Serve

REQUESTS = 300


def test_requests_are_a_function_of_seed_and_number():
    assert made(1, 5).data == made(1, 5).data and made(1, 5).data != made(2, 5).data
    assert {made(1, n).kind for n in range(200)} == {"field", "raw", "bytes", "head", "noise",
                                                     "cut"}


def test_only_loopback_is_fuzzed():
    for url in ("http://10.0.0.1:8114", "http://192.168.1.5", "nothing"):
        with pytest.raises(SystemExit, match="loopback"):
            fuzz(url, 1, 1)


@pytest.mark.mpi
def test_malformed_requests_do_no_harm():
    with Serve(2, "--context", "4096") as engine:
        counts, faults = fuzz(engine.url, REQUESTS, seed=20, say=lambda line: None)
        assert faults == []
        assert sum(counts.values()) == REQUESTS and counts[400] > REQUESTS / 3 and counts[200] > 5
        assert engine.process.poll() is None and "Traceback" not in engine.log, engine.log
