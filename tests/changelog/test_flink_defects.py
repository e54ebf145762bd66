"""Flink's known defects of its changelog, each as a test that it cannot happen here.

Sources: the FLINK issues named below; defects read in Flink's ``flink-dstl`` that have no issue are named after the
class (section 2.6 of our reference notes); peers' bugs by their project's issue.
"""

import asyncio

import pytest

from dstl.changelog.ledger import Ownership
from dstl.changelog.segment.decoder import decode_segment
from dstl.changelog.storage import StateChangelogStorage
from dstl.errors import Closed, Unavailable
from dstl.options import UploadOptions
from worlds.changelog import put, turn, virtual, world


@virtual
async def test_a_failed_upload_does_not_poison_later_checkpoints():
    """``FsStateChangelogWriter.highestFailed``: every checkpoint fails until the next materialization."""
    async with world() as w:
        writer, future = await w.uploading()
        w.store.held[0].fail()
        with pytest.raises(Unavailable):
            await future
        w.store.holding = False
        put(writer, b"y")
        assert await w.read("log-a", await writer.persist(0)) == [b"x", b"y"]


@virtual
async def test_a_failed_segment_fails_only_those_who_are_in_it():
    """One file per (TaskManager, job) batch fails all tasks; another segment's persists are not touched."""
    async with world(persist_delay_s=0) as w:
        w.store.holding = True
        one, two = w.writer("log-a"), w.writer("log-b")
        put(one, b"x")
        first = one.persist(0)
        await turn()
        put(two, b"y")
        second = two.persist(0)
        await turn()
        failing, storing = list(w.store.held)
        failing.fail()
        storing.succeed()
        with pytest.raises(Unavailable):
            await first
        assert await w.read("log-b", await second) == [b"y"]


@virtual
async def test_a_retry_after_an_error_rescues_the_upload():
    """``AbstractStateChangeFsUploader.uploadInternal`` fails the tasks before it lets the executor retry."""
    async with world(upload=UploadOptions(max_attempts=3)) as w:
        _, future = await w.uploading()
        w.store.held[0].fail()
        await turn(1)
        assert not future.done()
        w.store.held[0].succeed()
        (segment,) = await future
        assert await w.store.names() == {segment.location.name}


@virtual
async def test_an_error_at_the_end_of_an_upload_is_not_a_success():
    """``OutputStreamWithPos.close`` swallows the error after the result was built: acknowledged, but not there."""
    async with world() as w:
        writer, future = await w.uploading()
        assert not future.done(), "reported before the store confirmed it"
        w.store.held[0].fail()
        with pytest.raises(Unavailable):
            await future
        assert w.recorder.counters["numberOfUploadFailures"] == 1
        assert writer.ledger.ownership(0) is Ownership.BUFFERED


@virtual
async def test_flink_26396_a_last_attempt_without_an_answer_fails_the_persist_and_keeps_the_bytes():
    async with world(upload=UploadOptions(max_attempts=2, attempt_timeout_s=1, delete_grace_s=0)) as w:
        w.store.holding = True
        writer = w.writer()
        put(writer, b"x")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(writer.persist(0), 60)
        w.store.holding = False
        assert await w.read("log-a", await writer.persist(0)) == [b"x"]


@virtual
async def test_a_writer_closed_during_an_upload_leaves_the_others_their_segment():
    """``handleUploadSuccess`` of a closed writer discards the file, past the count of the other writers in it."""
    async with world() as w:
        w.store.holding = True
        one, two = w.writer("log-a"), w.writer("log-b")
        put(one, b"x")
        put(two, b"y")
        closed, kept = one.persist(0), two.persist(0)
        await turn()
        one.close()
        with pytest.raises(Closed):
            await closed
        w.store.held[0].succeed()
        segments = await kept
        await turn()
        assert await w.read("log-b", segments) == [b"y"]
        two.reset(0, 1)
        two.truncate_and_close(0)
        await turn()
        assert await w.store.names() == set()


