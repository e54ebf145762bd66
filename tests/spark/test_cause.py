"""The typed error is found in Spark's text of it, and nothing else is taken for one."""

import traceback

import pytest
from pyspark.errors import StreamingQueryException

from dstl.errors import (
    CheckpointDeclined,
    DstlError,
    Fenced,
    Invalid,
    MissingState,
    TaskManagerLost,
    Unavailable,
    UserCodeError,
)
from dstl.spark.cause import cause
from dstl.state.processor_errors import user_code_error

BEHIND = """
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 1355f8c8-ab0f-4838-8c4e-bb889bebf33e, runId = 4c369687-319c-4998-b0aa-01f7220dd5e7]
Current State: ACTIVE

Logical Plan:
WriteToMicroBatchDataSource noop-table
"""


def text_of(error: BaseException, *, chain: bool) -> str:
    """Return the traceback of a raised error, as a Python worker sends it."""
    try:
        raise error
    except BaseException as raised:
        return "".join(traceback.format_exception(raised, chain=chain)).rstrip()


def stopped(text: str) -> StreamingQueryException:
    return StreamingQueryException(
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_EXCEPTION] An exception was "
        f"thrown from the Python worker: {text}{BEHIND}"
    )


def chained(error: DstlError, before: Exception, *, implicitly: bool = False) -> DstlError:
    if implicitly:
        error.__context__ = before
    else:
        error.__cause__ = before
    return error


@pytest.mark.parametrize("chain", [True, False])
def test_a_task_s_error_is_found_with_its_class_and_its_whole_message(chain: bool) -> None:
    message = 'the checkpoint of batch 3 failed: disk full\nsecond line\n  File "x"\n\nmore'
    raised = chained(CheckpointDeclined(message), Unavailable("inner"))
    found = cause(stopped(text_of(raised, chain=chain)))
    assert type(found) is CheckpointDeclined
    assert str(found) == message


@pytest.mark.parametrize("implicitly", [True, False])
def test_of_chained_errors_the_last_one_counts(implicitly: bool) -> None:
    raised = chained(Unavailable("the last"), chained(Fenced("the one before"), KeyError(1)), implicitly=implicitly)
    found = cause(stopped(text_of(raised, chain=True)))
    assert (type(found), str(found)) == (Unavailable, "the last")


def test_an_error_inside_foreach_batch_is_found_in_the_message_of_spark_s() -> None:
    inner = "An exception was thrown from the Python worker:\n" + text_of(MissingState("gone"), chain=False)
    outer = 'Traceback (most recent call last):\n  File "x.py", line 1, in batch\n    df.collect()\n'
    found = cause(stopped(outer + "pyspark.errors.exceptions.captured.PythonException: " + inner))
    assert (type(found), str(found)) == (MissingState, "gone")


def test_what_a_message_quotes_is_not_an_error_of_ours() -> None:
    assert cause(stopped(text_of(ValueError("dstl.errors.Fenced: planted"), chain=False))) is None
    found = cause(stopped(text_of(CheckpointDeclined("failed: dstl.errors.Invalid: planted"), chain=False)))
    assert type(found) is CheckpointDeclined


def test_the_user_s_own_traceback_is_part_of_the_error_in_user_code() -> None:
    def processor() -> None:
        try:
            raise KeyError(1)
        except KeyError:
            raise Invalid("dstl.errors.Fenced: no such field") from None

    try:
        processor()
    except Invalid as raised:
        raised.__cause__ = ValueError("before")
        error = user_code_error(raised, object(), "op", ("a",))
    found = cause(stopped(text_of(error, chain=True)))
    assert type(found) is UserCodeError
    assert str(found) == str(error)


def test_a_py4j_error_has_the_jvm_s_frames_behind_it() -> None:
    text = (
        "An error occurred while calling o52.collectToPython.\n: org.apache.spark.SparkException: Job aborted: "
        f"org.apache.spark.api.python.PythonException: {text_of(Unavailable('away'), chain=False)}\n\n"
        "\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:601)\n"
    )
    found = cause(RuntimeError(text))
    assert (type(found), str(found)) == (Unavailable, "away")


def test_what_a_commit_was_refused_for_is_read_from_the_jvm_s_words() -> None:
    text = (
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: dstl.errors.TaskManagerLost: a host is "
        "gone: restart the query SQLSTATE: XXKST\n=== Streaming Query ===\nIdentifier: x"
    )
    found = cause(RuntimeError(text))
    assert type(found) is TaskManagerLost
    assert str(found).startswith("a host is gone: restart the query")
    text = (
        "An error occurred while calling o9.start.\n: java.io.IOException: dstl.errors.Invalid: another query\n\tat x"
    )
    assert isinstance(cause(RuntimeError(text)), Invalid)
    # A user's own words are not ours.
    assert cause(RuntimeError("RuntimeError: dstl.errors.Invalid: quoted")) is None


IN_A_TASK = """org.apache.spark.SparkException: [CANNOT_WRITE_STATE_STORE.CANNOT_COMMIT] Error. SQLSTATE: 58030
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.failedToCommitStateFileError(QueryExecutionErrors.scala:2186)
\tat org.apache.spark.scheduler.Task.run(Task.scala:147)
Caused by: java.io.IOException: dstl.errors.Unavailable: /state/_dstl did not take record 29 in 20 attempts: disk full
\tat dstl.fs.Connection.raised(Connection.java:198)
\t... 30 more
"""


@pytest.mark.parametrize(
    "text",
    [
        f"[STREAM_FAILED] terminated with exception: Job aborted due to stage failure: Lost task 1.0: {IN_A_TASK}",
        "[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred. Return Message: Traceback (most recent call last):\n"
        '  File "job.py", line 16, in each\n    batch.collect()\n'
        f"py4j.protocol.Py4JJavaError: An error occurred while calling o205.collectToPython.\n: {IN_A_TASK}",
    ],
)
def test_what_a_task_s_file_was_refused_for_is_found_in_the_jvm_s_stack(text: str) -> None:
    found = cause(RuntimeError(text + BEHIND))
    assert type(found) is Unavailable
    assert str(found) == "/state/_dstl did not take record 29 in 20 attempts: disk full"
    assert cause(RuntimeError(text.replace("\tat dstl.fs.", "\tat user."))) is None


def test_an_error_that_is_at_hand_is_returned_itself() -> None:
    error = MissingState("gone")
    assert cause(error) is error
    with pytest.raises(RuntimeError) as wrapped:
        raise RuntimeError("wrapped") from error
    assert cause(wrapped.value) is error


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):", "SparkException: executor lost"])
def test_other_errors_have_no_cause_of_ours(text: str) -> None:
    assert cause(RuntimeError(text)) is None
