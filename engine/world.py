"""The ranks and what they say to each other: the only importer of mpi4py.

Every collective here is made of non-blocking sends and receives and a wait that backs off, so a
waiting rank leaves its core to the others (a blocking MPICH receive spins: six ranks on two cores
ran 3-5 times slower with it). All ranks call the same collectives in the same order; messages
between two ranks never overtake each other, so one tag is enough. Sums are taken in rank order
0..W-1 whatever the size (rank law).
"""

import contextlib
import ctypes
import json
import os
import sys
import time
import weakref

import mpi4py

mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI  # noqa: E402  (the thread level must be set before this)
import numpy as np  # noqa: E402

from engine import errors  # noqa: E402

SUM_WHOLE_BYTES = 32 * 1024   # a sum up to here sends whole arrays; above, each rank sums a share
REPORT_BYTES = 16384          # of a report in `agree`: 1,000 characters, at most 12 bytes each
FAILURE_SECONDS = 3.0         # after a failed MPI call, for the news of a lost rank
ABORT_SECONDS = 0.3           # for mpirun to pass on what was written: it drops the rest
PR_SET_TIMERSLACK = 29
SPIN_SECONDS = (200e-6, 40e-6)    # before the first sleep: a core a rank, more ranks than cores
SLEEP_SECONDS = (20e-6, 4e-3)     # shortest, longest; between them 2 % of the time waited so far


