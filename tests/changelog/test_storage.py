"""All logs of a TaskManager together: seals, inlining, memory, deletion, names."""

import asyncio
import gc
from itertools import pairwise

import pyarrow as pa
import pytest

from dstl.changelog.change_set import CHANGE_SCHEMA
from dstl.changelog.object_names import SegmentNames, parse_segment_name
from dstl.errors import Closed, Invalid
from dstl.store.base import check_name
from tests.simulation.virtual_time import run_in_virtual_time, seeded_runtime, virtual
from worlds.changelog import inlined_of, put, result_of, turn, world


class TestPersistAll:
    @virtual
    async def test_one_checkpoint_of_many_logs_is_one_object_at_once(self):
        async with world() as w:
            writers = [w.writer(f"log-{n}") for n in range(20)]
            w.writer("idle")
            for each in writers:
                put(each, each.log_id.encode())
            result = await w.storage.persist_all([(each, 0) for each in writers], allow_inline=False)
            assert len(await w.store.names()) == 1
            assert asyncio.get_running_loop().time() == 0.0
            for each in writers:
                assert await w.read(each.log_id, result.segments[each.log_id]) == [each.log_id.encode()]
            assert list(w.recorder.samples["uploadBatchSizes"]) == [20]

    @virtual
    async def test_a_large_one_is_cut_into_segments_that_are_stored_side_by_side(self):
        async with world(segment_size=1000) as w:
            w.store.holding = True
            writers = [w.writer(f"log-{n}") for n in range(40)]
            for each in writers:
                put(each, b"x" * 94)  # 100 bytes
            task = asyncio.create_task(w.storage.persist_all([(each, 0) for each in writers]))
            await turn()
            assert len(w.store.held) == 4
            for held in list(w.store.held):
                held.succeed()
            assert len((await task).segments) == 40

    @virtual
    async def test_a_writer_twice_or_a_truncated_range_is_refused_without_a_trace(self):
        async with world() as w:
            one, two = w.writer("log-a"), w.writer("log-b")
            for each in (one, two):
                put(each, b"x")
                each.next_sequence_number()
            two.truncate(1)
            with pytest.raises(Invalid, match="twice"):
                await w.storage.persist_all([(one, 0), (one, 0)])
            with pytest.raises(Invalid, match="truncated"):
                await w.storage.persist_all([(one, 0), (two, 0)])
            one.truncate(1)
            await turn()
            assert w.storage.budget.used == 0, "the range is claimed still"


class TestInlining:
    @virtual
    async def test_a_small_checkpoint_is_no_put_at_all(self):
        async with world() as w:
            writers = [w.writer(f"log-{n}") for n in range(3)]
            for each in writers:
                put(each, each.log_id.encode())
            result = await w.storage.persist_all([(each, 0) for each in writers])
            (inline,) = inlined_of(result)
            assert w.store.started == 0
            w.storage.confirm(result, {inline.id: await w.manifest(inline, "manifests/1")})
            again = await w.storage.persist_all([(each, 0) for each in writers])
            assert inlined_of(again) == ()
            for each in writers:
                (segment,) = again.segments[each.log_id]
                assert segment.location.name == "manifests/1"
                assert await w.read(each.log_id, [segment]) == [each.log_id.encode()]


class TestMemory:
    @virtual
    async def test_memory_below_every_threshold_is_drained_when_appends_wait(self):
        async with world(byte_budget=1000) as w:
            writers = [w.writer(f"log-{n}") for n in range(9)]
            for each in writers:
                put(each, b"x" * 94)
            await asyncio.wait_for(w.append(writers[0], 500), 1)
            assert w.recorder.counters["seals.memory"] == 1

    @virtual
    async def test_a_store_that_refuses_everything_is_not_hammered(self):
        async with world(byte_budget=100) as w:
            w.store.holding = True
            writer = w.wrote(b"x" * 90)
            waiting = asyncio.create_task(w.append(writer, 90))
            for _ in range(600):
                await turn(0.1)
                for held in list(w.store.held):
                    held.fail()
            assert not waiting.done()
            assert 10 < w.store.started < 30, "tried again with pauses of at most five seconds"
            w.store.holding = False
            await asyncio.wait_for(waiting, 10)


class TestClose:
    @virtual
    async def test_gives_up_uploads_settles_futures_and_is_idempotent(self):
        async with world() as w:
            _, future = await w.uploading()
            await asyncio.gather(w.storage.close(), w.storage.close())
            await w.storage.close()
            with pytest.raises(Closed):
                await future
            with pytest.raises(Closed):
                w.writer("another")
            assert w.storage.budget.used == 0

    @virtual
    async def test_before_a_seal_has_taken_its_first_step_leaves_nothing(self):
        async with world() as w:
            writer = w.wrote(b"x")
            task = asyncio.create_task(w.storage.persist_all([(writer, 0)], allow_inline=False))
            await asyncio.sleep(0)
            await w.storage.close()
            with pytest.raises(Closed):
                await task
            assert w.store.started == 0
            assert w.storage.budget.used == 0

    @virtual
    async def test_a_deletion_that_fails_is_left_to_the_cleaner(self):
        async with world() as w:
            w.store.delete_fails = True
            writer = w.wrote(b"x")
            await w.persist(writer)
            w.storage.reset(result_of(writer, 0, 1))
            writer.truncate_and_close(0)
            await turn()
            assert w.recorder.counters["segmentsLeftToCleaner"] == 1
            w.store.delete_fails = False


