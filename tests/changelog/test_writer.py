"""The writer's own rules, over the real storage."""

import gc

import pyarrow as pa
import pytest

from dstl.changelog.change_set import CHANGE_SCHEMA
from dstl.errors import Closed, Invalid, Unavailable
from tests.simulation.virtual_time import run_in_virtual_time, virtual
from worlds.changelog import put, turn, world


@virtual
@pytest.mark.parametrize("close", ["close", "truncate_and_close"])
async def test_everything_but_closing_again_is_refused_after_close(close: str):
    async with world() as w:
        writer = w.writer()
        put(writer, b"x")
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
        writer = w.writer()
        put(writer, b"x")
        with pytest.raises(Invalid, match="cannot truncate from 2"):
            writer.truncate_and_close(2)
        put(writer, b"still open")


@virtual
async def test_a_persist_fails_with_an_upload_of_its_own_alone():
    async with world() as w:
        writer, first = await w.uploading()
        second = w.persist(writer)
        await turn()
        assert w.store.started == 1
        w.store.held[0].fail()
        await turn()
        assert isinstance(first.exception(), Unavailable)
        w.store.held[0].succeed()
        assert await w.read("log-a", await second) == [b"x"]


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
