"""The writer's own rules, over the real storage."""

import asyncio
import gc

import pyarrow as pa
import pytest

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_META, OP_PUT
from dstl.changelog.ledger import Ownership
from dstl.changelog.segment.decoder import decode_segment
from dstl.errors import Closed, Invalid, Unavailable
from dstl.testing.virtual_time import run_in_virtual_time
from worlds.changelog import put, turn, virtual, world
from worlds.segment_samples import batch_of


class TestSequenceNumbers:
    @virtual
    async def test_append_does_not_move_it(self):
        async with world() as w:
            writer = w.writer()
            assert writer.next_sequence_number() == 0
            put(writer, b"x")
            await turn(1)
            assert writer.ledger.next_sqn == 0

    @pytest.mark.parametrize("roll", ["next", "persist"])
    def test_asking_moves_it_by_one_only_after_an_append(self, roll: str):
        async def main() -> None:
            async with world() as w:
                writer = w.writer()
                for expected in (0, 1, 1, 2):
                    if expected > writer.ledger.next_sqn:
                        put(writer, b"x")
                    if roll == "persist":
                        await writer.persist(writer.ledger.next_sqn)
                    assert writer.next_sequence_number() == expected

        run_in_virtual_time(main())

    @virtual
    async def test_what_is_appended_after_the_ask_belongs_to_the_next_number(self):
        async with world() as w:
            writer = w.writer()
            put(writer, b"before")
            future = writer.persist(0)
            put(writer, b"after")
            assert await w.read("log-a", await future) == [b"before"]
            assert await w.read("log-a", await writer.persist(0)) == [b"before", b"after"]


@virtual
async def test_a_batch_a_record_and_metadata_come_back_in_order():
    async with world() as w:
        writer = w.writer()
        writer.append_metadata(b"schema of state 0")
        put(writer, b"one")
        rows = {"key_group": 1, "state": 0, "op": OP_PUT, "key": b"k", "user_key": b"", "value": b"two"}
        writer.append_batch(pa.RecordBatch.from_pylist([rows], schema=CHANGE_SCHEMA))
        put(writer, b"three")
        (segment,) = await writer.persist(0)
        data = await w.bytes_of(segment.location)
        values = [b for _, _, _, batch in decode_segment(data, "test") for b in batch.to_pylist()]
        assert [v["value"] for v in values if v["op"] == OP_PUT] == [b"one", b"two", b"three"]
        assert [v["value"] for v in values if v["op"] == OP_META] == [b"schema of state 0"]


@virtual
async def test_neighbours_in_one_object_are_one_segment_of_the_handle():
    async with world() as w:
        writer = w.writer()
        for value in (b"a", b"b", b"c"):
            put(writer, value)
            writer.next_sequence_number()
        (segment,) = await writer.persist(0)
        assert (segment.range.from_sqn, segment.range.to_sqn) == (0, 3)


@virtual
async def test_a_refused_append_leaves_nothing():
    async with world() as w:
        writer = w.writer()
        with pytest.raises(Invalid):
            writer.append_batch(batch_of([(40_000, 0, OP_PUT, b"", b"", b"")]))
        with pytest.raises(Invalid):
            writer.append_batch(pa.RecordBatch.from_pydict({"other": [1]}))
        assert writer.next_sequence_number() == 0
        assert await writer.persist(0) == ()


@pytest.mark.parametrize("close", ["close", "truncate_and_close"])
def test_everything_but_closing_again_is_refused_after_close(close: str):
    async def main() -> None:
        async with world() as w:
            writer = w.writer()
            put(writer, b"x")
            writer.close() if close == "close" else writer.truncate_and_close(0)
            for call in (
                lambda: put(writer, b"late"),
                lambda: writer.append_metadata(b"late"),
                lambda: writer.append_batch(pa.RecordBatch.from_pylist([], schema=CHANGE_SCHEMA)),
                writer.next_sequence_number,
                lambda: writer.persist(0),
            ):
                with pytest.raises(Closed, match="log-a is closed"):
                    call()
            writer.close()
            await turn()
            assert w.storage.budget.used == 0

    run_in_virtual_time(main())


@virtual
async def test_truncating_and_closing_from_what_is_not_appended_is_refused():
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        with pytest.raises(Invalid, match="cannot truncate from 2"):
            writer.truncate_and_close(2)
        put(writer, b"still open")


@virtual
async def test_close_settles_pending_persists():
    async with world() as w:
        writer, uploading = await w.uploading()
        put(writer, b"y")
        waiting = writer.persist(1)
        writer.close()
        for future in (uploading, waiting):
            with pytest.raises(Closed):
                await future


@virtual
async def test_many_waiters_of_one_failure_get_an_error_each():
    async with world() as w:
        w.store.holding = True
        writer = w.writer()
        put(writer, b"x")
        futures = [writer.persist(0) for _ in range(3)]
        await turn()
        w.store.held[0].fail()
        errors = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(error, Unavailable) for error in errors)
        assert len({id(error) for error in errors}) == 3


@virtual
async def test_a_persist_whose_caller_gave_up_does_not_hold_its_range():
    async with world() as w:
        writer, future = await w.uploading()
        future.cancel()
        await turn()
        writer.truncate(1)
        await turn()
        assert not w.store.held, "the upload that nobody needs goes on"
        assert writer.ledger.ownership(0) is None


def test_a_failed_persist_that_nobody_awaits_is_not_reported_as_lost(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with world() as w:
            writer = w.writer()
            put(writer, b"x")
            w.store.holding = True
            writer.persist(0)
            await turn()
            w.store.held[0].fail()
            await turn()
            gc.collect()

    run_in_virtual_time(main())
    assert caplog.records == []


@virtual
async def test_one_record_appends_are_accounted_before_anybody_else_is_let_in():
    async with world(byte_budget=200) as w:
        writer = w.writer()
        w.store.holding = True
        put(writer, b"x" * 300)  # without asking
        reserved = asyncio.create_task(w.reserve(10))
        await turn()
        assert not reserved.done()
        w.store.held[0].succeed()
        await reserved


@virtual
async def test_states_as_seen_by_the_owner():
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
        assert writer.ledger.ownership(0) is None
        w.store.holding = True
        future = writer.persist(0)
        await turn()
        assert writer.ledger.ownership(0) is Ownership.IN_FLIGHT
        w.store.held[0].succeed()
        await future
        assert writer.ledger.ownership(0) is Ownership.DURABLE
