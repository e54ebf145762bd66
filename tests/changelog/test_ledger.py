import pytest

from dstl.changelog.ledger import InlineSegment, LogLedger, Ownership
from dstl.changelog.log_segment import SegmentReferences
from dstl.changelog.throttle import ByteBudget
from dstl.errors import Closed, Invalid, Unavailable
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumberRange

FAILURE = Unavailable("503")


class Log:
    """A ledger of strings, where every change set counts ten bytes."""

    def __init__(self) -> None:
        self.references = SegmentReferences()
        self.budget = ByteBudget(1000)
        self.ledger: LogLedger[str] = LogLedger("log-a", self.references, self.budget)
        self.seals = 0

    def add(self, *changes: str) -> None:
        for each in changes:
            self.budget.take(10)
            self.ledger.add(each, 10)

    def seal(self, *, everything: bool = False) -> int:
        self.seals += 1
        self.ledger.seal(self.seals, [sqn for sqn, _ in self.ledger.unsealed(everything=everything)])
        return self.seals

    def store(self, seal: int, name: str, change_sets: int):
        self.references.track(name, change_sets)
        return self.ledger.stored(seal, SegmentHandle(name, 1, 0))

    def states(self) -> str:
        return "".join(
            (self.ledger.ownership(sqn) or Ownership.DURABLE).value[0] for sqn in range(self.ledger.next_sqn)
        )


@pytest.fixture
def log() -> Log:
    return Log()


def span(start: int, end: int) -> SequenceNumberRange:
    return SequenceNumberRange(start, end)


def test_a_change_set_goes_from_buffered_to_in_flight_to_durable(log: Log):
    log.add("x", "y")
    ticket = log.ledger.ask(0, inline=False)
    assert log.states() == "bb"
    seal = log.seal()
    assert log.states() == "ii"
    assert log.store(seal, "obj", 2) == [ticket]
    assert log.states() == "dd"
    assert [(s.range, s.location.name, s.nbytes) for s in ticket.result] == [(span(0, 2), "obj", 20)]


def test_bytes_are_kept_until_durable_and_counted_as_long(log: Log):
    log.add("x")
    log.ledger.ask(0, inline=False)
    seal = log.seal()
    assert dict(log.ledger.held()) == {0: "x"}
    assert log.budget.used == 10
    log.store(seal, "obj", 1)
    assert dict(log.ledger.held()) == {}
    assert log.budget.used == 0


def test_only_what_a_persist_covers_is_sealed_unless_everything_is_asked_for(log: Log):
    log.add("x", "y")
    log.ledger.ask(1, inline=False)
    assert log.ledger.unsealed() == [(1, 10)]
    assert log.ledger.unsealed(everything=True) == [(0, 10), (1, 10)]


def test_a_persist_of_nothing_is_settled_at_once(log: Log):
    log.add("x")
    assert log.ledger.ask(1, inline=False).result == ()


def test_an_overlapping_persist_reuses_what_is_durable_and_waits_for_what_is_not(log: Log):
    log.add("x")
    first = log.ledger.ask(0, inline=False)
    one = log.seal()
    log.add("y")
    second = log.ledger.ask(0, inline=False)
    assert log.ledger.unsealed() == [(1, 10)]
    two = log.seal()
    assert log.store(two, "obj-2", 1) == []
    assert log.store(one, "obj-1", 1) == [first, second]
    assert [s.location.name for s in second.result] == ["obj-1", "obj-2"]


def test_a_failed_seal_is_buffered_again_and_fails_the_persist_that_asked_for_it(log: Log):
    log.add("x")
    ticket = log.ledger.ask(0, inline=False)
    assert log.ledger.failed(log.seal(), FAILURE) == [ticket]
    assert ticket.error is FAILURE
    assert log.states() == "b"
    assert log.budget.used == 10