@virtual
async def test_an_unexpected_error_does_not_break_the_storage_for_ever():
    """``BatchingStateChangeUploadScheduler.errorUnsafe``: once set, all uploads of the job on this host fail."""
    async with world() as w:
        writer, future = await w.uploading()
        w.store.held[0].fail(RuntimeError("a bug"))
        with pytest.raises(RuntimeError):
            await future
        w.store.holding = False
        assert await w.read("log-a", await writer.persist(0)) == [b"x"]


@virtual
async def test_flink_30729_an_append_after_close_is_refused_and_not_dropped():
    async with world() as w:
        writer = w.writer()
        writer.close()
        with pytest.raises(Closed):
            put(writer, b"x")


@virtual
async def test_close_settles_futures():
    """``FsStateChangelogWriter.close`` leaves pending futures open for ever."""
    async with world() as w:
        writer, future = await w.uploading()
        writer.close()
        assert future.done()


@virtual
async def test_flink_30792_a_preemptive_upload_counts_closed_change_sets_too():
    async with world(preemptive_persist_threshold=1000) as w:
        writer = w.writer()
        for _ in range(9):
            put(writer, b"x" * 94)
            writer.next_sequence_number()
        await turn(1)
        assert w.store.started == 0
        put(writer, b"x" * 94)
        await turn(1)
        assert w.store.started == 1
        assert w.storage.budget.used == 0


@virtual
async def test_a_seal_does_not_wait_once_all_writers_with_data_have_asked():
    """The FLIP promises it; ``BatchingStateChangeUploadScheduler`` always waits for delay or size."""
    async with world(persist_delay_s=60) as w:
        one, two = w.writer("log-a"), w.writer("log-b")
        w.writer("idle")
        put(one, b"x")
        put(two, b"y")
        first = one.persist(0)
        await turn()
        assert w.store.started == 0
        await asyncio.gather(first, two.persist(0))
        assert asyncio.get_running_loop().time() == 0.0
        assert w.store.started == 1


@virtual
async def test_flink_15371_a_threshold_crossed_while_the_timer_runs_is_not_a_lost_wake_up():
    """Asks keep coming while the delay's timer fires and while a seal is on its way: all are stored."""
    async with world(persist_delay_s=0.010, persist_size_threshold=500) as w:
        writers = [w.writer(f"log-{n}") for n in range(30)]
        put(w.writer("never asks"), b"x")
        futures = []
        for n, each in enumerate(writers):
            put(each, b"x" * (90 if n % 3 else 490))
            futures.append(each.persist(0))
            await asyncio.sleep(0.0033)
        await asyncio.wait_for(asyncio.gather(*futures), 0.05)


@virtual
async def test_an_earlier_deadline_wakes_a_timer_that_sleeps_on_a_later_one():
    """A persist is asked for while the timer waits out the pause after a failed pre-emptive upload."""
    async with world(preemptive_persist_threshold=100) as w:
        w.store.holding = True
        big, small = w.writer("log-a"), w.writer("log-b")
        put(big, b"x" * 100)
        for _ in range(6):
            await turn(7)
            for held in list(w.store.held):
                held.fail()
        await turn()
        w.store.holding = False
        started = asyncio.get_running_loop().time()
        put(small, b"y")
        await small.persist(0)
        assert asyncio.get_running_loop().time() - started <= 0.011


@virtual
async def test_automq_3485_appends_that_wait_get_in_after_an_upload_failed():
    """Capacity that a failed upload never gives back is a deadlock."""
    async with world(byte_budget=100, preemptive_persist_threshold=50) as w:
        w.store.holding = True
        writer = w.writer()
        put(writer, b"x" * 94)
        task = asyncio.create_task(w.append(writer, 50))
        await turn(0.1)
        w.store.held[0].fail()
        w.store.holding = False
        await asyncio.wait_for(task, 1)
        assert await w.read("log-a", await writer.persist(0)) == [b"x" * 94, b"y" * 44]


@virtual
async def test_flink_26592_appending_from_an_uploads_completion_does_not_deadlock():
    async with world(byte_budget=100) as w:
        w.store.holding = True
        writer = w.writer()
        put(writer, b"x" * 94)
        future = writer.persist(0)

        async def append_on_completion() -> None:
            await future
            await w.append(writer, 90)
            await writer.persist(1)

        tasks = [asyncio.create_task(append_on_completion()), asyncio.create_task(w.append(writer, 90))]
        await turn(1)
        w.store.holding = False
        w.store.held[0].succeed()
        await asyncio.wait_for(asyncio.gather(*tasks), 1)


