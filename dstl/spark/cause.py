"""The typed error of DSTL inside one of Spark's, read from Spark's text of it.

Between a Python worker, the JVM and the driver an error travels as the text of its traceback. The text is read by its
structure, never searched for names: what a user's message quotes is not an error of ours. Spark may put a traceback
into the message of another error (``foreachBatch``), and may print the errors that came before (``simplifiedTraceback``
switched off); of several, the one that was raised last counts.
"""

from __future__ import annotations

import re

from dstl.errors import DstlError, UserCodeError, clip

_TRACEBACK = "Traceback (most recent call last):\n"
_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception|"
    rf"During handling of the above exception, another exception occurred):\n\n(?={re.escape(_TRACEBACK)})"
)
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_OF_THE_JVM = re.compile(
    r"(?:terminated with exception: |java\.io\.IOException: )(?P<kind>dstl\.errors\.\w+): (?P<message>.*)", re.DOTALL
)
"""What a file of ``dstl://`` was refused for, in the words of the JVM that was refused."""
_IN_A_TASK = re.compile(
    r"\nCaused by: java\.io\.IOException: (?P<kind>dstl\.errors\.\w+): (?P<message>(?:(?!\n\tat ).)*)\n\tat dstl\.fs\.",
    re.DOTALL,
)
"""The same of a task's, in the stack that the JVM prints of it."""
_END = re.compile(r"\s*(?:\n SQLSTATE: |\n=== Streaming Query ===|\n\nJVM stacktrace:|\n\tat |\n\nDriver stacktrace:)")
"""Where Spark's own text goes on behind a traceback."""


def cause(error: BaseException) -> DstlError | None:
    """Return the error of DSTL that made a query, an action or a call of Spark's fail.

    Args:
        error: What was raised, such as the ``StreamingQueryException`` of ``awaitTermination()`` or of
            ``query.exception()``, a ``PythonException``, or a ``Py4JJavaError``.

    Returns:
        The error, of its class in :mod:`dstl.errors`, with its message; None if it is not one of DSTL's. An error that
        is DSTL's own, or was raised from one, is returned as the very object. Safe to call from any thread.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, DstlError):
            return link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return _in_text(str(error))


def reason(error: BaseException) -> str:
    """Return, for a message, what went wrong first: some 200 characters of a JVM, or the error and frames of Python."""
    words = _END.split(str(error).rpartition("\nCaused by: ")[2], maxsplit=1)[0].strip()
    at = words.find(_TRACEBACK)
    return clip(words) if at < 0 else f"{words[_behind_frames(words, at + len(_TRACEBACK)) :]}\n{words[at:]}"


def _in_text(text: str) -> DstlError | None:
    whole, end = text, _END.search(text, max(0, text.find(_TRACEBACK)))
    text = (text[: end.start()] if end else text).rstrip()
    kinds = _kinds()
    at = text.find(_TRACEBACK)
    found: DstlError | None = None
    while at >= 0:
        raised = _behind_frames(text, at + len(_TRACEBACK))
        chained = _CHAINED.search(text, raised)
        match = _RAISED.match(text[raised : chained.start() if chained else len(text)])
        kind = kinds.get(match["kind"]) if match else None
        if match is not None and kind is not None:
            if kind is UserCodeError:
                # Its message ends with the user's traceback, which may be a chain of its own.
                return kind(text[raised:].partition(": ")[2])
            found = kind(match["message"] or "")
            if chained is None:
                return found
        # What is quoted in a message of Spark's counts, and what is quoted in one of ours does not.
        at = chained.end() if chained and kind else text.find(_TRACEBACK, raised)
    told = (_OF_THE_JVM.search(text) if _TRACEBACK not in text else None) or _IN_A_TASK.search(whole)
    if found is None and told is not None and told["kind"] in kinds:
        return kinds[told["kind"]](told["message"])
    return found


def _behind_frames(text: str, at: int) -> int:
    """Return the start of the first line that is neither empty nor indented."""
    while at < len(text) and text[at].isspace():
        line_end = text.find("\n", at)
        at = line_end + 1 if line_end >= 0 else len(text)
    return at


def _kinds() -> dict[str, type[DstlError]]:
    """Return every loaded class by the name that tracebacks show; another module's as the one that it derives from."""
    kinds: dict[str, type[DstlError]] = {}
    pending: list[type[DstlError]] = [DstlError]
    while pending:
        kind = pending.pop()
        public = kind if kind.__module__ == DstlError.__module__ else kinds[_name(kind.__bases__[0])]
        kinds[_name(kind)] = public
        pending += kind.__subclasses__()
    return kinds


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
