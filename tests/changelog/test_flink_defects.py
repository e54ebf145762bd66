"""Flink's known defects of its changelog, each as a test that it cannot happen here.

Sources: the FLINK issues named below; defects read in Flink's ``flink-dstl`` that have no issue are named after the
class (section 2.6 of our reference notes); peers' bugs by their project's issue.
"""

import asyncio

import pytest

from dstl.changelog.ledger import Ownership
from dstl.changelog.storage import StateChangelogStorage
from dstl.errors import Closed, Unavailable
from dstl.options import UploadOptions
from tests.simulation.virtual_time import virtual
from worlds.changelog import put, result_of, turn, world


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
        assert await w.read("log-a", await w.persist(writer)) == [b"x", b"y"]


@virtual
async def test_a_failed_segment_fails_only_those_who_are_in_it():
    """One file per (TaskManager, job) batch fails all tasks; another segment's persists are not touched."""
    async with world() as w:
        w.store.holding = True
        one, two = w.writer("log-a"), w.writer("log-b")
        put(one, b"x")
        first = w.persist(one)
        await turn()
        put(two, b"y")
        second = w.persist(two)
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
        writer = w.wrote(b"x")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(w.persist(writer), 60)
        w.store.holding = False
        assert await w.read("log-a", await w.persist(writer)) == [b"x"]


@virtual
async def test_a_writer_closed_during_an_upload_leaves_the_others_their_segment():
    """``handleUploadSuccess`` of a closed writer discards the file, past the count of the other writers in it."""
    async with world() as w:
        w.store.holding = True
        one, two = w.writer("log-a"), w.writer("log-b")
        put(one, b"x")
        put(two, b"y")
        both = asyncio.create_task(w.storage.persist_all([(one, 0), (two, 0)], allow_inline=False))
        await turn()
        one.close()
        w.store.held[0].succeed()
        with pytest.raises(Closed):
            await both
        segments = await w.persist(two)
        await turn()
        assert w.store.started == 1
        assert await w.read("log-b", segments) == [b"y"]
        w.storage.reset(result_of(two, 0, 1))
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
        assert await w.read("log-a", await w.persist(writer)) == [b"x"]


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
        await turn()
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
async def test_a_checkpoint_seals_at_once_and_waits_for_nobody():
    """The FLIP promises it; ``BatchingStateChangeUploadScheduler`` always waits for delay or size."""
    async with world() as w:
        one, two = w.writer("log-a"), w.writer("log-b")
        w.writer("idle")
        put(w.writer("never asked for"), b"z")
        put(one, b"x")
        put(two, b"y")
        await w.storage.persist_all([(one, 0), (two, 0)], allow_inline=False)
        assert asyncio.get_running_loop().time() == 0.0
        assert w.store.started == 1


@virtual
async def test_flink_15371_a_threshold_crossed_while_the_timer_runs_is_not_a_lost_wake_up():
    """Logs grow large while the pause behind a failed upload ends and begins again: all are stored."""
    async with world(preemptive_persist_threshold=100) as w:
        w.store.holding = True
        for n in range(60):
            put(w.writer(f"log-{n}"), b"x" * 94)
            await turn(0.0053)
            if n % 20 == 0:
                assert w.store.held, "nothing is tried any more"
                w.store.held[0].fail()
        w.store.holding = False
        for held in list(w.store.held):
            held.succeed()
        await turn(2)
        assert w.storage.budget.used == 0


@virtual
async def test_a_persist_does_not_wait_for_the_pause_behind_a_failed_preemptive_upload():
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
        await w.persist(small)
        assert asyncio.get_running_loop().time() == started


@virtual
async def test_automq_3485_appends_that_wait_get_in_after_an_upload_failed():
    """Capacity that a failed upload never gives back is a deadlock."""
    async with world(byte_budget=100, preemptive_persist_threshold=50) as w:
        w.store.holding = True
        writer = w.wrote(b"x" * 94)
        task = asyncio.create_task(w.append(writer, 50))
        await turn(0.1)
        w.store.held[0].fail()
        w.store.holding = False
        await asyncio.wait_for(task, 1)
        assert await w.read("log-a", await w.persist(writer)) == [b"x" * 94, b"y" * 44]