@virtual
async def test_flink_31139_a_persist_of_nothing_writes_no_object():
    """Materialize#12225: 41,000 objects in a night, mostly of empty batches."""
    async with world(inline_threshold=0) as w:
        writers = [w.writer(f"log-{n}") for n in range(5)]
        for _ in range(10):
            for each in writers:
                assert await each.persist(each.next_sequence_number()) == ()
            await w.storage.persist_all([(each, each.next_sequence_number()) for each in writers])
        put(writers[0], b"x")
        await writers[0].persist(0)
        await writers[0].persist(0)
        await writers[0].persist(1)
        assert w.store.started == 1


@virtual
async def test_flink_28440_truncation_waits_for_a_checkpoint_that_references_the_segment():
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        segments = await writer.persist(0)
        put(writer, b"y")
        writer.truncate(writer.next_sequence_number())
        await turn()
        assert await w.read("log-a", segments) == [b"x"]
        writer.confirm(0, 1)
        await turn()
        assert await w.read("log-a", segments) == [b"x"]


@virtual
async def test_flink_28440_a_segment_is_counted_by_change_sets_and_not_by_logs():
    async with world() as w:
        one, two = w.writer("log-a"), w.writer("log-b")
        for each in (one, two):
            for value in (b"x", b"y"):
                put(each, value)
                each.next_sequence_number()
        await w.storage.persist_all([(one, 0), (two, 0)], allow_inline=False)
        for each in (one, two):
            each.reset(0, 2)
        one.truncate(1)
        two.truncate(2)
        await turn()
        assert len(await w.store.names()) == 1
        one.truncate(2)
        await turn()
        assert await w.store.names() == set()


@virtual
async def test_flink_25492_25987_what_is_appended_at_the_materialization_boundary_is_kept():
    async with world() as w:
        writer = w.writer()
        put(writer, b"materialized")
        boundary = writer.next_sequence_number()
        put(writer, b"after it")
        writer.truncate(boundary)
        assert await w.read("log-a", await writer.persist(boundary)) == [b"after it"]


@virtual
async def test_flink_25524_a_confirmed_segment_is_the_coordinators_whatever_happens_to_its_log():
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        segments = await writer.persist(0)
        writer.confirm(0, 1)
        writer.reset(0, 1)
        writer.truncate(1)
        writer.truncate_and_close(0)
        await w.storage.close()
        assert await w.read("log-a", segments) == [b"x"]


@virtual
async def test_a_log_closed_while_a_checkpoints_outcome_is_unknown_keeps_its_segments():
    """Materialize#14101, slatedb#564: the commit's response is lost, and what it references is deleted."""
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        result = await w.storage.persist_all([(writer, 0)], allow_inline=False)
        writer.truncate_and_close(0)
        await w.storage.close()
        assert await w.read("log-a", result.segments["log-a"]) == [b"x"]


@virtual
async def test_flink_25261_truncated_changes_are_gone_from_memory_and_from_the_store():
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        await writer.persist(0)
        writer.reset(0, 1)
        put(writer, b"y")
        writer.truncate(writer.next_sequence_number())
        await turn()
        assert await w.store.names() == set()
        assert w.storage.budget.used == 0
        assert await writer.persist(2) == ()


@virtual
async def test_an_upload_that_ends_after_its_range_was_truncated_is_deleted():
    async with world(preemptive_persist_threshold=10) as w:
        w.store.holding = True
        one, two = w.writer("log-a"), w.writer("log-b")
        put(one, b"x" * 20)
        put(two, b"y" * 20)
        await turn(1)
        one.truncate(1)
        two.truncate(1)
        for held in list(w.store.held):
            held.succeed()
        await turn(1)
        assert await w.store.names() == set()


@virtual
async def test_an_aborted_checkpoint_deletes_nothing_that_later_ones_reference():
    """``LocalChangelogRegistry`` deletes everything up to the aborted checkpoint."""
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        first = await writer.persist(0)
        put(writer, b"y")
        second = await writer.persist(0)
        writer.reset(0, 1)
        await turn()
        assert await w.read("log-a", second) == [b"x", b"y"]
        assert second[0] == first[0], "what is durable is reused"
        assert w.store.started == 2