class TestNames:
    def test_have_the_grammar_and_come_apart_again(self, seed: int):
        names = SegmentNames("q-1", "tm_2", seeded_runtime(seed))
        name = names.new_object()(0)
        parsed = parse_segment_name(check_name(name))
        assert parsed is not None
        assert (str(parsed), parsed.query_id, parsed.writer_id) == (name, "q-1", "tm_2")

    def test_each_attempt_leads_to_another_shard(self, seed: int):
        name_of = SegmentNames("q", "w", seeded_runtime(seed)).new_object()
        names = [name_of(attempt) for attempt in range(1000)]
        assert len({name.split("/")[0] for name in names}) == 1000

    def test_several_locations_take_turns(self, seed: int):
        name_of = SegmentNames("q", "w", seeded_runtime(seed), ["s0", "s1", "s2"]).new_object()
        parsed = [parse_segment_name(check_name(name_of(attempt))) for attempt in range(6)]
        assert {each.location for each in parsed if each is not None} == {"s0", "s1", "s2"}
        assert all(a is not None and b is not None and a.location != b.location for a, b in pairwise(parsed))
        alone = parse_segment_name(SegmentNames("q", "w", seeded_runtime(seed), ["s0"]).new_object()(0))
        assert alone is not None
        assert alone.location == ""

    @pytest.mark.parametrize("bad", ["a/b", "..", "", "a b", "ä", "x" * 600])
    def test_ids_that_are_not_one_path_element_are_refused(self, bad: str):
        with pytest.raises(Invalid):
            SegmentNames(bad, "w", seeded_runtime(1))
        with pytest.raises(Invalid):
            SegmentNames("q", bad, seeded_runtime(1))

    @pytest.mark.parametrize(
        "other", ["manifests/1", "0000/q/w/x.seg", "0000/q/w/" + "0" * 32, "0000/q/w/v/" + "0" * 32 + ".seg"]
    )
    def test_other_names_are_not_segments(self, other: str):
        assert parse_segment_name(other) is None


@virtual
async def test_two_writers_of_one_log_are_refused():
    async with world() as w:
        w.writer("log-a").close()
        w.writer("log-a")
        with pytest.raises(Invalid, match="log-a has a writer already"):
            w.writer("log-a")


@virtual
@pytest.mark.parametrize(("threshold", "before", "with_it"), [(500, 4, 0), (1 << 20, 0, 1)])
async def test_the_preemptive_threshold_trades_objects_for_what_a_checkpoint_uploads(
    threshold: int, before: int, with_it: int
):
    async with world(preemptive_persist_threshold=threshold) as w:
        writer = w.writer()
        for n in range(4):
            put(writer, b"%d" % n * 500)
            await turn(1)
        assert w.store.started == before
        assert w.recorder.counters["seals.preemptive"] == before
        segments = await w.persist(writer)
        assert (w.store.started - before, len(segments)) == (with_it, before + with_it)
        assert await w.read("log-a", segments) == [b"%d" % n * 500 for n in range(4)]


@virtual
async def test_an_upload_becomes_critical_when_a_checkpoint_begins_to_wait_for_it():
    async with world(preemptive_persist_threshold=10) as w:
        w.store.holding = True
        writer = w.wrote(b"x" * 10)
        await turn()
        (upload,) = w.uploader._uploads
        assert not upload.critical
        w.persist(writer)
        await turn()
        assert upload.critical


@virtual
@pytest.mark.parametrize("close", ["close", "truncate_and_close"])
async def test_everything_but_closing_again_is_refused_after_close(close: str):
    async with world() as w:
        writer = w.wrote(b"x")
        writer.close() if close == "close" else writer.truncate_and_close(0)
        for call in (
            lambda: put(writer, b"late"),
            lambda: writer.append_metadata(b"late"),
            lambda: writer.append_batch(pa.RecordBatch.from_pylist([], schema=CHANGE_SCHEMA)),
            writer.next_sequence_number,
        ):
            with pytest.raises(Closed, match="log-a is closed"):
                call()
        with pytest.raises(Closed, match="log-a is closed"):
            await w.persist(writer)
        writer.close()
        await turn()
        assert w.storage.budget.used == 0


@virtual
async def test_truncating_and_closing_from_what_is_not_appended_is_refused():
    async with world() as w:
        writer = w.wrote(b"x")
        with pytest.raises(Invalid, match="cannot truncate from 2"):
            writer.truncate_and_close(2)
        put(writer, b"still open")


def test_a_failed_upload_that_nobody_awaits_any_more_is_not_reported_as_lost(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with world() as w:
            _, future = await w.uploading()
            future.cancel()
            await turn()
            w.store.held[0].fail()
            await turn()
            gc.collect()

    run_in_virtual_time(main())
    assert caplog.records == []
