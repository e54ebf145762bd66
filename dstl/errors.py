"""Errors of DSTL in one tree, sorted by what the caller should do.

::

    DstlError
    ├── Unavailable            try again later: the service or store did not answer
    │   ├── SlowDown           the store asks for less (503): back off, do not hedge
    │   └── TaskManagerLost    a TaskManager process is gone: restart the query
    ├── OutcomeUnknown         a write may or may not be there: never delete what it may have referenced
    ├── Fenced                 a newer driver has taken over: stop, write and delete nothing
    │   └── Superseded         another attempt or batch of the same run has taken this attempt's place
    ├── Closed                 the object was closed before the call
    ├── Invalid                fix the code or the configuration (also a ValueError)
    │   ├── AccessDenied       the store refuses these credentials
    │   ├── NotDeterministic   partitions have changed a broadcast state differently
    │   └── UserCodeError      a processor raised; carries its traceback, key and operator
    ├── StateTooLarge          the state would outgrow a TaskManager's memory
    ├── CorruptData            stored bytes are not what was written; detected before use
    ├── MissingState           something that a checkpoint needs is not there
    │   └── ObjectNotFound     one object is not there
    ├── ObjectExists           put-if-absent found the name taken
    └── CheckpointDeclined     this checkpoint failed, its bytes are kept; the batch may be run again

A query that fails with one of them is helped by a restart, or is not (``restartable``; ``dstl.spark.restart`` goes by
it). A restart begins a new run: it fences, looks up what became of unknown commits, has TaskManagers drop what no
checkpoint holds, and Spark replays the batch. It brings no object back and changes no configuration.

====================  =======  ========================================================================================
error                 restart  where a query meets it, and what a new run changes
====================  =======  ========================================================================================
DstlError             yes      something unforeseen in another process (its class is in the message): unknown, so try
Unavailable           yes      a store, a TaskManager or the driver's port did not answer: it may by then
SlowDown              yes      the store throttled longer than was waited for
TaskManagerLost       yes      another TaskManager takes the place, and is restored
OutcomeUnknown        yes      the new run's fence decides what became of the commit
Fenced                no       a newer driver or run works on the same state: two would only take turns
Superseded            yes      an attempt came too late, four times; the new run's attempts have no rivals
Closed                yes      the TaskManager was ending; another is there by then
Invalid               no       code and configuration are the same again
AccessDenied          no       so are the credentials
NotDeterministic      no       the partitions see the same rows again, and differ again
UserCodeError         no       the processor sees the same rows again
StateTooLarge         no       the state is as large as before, and so is the memory
CorruptData           no       the object is as damaged as before: bring it back, or go back (the message says how)
MissingState          no       the state or checkpoint is as missing as before
ObjectNotFound        no       the object is as missing as before
ObjectExists          no       the name is as taken as before
CheckpointDeclined    yes      the batch is replayed, and its checkpoint made anew
====================  =======  ========================================================================================

A checkpoint that fails for a reason that no restart cures (``AccessDenied``, say) ends with that error's own class.

Messages name the object, the checkpoint and the operator's next step, and never hold a secret.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

__all__ = [
    "AccessDenied",
    "CheckpointDeclined",
    "Closed",
    "CorruptData",
    "DstlError",
    "Fenced",
    "Invalid",
    "MissingState",
    "NotDeterministic",
    "ObjectExists",
    "ObjectNotFound",
    "OutcomeUnknown",
    "SlowDown",
    "StateTooLarge",
    "Superseded",
    "TaskManagerLost",
    "Unavailable",
    "UserCodeError",
    "brief",
    "clip",
    "error_from_wire",
    "error_to_wire",
    "named",
]

_SHOWN = 200  # a line of a terminal or two
_MOST_ON_WIRE = 1 << 16  # a message with a traceback fits, and a worker's log stays readable


class DstlError(Exception):
    """Root of the tree.

    Attributes:
        restartable: True where a query that failed with it may go well when it is started again as it is.
    """

    restartable: ClassVar[bool] = True


class Unavailable(DstlError):
    """A service or store did not do the work, and certainly will not. Operator action: try again later."""


class SlowDown(Unavailable):
    """The store throttles (503 SlowDown). Operator action: spread over more prefixes or lower the rate.

    It says that nothing was done; but it is an answer, and something between may have made it up. Where a wrong one
    would cost data, a name is won for certain first (:class:`~dstl.store.retry_policy.ConditionalPut`).
    """


class TaskManagerLost(Unavailable):
    """A TaskManager process is gone with changes that no checkpoint has. Operator action: restart the query
    (``dstl.spark.restart`` does it); Spark replays the batch."""


class OutcomeUnknown(DstlError):
    """A request was sent and its answer lost. Nothing that it may have referenced may be deleted.

    Operator action: none at once; the next start resolves it.
    """


class Fenced(DstlError):
    """A newer driver, run or attempt has taken over. Operator action: stop this process; keep the newer one."""

    restartable = False


class Superseded(Fenced):
    """Another attempt or batch of the same run has taken an attempt's place: this attempt's changes count for nothing.

    Operator action: none. Spark runs the task again; where it gave up, a restart replays the batch.
    """

    restartable = True


class Closed(DstlError):
    """The object was closed. Operator action: open a new one."""


class Invalid(DstlError, ValueError):
    """Code or configuration is wrong; trying again changes nothing. Operator action: as the message says."""

    restartable = False


class AccessDenied(Invalid):
    """The store refuses the credentials or the role. Operator action: grant what the message names."""


class NotDeterministic(Invalid):
    """Partitions of a batch have changed a broadcast state differently, and there is one copy for all of them.

    The batch is not committed, and the state is as before it.

    Operator action: make ``handleBroadcastRows`` a function of its rows and of broadcast states alone.
    """


class StateTooLarge(DstlError):
    """State would outgrow the memory of its TaskManager. The batch is aborted and the last checkpoint is kept.

    It is no :class:`Invalid`, for a processor's call is not wrong that meets it.

    Operator action: ``table="rocksdb"``, more TaskManagers, a time to live, or more memory.
    """

    restartable = False


class UserCodeError(Invalid):
    """User code raised inside a task. The batch is aborted and the state is as before it."""


class CorruptData(DstlError):
    """Stored bytes fail their length, magic or checksum. Nothing of them was applied.

    Operator action: restore the named object from a replica, or choose an older checkpoint.
    """

    restartable = False


class MissingState(DstlError):
    """A checkpoint, or an object that it names, is not there. Operator action: as the message says."""

    restartable = False


class ObjectNotFound(MissingState):
    """No object has this name."""


class ObjectExists(DstlError):
    """Put-if-absent found the name taken: another writer's object, or our own whose answer was lost."""

    restartable = False