@virtual
async def test_a_change_is_uploaded_once_however_many_checkpoints_want_it():
    """``testNoReUploadBeforeCompletion``."""
    async with world() as w:
        w.store.holding = True
        writer = w.writer()
        put(writer, b"x")
        futures = []
        for _ in range(5):
            futures.append(writer.persist(0))
            await turn(0.1)
        assert w.store.started == 1
        w.store.held[0].succeed()
        assert len(set(await asyncio.gather(*futures))) == 1


@virtual
async def test_flink_28602_25429_closing_twice_is_closing_once():
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        writer.close()
        writer.truncate_and_close(0)
        await w.storage.close()
        await w.storage.close()
        assert w.storage.budget.used == 0


@virtual
async def test_a_handle_grows_by_segments_and_not_by_change_sets():
    """Flink repeats the path for each change set: tens of MB of metadata per checkpoint at 500 subtasks."""
    async with world() as w:
        writer = w.writer()
        for n in range(50):
            put(writer, b"%d" % n)
            writer.next_sequence_number()
        assert len(await writer.persist(0)) == 1


@virtual
async def test_the_size_of_a_checkpoint_counts_all_its_segments():
    """The incremental size counts only the last upload that completed."""
    async with world(preemptive_persist_threshold=1000) as w:
        writer = w.writer()
        put(writer, b"x" * 1000)
        await turn(1)
        put(writer, b"y" * 94)
        segments = await writer.persist(0)
        assert sum(segment.nbytes for segment in segments) == 1006 + 100


@virtual
async def test_the_queue_gauge_follows_the_queue():
    """The gauge locks another monitor than the queue."""
    async with world() as w:
        put(w.writer("never asks"), b"x")
        writer = w.writer()
        put(writer, b"x")
        future = writer.persist(0)
        await turn()
        assert w.recorder.gauges["uploadQueueSize"] == 1
        await future
        await turn()
        assert w.recorder.gauges["uploadQueueSize"] == 0


@virtual
async def test_back_pressure_has_a_metric_of_its_own():
    """``changelogBusyTimeMsPerSecond``: Flink shows it as a busy task."""
    async with world(byte_budget=10) as w:
        w.store.holding = True
        writer = w.writer()
        put(writer, b"x" * 20)
        task = asyncio.create_task(w.reserve(10))
        await turn(2)
        w.store.held[0].succeed()
        await task
        assert w.recorder.counters["backpressureSeconds"] == pytest.approx(2, abs=0.1)


@virtual
async def test_a_segment_says_which_changes_of_which_log_it_holds():
    """Flink's file has neither log id nor sequence numbers: nobody can tell what an orphan was."""
    async with world() as w:
        one, two = w.writer("log-a"), w.writer("log-b")
        put(one, b"x")
        one.next_sequence_number()
        put(one, b"y")
        put(two, b"z")
        result = await w.storage.persist_all([(one, 0), (two, 0)], allow_inline=False)
        data = await w.bytes_of(result.segments["log-a"][0].location)
        found = {(log_id, sqn) for log_id, sqn, _, _ in decode_segment(data, "test")}
        assert found == {("log-a", 0), ("log-a", 1), ("log-b", 0)}


@virtual
async def test_a_name_is_never_used_twice_so_that_a_late_put_resurrects_nothing():
    """Also apache/spark#55328: the same batch run by two attempts. AutoMQ: a late PUT after the deletion."""
    async with world(upload=UploadOptions(max_attempts=3, delete_grace_s=0)) as w:
        again = StateChangelogStorage(
            uploader=w.uploader, store=w.store, names=w.names, options=w.options, runtime=w.runtime
        )
        w.store.holding = True
        seen: list[str] = []
        for storage in (w.storage, again):
            writer = storage.create_writer("log-a")
            put(writer, b"x")
            future = writer.persist(0)
            for _ in range(3):
                await turn(10)
                seen.append(w.store.held[0].name)
                w.store.held[0].fail()
            with pytest.raises(Unavailable):
                await future
        assert len(set(seen)) == 6
        await again.close()
