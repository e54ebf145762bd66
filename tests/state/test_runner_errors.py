"""Errors of the user's code, of wrong use and of what lies below are told apart, and name what they are about."""

import pytest
from pyspark.sql import Row

from dstl.errors import StateTooLarge, Unavailable, UserCodeError
from worlds.memory_source import MemorySource
from worlds.runner import Counter, Job, Script, Seen, batches_of


@pytest.mark.parametrize("where", ["handleInputRows", "handleExpiredTimer"])
def test_an_error_in_user_code_carries_its_traceback_key_and_operator(where):
    class Breaks(Seen):
        def handleInputRows(self, key, rows, timerValues):
            self.handle.registerTimer(1)
            yield Row(k="x", what="", n=1)
            if where == "handleInputRows":
                self.explode()

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            self.explode()
            yield

        def explode(self):
            raise RuntimeError("the user's own words")

    job = Job(Breaks, time_mode="processingTime")
    with pytest.raises(UserCodeError) as caught:
        job.run(batches_of([{"k": "a", "op": "", "n": 0}], 5), now=5)
    message = str(caught.value)
    for part in (
        "Breaks",
        "operator 'op'",
        "for key ('a',)" if where == "handleInputRows" else "for key Row(k='a')",
        "RuntimeError",
        "the user's own words",
        "in explode",
        f"in {where}",
        "test_runner_errors.py",
    ):
        assert part in message
    assert 'processor_runner.py", line' not in message.replace('test_runner_errors.py", line', "")
    assert job.parts == [], "nothing is sent after an error"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda self: self.n.update(("x",)), "column 'n' of state 'n'"),
        (lambda self: self.n.update((1, 2)), "takes 1"),
        (lambda self: self.handle.registerTimer(5), "time mode"),
        (lambda self: self.handle.listTimers(), "time mode"),
        (lambda self: self.handle.getValueState("late", "n int"), "'late' is declared after init"),
        (lambda self: self.handle.deleteIfExists("n"), "after init"),
        (lambda self: self.handle.getValueState("n", "n long"), "after init"),
        (lambda self: self.never_declared.get(), "never_declared"),
        (lambda self: None, "NoneType"),
    ],
)
def test_wrong_use_is_told_with_key_and_operator(use, message):
    class Wrong(Seen):
        def handleInputRows(self, key, rows, timerValues):
            return use(self)

    with pytest.raises(UserCodeError, match="operator 'op'") as caught:
        Job(Wrong).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda h: h.getValueState("x", "n int", 1000), "time mode processingTime"),
        (lambda h: h.getValueState("$x", "n int"), "begin with"),
        (lambda h: h.getValueState("x", "n frob"), "schema of state .x. cannot be used"),
        (lambda h: h.getValueState("x", "n int").get(), "no grouping key"),
        (lambda h: h.getListState("x", "n int").appendValue((1,)), "no grouping key"),
        (lambda h: h.getMapState("x", "u int", "n int").getValue((1,)), "no grouping key"),
        (lambda h: (h.getValueState("x", "n int"), h.getListState("x", "n int")), "declared as list"),
    ],
)
def test_wrong_use_in_init(declare, message):
    class Wrong(Seen):
        def init(self, handle):
            declare(handle)

    with pytest.raises(UserCodeError, match=message):
        Job(Wrong).run([])


def test_a_time_to_live_must_be_positive():
    class Wrong(Seen):
        def init(self, handle):
            handle.getValueState("x", "n int", -5)

    with pytest.raises(UserCodeError, match="above 0"):
        Job(Wrong, time_mode="processingTime").run([])


def test_an_oversized_value_is_refused(monkeypatch):
    monkeypatch.setattr("dstl.state.handle.MAX_VALUE_BYTES", 500)

    class Large(Seen):
        def init(self, handle):
            self.n = handle.getValueState("big", "s string")

        def handleInputRows(self, key, rows, timerValues):
            self.n.update(("x" * 1000,))
            return iter(())

    with pytest.raises(UserCodeError, match=r"'big' has 10.. bytes, above the limit of 500"):
        Job(Large).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))


@pytest.mark.parametrize("error", [Unavailable("nobody answers"), StateTooLarge("it would outgrow the memory")])
def test_trouble_of_a_task_manager_is_not_blamed_on_the_user(error):
    class Gone(MemorySource):
        def fetch_entries(self, *given):
            raise error

    with pytest.raises(type(error), match=str(error)):
        Job(Script).run(batches_of([{"k": "a", "op": "look", "n": 0}], 5), source=Gone())


def test_an_error_of_the_input_passes_as_it_is_even_inside_user_code():
    def stream():
        yield batches_of([{"k": "a", "op": "", "n": 0}], 5)[0]
        raise OSError("the task was killed")

    with pytest.raises(OSError, match="the task was killed"):
        Job(Counter).run(stream())