def test_a_persist_does_not_fail_with_an_upload_that_began_before_it_asked(log: Log):
    log.add("x")
    before = log.seal(everything=True)
    ticket = log.ledger.ask(0, inline=False)
    assert log.ledger.failed(before, FAILURE) == []
    assert log.ledger.unsealed() == [(0, 10)]
    own = log.seal()
    assert log.ledger.failed(own, FAILURE) == [ticket]


def test_truncated_in_flight_bytes_are_counted_until_the_upload_ends(log: Log):
    log.add("x")
    seal = log.seal(everything=True)
    log.ledger.truncate(1)
    assert not log.ledger.needs(seal)
    assert log.budget.used == 10
    log.store(seal, "obj", 1)
    assert log.budget.used == 0
    assert log.references.take_deletable() == ["obj"]


@pytest.mark.parametrize("end", ["confirm", "reset"])
def test_truncation_waits_for_the_checkpoint_that_references_the_range(log: Log, end: str):
    log.add("x")
    log.ledger.ask(0, inline=False)
    log.store(log.seal(), "obj", 1)
    log.ledger.truncate(1)
    assert log.references.take_deletable() == []
    if end == "confirm":
        log.ledger.confirm(span(0, 1), {})
        assert log.references.take_deletable() == []
    else:
        log.ledger.reset(span(0, 1))
        assert log.references.take_deletable() == ["obj"]
    assert len(log.references) == 0


@pytest.mark.parametrize("ends", [("confirm", "reset"), ("reset", "reset"), ("confirm", "confirm")])
def test_truncation_waits_for_both_of_two_checkpoints_that_reference_the_range(log: Log, ends: tuple[str, str]):
    log.add("x")
    for _ in range(2):
        log.ledger.ask(0, inline=False)
    log.store(log.seal(), "obj", 1)
    log.ledger.truncate(1)
    how = {"confirm": lambda: log.ledger.confirm(span(0, 1), {}), "reset": lambda: log.ledger.reset(span(0, 1))}
    for end in ends:
        assert log.ledger._entries.keys() == {0}
        assert log.references.take_deletable() == []
        how[end]()
    assert log.ledger._entries.keys() == set()
    assert log.references.take_deletable() == ([] if "confirm" in ends else ["obj"])


def test_a_persist_that_nobody_waits_for_is_abandoned_once(log: Log):
    log.add("x")
    ticket = log.ledger.ask(0, inline=False)
    assert log.ledger.waiting
    log.ledger.abandon(ticket, FAILURE)
    assert not log.ledger.waiting
    assert ticket.settled
    assert ticket.error is FAILURE
    log.ledger.abandon(ticket, Unavailable("again"))
    assert ticket.error is FAILURE


def test_an_append_is_told_its_number_and_what_is_in_flight_is_said(log: Log):
    log.budget.take(20)
    assert [log.ledger.add(each, 10) for each in "xy"] == [0, 1]
    log.ledger.ask(0, inline=False)
    seal = log.seal()
    assert log.ledger.in_flight == (seal,)
    log.ledger.truncate(1)
    assert log.ledger.ownership(0) is None
    log.store(seal, "obj", 2)
    assert log.ledger.in_flight == ()


def test_truncation_of_an_open_persists_range_leaves_it_its_bytes(log: Log):
    log.add("x")
    ticket = log.ledger.ask(0, inline=False)
    log.ledger.truncate(1)
    assert log.store(log.seal(), "obj", 1) == [ticket]
    assert ticket.result is not None


def test_confirmed_segments_are_never_released(log: Log):
    log.add("x")
    log.ledger.ask(0, inline=False)
    log.store(log.seal(), "obj", 1)
    log.ledger.confirm(span(0, 1), {})
    log.ledger.truncate(1)
    log.ledger.close(Closed("test"))
    assert log.references.take_deletable() == []
    assert len(log.references) == 0


def test_confirming_what_is_not_durable_is_refused_and_changes_nothing(log: Log):
    log.add("x", "y")
    log.ledger.ask(0, inline=False)
    seal = log.seal()
    with pytest.raises(Invalid, match="change set 0 is in flight"):
        log.ledger.confirm(span(0, 2), {})
    log.store(seal, "obj", 2)
    log.ledger.reset(span(0, 2))
    log.ledger.truncate(2)
    assert log.references.take_deletable() == ["obj"]


