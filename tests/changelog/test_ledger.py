import pytest

from dstl.changelog.ledger import InlineSegment, LogLedger, Ownership
from dstl.changelog.log_segment import SegmentReferences
from dstl.changelog.throttle import ByteBudget
from dstl.errors import Invalid
from dstl.metrics import NullRecorder
from dstl.runtime import SystemClock
from handles.segment_handle import SegmentHandle, SequenceNumberRange


class Log:
    """A ledger of strings, where every change set counts ten bytes."""

    def __init__(self) -> None:
        self.references = SegmentReferences()
        self.budget = ByteBudget(1000, SystemClock(), NullRecorder(), lambda: None)
        self.ledger: LogLedger[str] = LogLedger("log-a", self.references, self.budget)
        self.seals = 0

    def add(self, *changes: str) -> None:
        for each in changes:
            self.budget.take(10)
            self.ledger.add(each, 10)

    def seal(self, wanted: SequenceNumberRange | None = None) -> int:
        self.seals += 1
        self.ledger.seal(self.seals, [sqn for sqn, _ in self.ledger.buffered(wanted)])
        return self.seals

    def store(self, seal: int, name: str, change_sets: int) -> None:
        self.references.track(name, change_sets)
        self.ledger.stored(seal, SegmentHandle(name, 1, 0))

    def held(self) -> dict[int, str]:
        """Return what is not durable: nothing else keeps its bytes."""
        return {sqn: entry.changes for sqn, entry in self.ledger._entries.items() if entry.changes is not None}

    def states(self) -> str:
        return "".join(
            (self.ledger.ownership(sqn) or Ownership.DURABLE).value[0] for sqn in range(self.ledger.next_sqn)
        )


@pytest.fixture
def log() -> Log:
    return Log()


def span(start: int, end: int) -> SequenceNumberRange:
    return SequenceNumberRange(start, end)


@pytest.mark.parametrize("ends", [("confirm", "reset"), ("reset", "reset"), ("confirm", "confirm")])
def test_truncation_waits_for_both_of_two_checkpoints_that_reference_the_range(log: Log, ends: tuple[str, str]):
    log.add("x")
    for _ in range(2):
        log.ledger.claim(0)
    log.store(log.seal(), "obj", 1)
    log.ledger.truncate(1)
    how = {"confirm": lambda: log.ledger.confirm(span(0, 1), {}), "reset": lambda: log.ledger.reset(span(0, 1))}
    for end in ends:
        assert log.ledger._entries.keys() == {0}
        assert log.references.take_deletable() == []
        how[end]()
    assert log.ledger._entries.keys() == set()
    assert log.references.take_deletable() == ([] if "confirm" in ends else ["obj"])


def test_an_append_is_told_its_number_and_what_is_in_flight_is_said(log: Log):
    log.budget.take(20)
    assert [log.ledger.add(each, 10) for each in "xy"] == [0, 1]
    assert [log.ledger.find(sqn) for sqn in (0, 1)] == ["x", "y"]
    seal = log.seal()
    assert log.ledger.in_flight(span(0, 2)) == {seal}
    log.ledger.truncate(1)
    assert log.ledger.ownership(0) is None
    log.store(seal, "obj", 2)
    assert log.ledger.in_flight(span(0, 2)) == set()
    assert log.ledger.find(1) == SegmentHandle("obj", 1, 0)


def test_a_persist_that_failed_takes_nothing_from_the_next_one_of_its_range(log: Log):
    log.add("x")
    log.ledger.withdraw(log.ledger.claim(0))
    wanted = log.ledger.claim(0)
    log.store(log.seal(), "obj", 1)
    log.ledger.segments(wanted)
    log.ledger.close()
    assert log.references.take_deletable() == [], "a pending checkpoint may reference it"


def test_what_an_open_persist_has_claimed_goes_with_the_log_when_that_closes(log: Log):
    log.add("x")
    log.ledger.claim(0)
    log.store(log.seal(), "obj", 1)
    log.ledger.close()
    assert log.references.take_deletable() == ["obj"], "no checkpoint was told of it"


class TestInlined:
    INLINE = InlineSegment("seal-1", b"bytes", 0)
    PLACE = SegmentHandle("manifests/7", 5, 0, 100)

    def hand_out(self, log: Log):
        log.add("x")
        wanted = log.ledger.claim(0)
        log.ledger.handed_out(log.seal(), self.INLINE)
        assert log.ledger.segments(wanted)[0].location is self.INLINE

    def test_of_a_persist_that_nobody_waits_for_any_more_is_buffered_and_counted(self, log: Log):
        log.add("x")
        wanted = log.ledger.claim(0)
        seal = log.seal()
        log.ledger.reset(wanted)
        log.ledger.handed_out(seal, self.INLINE)
        assert log.states() == "b"
        assert log.budget.used == 10

    def test_reset_is_buffered_and_counted_again(self, log: Log):
        self.hand_out(log)
        log.ledger.reset(span(0, 1))
        assert log.states() == "b"
        assert log.budget.used == 10
        assert log.ledger.buffered_bytes == 10


@pytest.mark.parametrize(("from_sqn", "message"), [(0, "were truncated up to 1"), (3, "not appended yet")])
def test_a_range_that_is_not_there_is_refused(log: Log, from_sqn: int, message: str):
    log.add("x", "y")
    log.ledger.truncate(1)
    with pytest.raises(Invalid, match=message):
        log.ledger.claim(from_sqn)


def test_truncating_what_is_not_appended_is_refused(log: Log):
    with pytest.raises(Invalid, match="cannot truncate to 1"):
        log.ledger.truncate(1)


def test_a_seal_is_needed_as_long_as_one_of_its_change_sets_is(log: Log):
    log.add("x", "y")
    seal = log.seal()
    log.ledger.truncate(1)
    assert log.ledger.needs(seal)
    log.ledger.truncate(2)
    assert not log.ledger.needs(seal)


def test_a_change_set_that_two_checkpoints_confirm_is_given_up_once(log: Log):
    log.add("x", "y")
    for _ in range(2):
        log.ledger.claim(0)
    log.store(log.seal(), "obj", 2)
    log.ledger.confirm(span(0, 1), {})
    log.ledger.confirm(span(0, 1), {})
    log.ledger.truncate(1)
    assert len(log.references) == 1, "the object's other change set has not ended"
    log.ledger.confirm(span(1, 2), {})
    assert len(log.references) == 0
    assert log.references.take_deletable() == []


def test_a_manifests_change_set_is_not_buffered_any_more(log: Log):
    TestInlined().hand_out(log)
    log.ledger.take_back(log.ledger.claim(0))
    assert log.ledger.buffered_bytes == 10
    log.ledger.confirm(span(0, 1), {"seal-1": TestInlined.PLACE})
    assert (log.ledger.buffered_bytes, log.budget.used) == (0, 0)
    assert log.ledger.buffered() == []
