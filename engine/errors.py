"""Every error a user can meet: what happened with its numbers, a remedy, and an exit code.

The message says what happened and carries the numbers; `hint` says what to do about it. The front
prints both on rank 0 and leaves with `exit_code`, the same on every rank. A bug of ours is an
`assert`, never one of these.
"""

INTERRUPTED = 130       # exit codes that are no error's, as shells give them: 128 + SIGINT
BROKEN_PIPE = 141       # 128 + SIGPIPE: standard output takes no more
BUG = 70                # a traceback goes with it


class EngineError(Exception):
    """Base of the user's errors.

    message: what happened, numbers included. hint: the remedy, "" where there is none.
    rank: the rank that met it, None where every rank would say the same.
    """

    exit_code = 1

    def __init__(self, message, hint="", rank=None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rank = rank

    def __str__(self):
        return self.message

    @property
    def told(self):
        """The message, with the rank in front where it does not begin with it."""
        where = "" if self.rank is None else f"rank {self.rank}"
        return self.message if self.message.startswith(where) else f"{where}: {self.message}"

    def report(self):
        """The lines that the user sees: where, what happened, what to try."""
        remedy = f"\n  try: {self.hint}" if self.hint else ""
        return f"sparkgrid: {self.told}{remedy}"

    def __reduce__(self):
        return type(self), (self.message, self.hint, self.rank)


class UsageError(EngineError):
    """The command line is wrong."""

    exit_code = 2


class ModelError(EngineError):
    """The model folder, its config or its checkpoint cannot be used."""

    exit_code = 3


class PlanError(EngineError):
    """The memory, the pool or the world cannot take what was asked."""

    exit_code = 4


class RequestError(EngineError):
    """One request is refused: too long, empty, outside the vocabulary."""

    exit_code = 5


class TooLong(RequestError):
    """A prompt, with its reply, is longer than the window or than the pool could ever hold."""


class QueueFull(RequestError):
    """As many requests wait as the queue takes."""


class Unavailable(EngineError):
    """The engine takes no requests now: it starts, it stops, or a rank is lost."""

    exit_code = 8


class WorldError(EngineError):
    """The ranks disagree, or one of them is lost."""

    exit_code = 6


class ResidueMismatch(WorldError):
    """A rank received a page id whose residue, id mod ranks, is not the class it must be of."""


class FaultError(EngineError):
    """The computation itself failed: NaN in the logits and other internal faults."""

    exit_code = 7