class TestInlined:
    INLINE = InlineSegment("seal-1", b"bytes", 0)
    PLACE = SegmentHandle("manifests/7", 5, 0, 100)

    def hand_out(self, log: Log):
        log.add("x")
        ticket = log.ledger.ask(0, inline=True)
        log.ledger.handed_out(log.seal(), self.INLINE)
        assert ticket.result[0].location is self.INLINE

    def test_is_still_ours_and_kept_but_no_reason_for_back_pressure(self, log: Log):
        self.hand_out(log)
        assert log.states() == "h"
        assert dict(log.ledger.held()) == {0: "x"}
        assert log.budget.used == 0

    def test_confirmed_is_durable_where_the_manifest_has_it(self, log: Log):
        self.hand_out(log)
        log.ledger.confirm(span(0, 1), {"seal-1": self.PLACE})
        assert log.states() == "d"
        assert log.ledger.ask(0, inline=False).result[0].location == self.PLACE

    def test_confirmed_without_a_place_is_refused(self, log: Log):
        self.hand_out(log)
        with pytest.raises(Invalid, match="handed out"):
            log.ledger.confirm(span(0, 1), {})

    def test_reset_is_buffered_and_counted_again(self, log: Log):
        self.hand_out(log)
        log.ledger.reset(span(0, 1))
        assert log.states() == "b"
        assert log.budget.used == 10
        assert log.ledger.buffered_bytes == 10

    def test_another_checkpoint_takes_the_same_seal_again(self, log: Log):
        self.hand_out(log)
        assert log.ledger.ask(0, inline=True).result[0].location is self.INLINE

    def test_a_persist_that_wants_an_object_uploads_it(self, log: Log):
        self.hand_out(log)
        ticket = log.ledger.ask(0, inline=False)
        assert ticket.result is None
        assert log.states() == "b"

    def test_confirmed_late_while_it_is_uploaded_again_settles_that_persist_and_drops_the_object(self, log: Log):
        self.hand_out(log)
        ticket = log.ledger.ask(0, inline=False)
        seal = log.seal()
        assert log.ledger.confirm(span(0, 1), {"seal-1": self.PLACE}) == [ticket]
        assert ticket.result[0].location == self.PLACE
        log.store(seal, "obj", 1)
        assert log.references.take_deletable() == ["obj"]
        assert log.budget.used == 0

    def test_confirming_the_inlined_copy_does_not_give_up_the_uploaded_one(self, log: Log):
        self.hand_out(log)
        log.ledger.ask(0, inline=False)
        log.store(log.seal(), "obj", 1)
        log.ledger.confirm(span(0, 1), {"seal-1": self.PLACE})
        log.ledger.reset(span(0, 1))
        log.ledger.truncate(1)
        assert log.references.take_deletable() == ["obj"]


class TestClose:
    def test_fails_open_persists_and_drops_everything(self, log: Log):
        log.add("x")
        ticket = log.ledger.ask(0, inline=False)
        assert log.ledger.close(Closed("test")) == [ticket]
        assert isinstance(ticket.error, Closed)
        assert log.budget.used == 0
        with pytest.raises(Closed):
            log.ledger.add("y", 10)
        with pytest.raises(Closed):
            log.ledger.ask(0, inline=False)

    def test_deletes_what_no_persist_has_returned(self, log: Log):
        log.add("x")
        log.store(log.seal(everything=True), "obj", 1)
        log.ledger.close(Closed("test"))
        assert log.references.take_deletable() == ["obj"]

    @pytest.mark.parametrize(("reset", "deleted"), [(False, []), (True, ["obj"])])
    def test_what_a_pending_checkpoint_may_reference_stays(self, log: Log, reset: bool, deleted: list[str]):
        log.add("x")
        log.ledger.ask(0, inline=False)
        log.store(log.seal(), "obj", 1)
        if reset:
            log.ledger.reset(span(0, 1))
        log.ledger.close(Closed("test"))
        assert log.references.take_deletable() == deleted
        assert len(log.references) == 0

    def test_an_upload_that_ends_after_it_leaves_nothing(self, log: Log):
        log.add("x")
        log.ledger.ask(0, inline=False)
        seal = log.seal()
        log.ledger.close(Closed("test"))
        assert log.store(seal, "obj", 1) == []
        assert log.references.take_deletable() == ["obj"]
        assert log.budget.used == 0