@virtual
async def test_flink_26592_appending_from_an_uploads_completion_does_not_deadlock():
    async with world(byte_budget=100) as w:
        w.store.holding = True
        writer = w.wrote(b"x" * 94)
        future = w.persist(writer)

        async def append_on_completion() -> None:
            await future
            await w.append(writer, 90)
            await w.persist(writer, 1)

        tasks = [asyncio.create_task(append_on_completion()), asyncio.create_task(w.append(writer, 90))]
        await turn(1)
        w.store.holding = False
        w.store.held[0].succeed()
        await asyncio.wait_for(asyncio.gather(*tasks), 1)
        assert await w.read("log-a", await w.persist(writer)) == [b"x" * 94, b"y" * 84, b"y" * 84]


@virtual
async def test_flink_31139_a_persist_of_nothing_writes_no_object():
    """Materialize#12225: 41,000 objects in a night, mostly of empty batches."""
    async with world(inline_threshold=0) as w:
        writers = [w.writer(f"log-{n}") for n in range(5)]
        for _ in range(10):
            for each in writers:
                assert await w.persist(each, each.next_sequence_number()) == ()
            await w.storage.persist_all([(each, each.next_sequence_number()) for each in writers])
        put(writers[0], b"x")
        await w.persist(writers[0])
        await w.persist(writers[0])
        await w.persist(writers[0], 1)
        assert w.store.started == 1


@virtual
async def test_flink_28440_truncation_waits_for_a_checkpoint_that_references_the_segment():
    async with world() as w:
        writer = w.wrote(b"x")
        segments = await w.persist(writer)
        put(writer, b"y")
        writer.truncate(writer.next_sequence_number())
        await turn()
        assert await w.read("log-a", segments) == [b"x"]
        w.storage.confirm(result_of(writer, 0, 1))
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
            w.storage.reset(result_of(each, 0, 2))
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
        writer = w.wrote(b"materialized")
        boundary = writer.next_sequence_number()
        put(writer, b"after it")
        writer.truncate(boundary)
        assert await w.read("log-a", await w.persist(writer, boundary)) == [b"after it"]


@virtual
async def test_flink_25524_a_confirmed_segment_is_the_coordinators_whatever_happens_to_its_log():
    async with world() as w:
        writer = w.wrote(b"x")
        segments = await w.persist(writer)
        w.storage.confirm(result_of(writer, 0, 1))
        w.storage.reset(result_of(writer, 0, 1))
        writer.truncate(1)
        writer.truncate_and_close(0)
        await w.storage.close()
        assert await w.read("log-a", segments) == [b"x"]


@virtual
async def test_flink_25261_truncated_changes_are_gone_from_memory_and_from_the_store():
    async with world() as w:
        writer = w.wrote(b"x")
        await w.persist(writer)
        w.storage.reset(result_of(writer, 0, 1))
        put(writer, b"y")
        writer.truncate(writer.next_sequence_number())
        await turn()
        assert await w.store.names() == set()
        assert w.storage.budget.used == 0
        assert await w.persist(writer, 2) == ()


@virtual
async def test_an_aborted_checkpoint_deletes_nothing_that_later_ones_reference():
    """``LocalChangelogRegistry`` deletes everything up to the aborted checkpoint."""
    async with world() as w:
        writer = w.wrote(b"x")
        first = await w.persist(writer)
        put(writer, b"y")
        second = await w.persist(writer)
        w.storage.reset(result_of(writer, 0, 1))
        await turn()
        assert await w.read("log-a", second) == [b"x", b"y"]
        assert second[0] == first[0], "what is durable is reused"
        assert w.store.started == 2


@virtual
async def test_flink_28602_25429_closing_twice_is_closing_once():
    async with world() as w:
        writer = w.wrote(b"x")
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
        assert len(await w.persist(writer)) == 1


@virtual
async def test_the_size_of_a_checkpoint_counts_all_its_segments():
    """The incremental size counts only the last upload that completed."""
    async with world(preemptive_persist_threshold=1000) as w:
        writer = w.wrote(b"x" * 1000)
        await turn(1)
        put(writer, b"y" * 94)
        segments = await w.persist(writer)
        assert sum(segment.nbytes for segment in segments) == 1006 + 100


@virtual
async def test_the_queue_gauge_follows_the_queue():
    """The gauge locks another monitor than the queue."""
    async with world() as w:
        _, future = await w.uploading()
        assert w.recorder.gauges["segmentsInFlight"] == 1
        w.store.held[0].succeed()
        await future
        await turn()
        assert w.recorder.gauges["segmentsInFlight"] == 0


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
            future = w.persist(writer)
            for _ in range(3):
                await turn(10)
                seen.append(w.store.held[0].name)
                w.store.held[0].fail()
            with pytest.raises(Unavailable):
                await future
        assert len(set(seen)) == 6
        await again.close()