class World:
    """This process's place among the ranks, and the collectives. Made by `World.join()`."""

    def __init__(self, comm):
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = machine.Get_rank(), machine.Get_size()
        machine.Free()
        if self.local_rank == 0:
            _unlink_shared()
        self.alarm = None           # () -> error of a lost rank or None, asked while waiting
        self.seconds = {}           # waited in exchanges, by stage
        self._spin = SPIN_SECONDS[self.local_size > (os.cpu_count() or 1)]
        if sys.platform == "linux":      # the kernel rounds a short sleep up by 50 us otherwise
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)

    @classmethod
    def join(cls):
        """Join the ranks that mpirun started; a process started alone is rank 0 of 1."""
        return cls(MPI.COMM_WORLD)

    def abort(self, code):
        """End every rank at once; for faults that the others cannot be told of in any other way."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(ABORT_SECONDS)
        self._comm.Abort(code)

    def cuda_aware(self):
        """Whether every rank's MPI takes device arrays. One that does not crashes on them."""
        answer = 0
        for library in (None, "libmpi.so", "libmpi.so.40"):
            try:
                answer = ctypes.CDLL(library).MPIX_Query_cuda_support()
                break
            except (OSError, AttributeError):       # no such library; an MPI that cannot be asked
                continue
        return bool(self.gather(np.array([answer], np.int32)).min())

    def _wait(self, requests, stage="other"):
        started = time.perf_counter()
        try:
            while not MPI.Request.Testall(requests):
                waited = time.perf_counter() - started
                if waited > self._spin:
                    if self.alarm is not None and (error := self.alarm()) is not None:
                        raise error
                    time.sleep(min(max(SLEEP_SECONDS[0], 0.02 * waited), SLEEP_SECONDS[1]))
        except MPI.Exception as e:
            raise self._failure(e) from None
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def _failure(self, exception):
        """The error of a failed MPI call: that of a lost rank, which MPI may notice first."""
        give_up = time.monotonic() + FAILURE_SECONDS
        while self.alarm is not None and time.monotonic() < give_up:
            if (error := self.alarm()) is not None:
                return error
            time.sleep(SLEEP_SECONDS[1])
        return errors.WorldError(f"MPI failed: {exception}", "look at the messages of all ranks",
                                 rank=self.rank)

    def exchange(self, *pairs, stage="other"):
        """For each (outgoing, incoming) pair: send outgoing[j] to rank j, fill incoming[i] from i.

        Contiguous arrays, on the device only where `cuda_aware`; None or empty = nothing between
        these two. Both sides know the sizes from the plan. A rank's own part is copied. All pairs
        travel at once and cost one wait, which `seconds` counts by stage.
        """
        requests = self._requests(pairs, self._comm.Irecv, self._comm.Isend)
        self._copy_own(pairs)
        self._wait(requests, stage)

    def repeated(self, *pairs, stage="other"):
        """The same exchange to be made again and again: an Exchange."""
        return Exchange(self, pairs, stage)

    def _requests(self, pairs, receive, send):
        found = []
        for _, incoming in pairs:
            for i, array in enumerate(incoming):
                if array is not None and array.size and i != self.rank:
                    found.append(receive([array, array.nbytes, MPI.BYTE], i))
        try:
            for outgoing, _ in pairs:
                for j, array in enumerate(outgoing):
                    if array is not None and array.size and j != self.rank:
                        found.append(send([array, array.nbytes, MPI.BYTE], j))
        except MPI.Exception as e:
            raise self._failure(e) from None
        return found

    def _copy_own(self, pairs):
        for outgoing, incoming in pairs:
            mine = incoming[self.rank]
            if mine is not None and mine.size and mine is not outgoing[self.rank]:
                _copy(mine, outgoing[self.rank])

    def gather(self, mine, parts=None, stage="other"):
        """Every rank's array, in rank order: [W, *mine.shape], or uneven arrays in `parts`."""
        if parts is None:
            parts = np.empty((self.size, *mine.shape), mine.dtype)
        self.exchange(([mine] * self.size, list(parts)), stage=stage)
        return parts

    def sum(self, x):
        """x, contiguous, becomes its sum over ranks, added in rank order element by element."""
        if self.size == 1 or not x.size:
            return x
        if x.nbytes <= SUM_WHOLE_BYTES:
            parts = self.gather(x, stage="sum")
            _sum_in_order(parts, x)
            return x
        flat = x.reshape(-1)
        cuts = [flat.size * r // self.size for r in range(self.size + 1)]
        shares = [flat[cuts[r]:cuts[r + 1]] for r in range(self.size)]
        parts = np.empty((self.size, shares[self.rank].size), x.dtype)
        self.exchange((shares, list(parts)), stage="sum")
        total = np.empty_like(parts[0])
        _sum_in_order(parts, total)
        self.gather(total, shares, "sum")
        return x

    def broadcast(self, message=None):
        """Rank 0's bytes, on every rank. The other ranks wait here while there is nothing to do."""
        if self.size == 1:
            return message
        length = np.array([len(message) if self.rank == 0 else 0], np.int64)
        if self.rank == 0:
            data = np.frombuffer(message, np.uint8)
            try:
                requests = [self._comm.Isend([a, a.nbytes, MPI.BYTE], r)
                            for r in range(1, self.size) for a in (length, data)]
            except MPI.Exception as e:
                raise self._failure(e) from None
            self._wait(requests, "plan")
            return message
        self._wait([self._comm.Irecv([length, length.nbytes, MPI.BYTE], 0)], "idle")
        data = np.empty(int(length[0]), np.uint8)
        self._wait([self._comm.Irecv([data, data.nbytes, MPI.BYTE], 0)], "plan")
        return data.tobytes()

    def barrier(self):
        """Return when every rank has come here."""
        self.gather(np.zeros(1, np.int8))

    def agree(self, error=None):
        """Tell every rank how this one fared; None, or (rank, EngineError) of the first failed one.

        The error's `rank` is set where not all ranks failed.
        """
        report = b"" if error is None else json.dumps(
            [type(error).__name__, error.message[:600], error.hint[:400]]).encode()
        mine = np.zeros(REPORT_BYTES, np.uint8)
        mine[:min(len(report), REPORT_BYTES)] = np.frombuffer(report, np.uint8)[:REPORT_BYTES]
        everyone = self.gather(mine)
        failed = [r for r in range(self.size) if everyone[r, 0]]
        if not failed:
            return None
        name, message, hint = json.loads(everyone[failed[0]].tobytes().rstrip(b"\0"))
        kind = getattr(errors, name, errors.FaultError)
        return failed[0], kind(message, hint, rank=failed[0] if len(failed) < self.size else None)


class Exchange:
    """World.exchange of the same arrays, made many times: `start`, then `finish`; a call does both.

    Between the two the arrays are the MPI's; other exchanges may be made meanwhile. Requests are
    made once and started again (a decode step has more than a hundred exchanges, and making a
    request anew costs Python twice what starting it does).
    """

    def __init__(self, world, pairs, stage):
        self._world, self._pairs, self._stage = world, pairs, stage
        comm = world._comm
        self._requests = world._requests(pairs, comm.Recv_init, comm.Send_init)
        weakref.finalize(self, _free, self._requests)

    def __call__(self):
        self.start()
        self.finish()

    def start(self):
        """Post the sends and receives."""
        if self._requests:
            try:
                MPI.Prequest.Startall(self._requests)
            except MPI.Exception as e:
                raise self._world._failure(e) from None
        self._world._copy_own(self._pairs)

    def finish(self):
        """Wait until all have arrived and left."""
        if self._requests:
            self._world._wait(self._requests, self._stage)


def _unlink_shared():
    """Take MPICH's shared memory out of the file system, where a killed rank would leave it.

    By now every rank of the machine has it mapped; the memory itself goes with the last of them.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
            paths = {line.split(maxsplit=5)[5].strip() for line in f if "/mpich_shm_" in line}
    except OSError:             # no such file on this system
        return
    for path in paths:
        with contextlib.suppress(OSError):      # "... (deleted)"
            os.unlink(path)


def _free(requests):
    for request in requests:
        request.Free()


def _copy(target, source):
    """Copy between two host arrays or two device arrays."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_to_device(source)


def _sum_in_order(parts, out):
    np.copyto(out.reshape(-1), parts[0].reshape(-1))
    for part in parts[1:]:
        np.add(out.reshape(-1), part.reshape(-1), out=out.reshape(-1))