@pytest.mark.parametrize(("from_sqn", "message"), [(0, "were truncated up to 1"), (3, "not appended yet")])
def test_a_range_that_is_not_there_is_refused(log: Log, from_sqn: int, message: str):
    log.add("x", "y")
    log.ledger.truncate(1)
    with pytest.raises(Invalid, match=message):
        log.ledger.ask(from_sqn, inline=False)


def test_truncating_what_is_not_appended_is_refused(log: Log):
    with pytest.raises(Invalid, match="cannot truncate to 1"):
        log.ledger.truncate(1)


def test_an_object_of_several_logs_goes_with_the_last_of_them():
    references = SegmentReferences()
    references.track("obj", 3)
    references.release("obj")
    references.release("obj")
    assert references.take_deletable() == []
    references.release("obj")
    assert references.take_deletable() == ["obj"]
    assert references.take_deletable() == []


def test_an_object_of_which_a_checkpoint_has_a_part_is_never_deleted():
    references = SegmentReferences()
    references.track("obj", 2)
    references.give_up("obj")
    references.release("obj")
    assert references.take_deletable() == []
    assert len(references) == 0


def test_of_two_open_persists_the_earlier_start_and_the_later_end_decide_what_is_sealed(log: Log):
    log.add("x")
    log.ledger.ask(0, inline=False)
    log.add("y")
    assert log.ledger.unsealed() == [(0, 10)]
    assert log.ledger.unsealed(everything=True) == [(0, 10), (1, 10)]
    log.ledger.ask(1, inline=False)
    assert log.ledger.unsealed() == [(0, 10), (1, 10)]


def test_a_seal_is_needed_as_long_as_one_of_its_change_sets_is(log: Log):
    log.add("x", "y")
    seal = log.seal(everything=True)
    log.ledger.truncate(1)
    assert log.ledger.needs(seal)
    log.ledger.truncate(2)
    assert not log.ledger.needs(seal)


def test_a_persist_that_wants_a_part_of_a_seal_decides_how_it_is_stored_and_fails_with_it(log: Log):
    log.add("x", "y")
    ticket = log.ledger.ask(1, inline=True)
    seal = log.seal(everything=True)
    assert log.ledger.may_inline(seal)
    log.ledger.ask(1, inline=False)
    assert not log.ledger.may_inline(seal)
    assert log.ledger.failed(seal, FAILURE) == [ticket]


def test_what_is_truncated_goes_with_the_failure_of_the_last_persist_that_wants_it(log: Log):
    log.add("x")
    first = log.ledger.ask(0, inline=False)
    seal = log.seal()
    second = log.ledger.ask(0, inline=False)
    log.ledger.truncate(1)
    assert log.ledger.failed(seal, FAILURE) == [first]
    assert dict(log.ledger.held()) == {0: "x"}
    assert log.ledger.failed(log.seal(), FAILURE) == [second]
    assert dict(log.ledger.held()) == {}
    assert log.budget.used == 0


def test_a_change_set_that_two_checkpoints_confirm_is_given_up_once(log: Log):
    log.add("x", "y")
    for _ in range(2):
        log.ledger.ask(0, inline=False)
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
    log.ledger.ask(0, inline=False)
    assert log.ledger.buffered_bytes == 10
    log.ledger.confirm(span(0, 1), {"seal-1": TestInlined.PLACE})
    assert (log.ledger.buffered_bytes, log.budget.used) == (0, 0)
    assert log.ledger.unsealed(everything=True) == []