class CheckpointDeclined(DstlError):
    """A checkpoint failed or timed out; its changes are still held. Operator action: let the batch run again."""


_BY_NAME: dict[str, type[DstlError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, DstlError)
}


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say in front of what is refused within what it is about; an error of user code names its own."""
    try:
        yield
    except UserCodeError:
        raise
    except Invalid as error:
        raise Invalid(f"{what}: {error}") from error


def error_to_wire(error: BaseException) -> tuple[str, str]:
    """Reduce an error to (kind, message) so that it can cross a socket without pickle.

    Kinds are those of this module: a class that another module derives from one of them is told as that one.
    """
    for kind in type(error).__mro__:
        if _BY_NAME.get(kind.__name__) is kind:
            return kind.__name__, str(error)[:_MOST_ON_WIRE]
    if isinstance(error, MemoryError):
        return "Unavailable", "the process that was called has run out of memory: give it more, or spread the state"
    return "DstlError", f"{type(error).__name__}: {clip(error)}"


def error_from_wire(kind: str, message: str) -> DstlError:
    """Rebuild the error that :func:`error_to_wire` reduced; an unknown kind becomes the root."""
    return _BY_NAME.get(kind, DstlError)(message)


def brief(value: object) -> str:
    """Return a value for an error's message, as ``repr`` writes it: at most some 200 characters, whatever it is.

    Values are the user's data: a message holds enough to find one, and no copy of it.
    """
    if isinstance(value, (str, bytes, bytearray)) and len(value) > _SHOWN:
        return f"{repr(value[:_SHOWN])[:_SHOWN]}... ({len(value)} long)"
    try:
        return clip(_SHORT.repr(value))
    except Exception:
        return f"<{type(value).__name__}>"


def clip(text: object) -> str:
    """Return an error, or another text that is not ours, for an error's message: at most some 200 characters of it."""
    whole = str(text)
    return whole if len(whole) <= _SHOWN else f"{whole[:_SHOWN]}... ({len(whole)} long)"


_SHORT = reprlib.Repr()
# What of a foreign value is shown: as much as fits a line of a terminal or two.
_SHORT.maxlevel = 4
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxarray = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 20
_SHORT.maxdeque = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 4 * _SHOWN
