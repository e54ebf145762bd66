import asyncio
import random
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.change_set import META_KEY_GROUP, OP_PUT, ChangeSet
from dstl.changelog.segment import encoder as segment_encoder
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.changelog.segment.reader import ReadSizes, SegmentReader
from dstl.errors import CorruptData, MissingState, ObjectNotFound, Unavailable
from dstl.store.base import ByteRange
from dstl.store.memory import MemoryStore
from handles.key_group import KeyGroupRange
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from worlds.segment_samples import Key, Row, change_set, expected, feature_sets, rows_of

Sets = list[tuple[str, int, ChangeSet]]

RANGED = ReadSizes(whole=0, tail=100, gap=0)
SMALL = ReadSizes(whole=0, tail=100, gap=0, fetch=2000, unit=2000)


class CountingStore(MemoryStore):
    """Notes what is asked for; can hold or fail what comes after the index."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.under_way = 0
        self.cancelled = 0
        self.hold: asyncio.Event | None = None
        self.fail_from: int | None = None

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        assert byte_range is not None
        self.asked.append((byte_range.start, byte_range.stop))
        self.under_way += 1
        try:
            if self.hold is not None:
                await self.hold.wait()
            if self.fail_from is not None and len(self.asked) >= self.fail_from:
                raise Unavailable("the test says no")
            return await super().get(name, byte_range)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1


async def stored(data: bytes, before: bytes = b"", after: bytes = b"") -> tuple[CountingStore, SegmentHandle]:
    store = CountingStore()
    await store.put("s/1", before + data + after)
    return store, SegmentHandle("s/1", len(data), segment_checksum(data), len(before))


async def read(
    reader: SegmentReader,
    key_groups: KeyGroupRange | None = None,
    logs: dict[str, SequenceNumberRange] | None = None,
    without: Mapping[str, frozenset[int]] | None = None,
) -> dict[tuple[str, int], list[Row]]:
    """Return the rows of each log and key group in their order."""
    found: dict[tuple[str, int], list[Row]] = {}
    async for log_id, batch, nbytes in reader.read(key_groups, logs, without or {}):
        assert nbytes == batch.nbytes
        assert log_id >= max((log for log, _ in found), default="")
        for row in rows_of(batch):
            found.setdefault((log_id, row[0]), []).append(row)
    return found


def by_key_group(rows_of_runs: Mapping[Key, list[Row]]) -> dict[tuple[str, int], list[Row]]:
    """Return what :func:`read` must find of these runs: all but metadata, by ascending sequence number."""
    found: dict[tuple[str, int], list[Row]] = {}
    for (log_id, _, key_group), rows in sorted(rows_of_runs.items()):
        if key_group != META_KEY_GROUP:
            found.setdefault((log_id, key_group), []).extend(rows)
    return found


def many_blocks(seed: int, key_groups: int = 16, rows: int = 300) -> Sets:
    """Two logs, several numbers, key groups that each have blocks of their own, values that do not compress."""
    rng = random.Random(seed)
    sets = []
    for log_id in ("a", "b"):
        for sqn in range(2, 5):
            changes = change_set(
                [(rng.randrange(key_groups), 0, OP_PUT, rng.randbytes(8), b"", rng.randbytes(90)) for _ in range(rows)]
            )
            changes.append_metadata(b"schema %d" % sqn)
            sets.append((log_id, sqn, changes))
    return sets


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_encoder, "_SMALL_BLOCK", 0)
    monkeypatch.setattr(segment_encoder, "_LARGE_BLOCK", 2000)


async def test_a_small_segment_is_one_request() -> None:
    sets = feature_sets()
    store, handle = await stored(encode_segment(sets, writer_id="w"))
    reader = SegmentReader(store, handle)
    assert await read(reader) == by_key_group(expected(sets))
    assert await read(reader) == by_key_group(expected(sets))
    assert store.asked == [(0, handle.size)]


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.usefixtures("small_blocks")
async def test_a_segment_inside_a_manifest_is_read_like_any_other(threads: bool, seed: int) -> None:
    sizes = replace(RANGED, inline=-1) if threads else RANGED
    sets = many_blocks(seed)
    data = encode_segment(sets, writer_id="w")
    store, handle = await stored(data, b"manifest" * 5, b"more of it")
    assert await read(SegmentReader(store, handle, sizes=sizes)) == by_key_group(expected(sets))
    assert all(40 <= start < stop <= 40 + len(data) for start, stop in store.asked)


@pytest.mark.usefixtures("small_blocks")
async def test_readers_that_share_a_turn_decode_no_more_at_once(seed: int) -> None:
    """A restore reads many segments ahead; all of a loop's threads decoding them would keep the bases waiting."""
    sets = many_blocks(seed)
    data = encode_segment(sets, writer_id="w")
    running, most, lock = 0, 0, threading.Lock()

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)

            def ended(_: Future[Any]) -> None:
                nonlocal running
                with lock:
                    running -= 1

            work = super().submit(*args, **kwargs)
            work.add_done_callback(ended)
            return work

    found = []
    with Pool(8) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        for turn in (None, asyncio.Semaphore(2)):
            most = 0
            readers = []
            for _ in range(6):
                store, handle = await stored(data)
                readers.append(SegmentReader(store, handle, turn=turn, sizes=ReadSizes(inline=-1)))
            assert await asyncio.gather(*map(read, readers)) == [by_key_group(expected(sets))] * 6
            found.append(most)
    assert found[0] > 2 >= found[1]


@given(
    st.integers(0, 1 << 32),
    st.tuples(st.integers(0, 15), st.integers(0, 15)).map(sorted),
    st.tuples(st.integers(2, 5), st.integers(2, 5)).map(sorted),
    st.sampled_from([("a",), ("b",), ("a", "b")]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_filters_return_exactly_what_they_name(
    number: int, groups: list[int], sqns: list[int], logs: tuple[str, ...], split: bool
) -> None:
    async def check() -> None:
        sets = many_blocks(number, rows=40)
        store, handle = await stored(encode_segment(sets, writer_id="w"))
        wanted = {log_id: SequenceNumberRange(*sqns) for log_id in logs}
        found = await read(
            SegmentReader(store, handle, sizes=ReadSizes(whole=0, gap=0) if split else ReadSizes()),
            KeyGroupRange(*groups),
            wanted,
        )
        assert found == by_key_group(
            {
                key: rows
                for key, rows in expected(sets).items()
                if key[0] in logs and sqns[0] <= key[1] < sqns[1] and groups[0] <= key[2] <= groups[1]
            }
        )

    with pytest.MonkeyPatch.context() as patch:
        if split:
            patch.setattr(segment_encoder, "_SMALL_BLOCK", 0)
        asyncio.run(check())


@pytest.mark.usefixtures("small_blocks")
async def test_one_key_group_fetches_its_bytes_and_the_index_only(seed: int) -> None:
    sets = many_blocks(seed, key_groups=64, rows=1200)
    data = encode_segment(sets, writer_id="w")
    store, handle = await stored(data)
    reader = SegmentReader(store, handle, sizes=RANGED)
    footer = len(data) - (await reader.index()).footer_offset
    store.asked.clear()
    found = await read(reader, KeyGroupRange(7, 7))
    assert {key_group for _, key_group in found} == {7}
    assert sum(stop - start for start, stop in store.asked) < len(data) / 32 + 2000 < len(data) / 10 + footer


@pytest.mark.usefixtures("small_blocks")
async def test_neighbours_are_fetched_in_one_request(seed: int) -> None:
    sets = many_blocks(seed)
    store, handle = await stored(encode_segment(sets, writer_id="w"))
    reader = SegmentReader(store, handle, sizes=RANGED)
    index = await reader.index()
    assert sum(len(log.blocks) for log in index.logs) > 30
    store.asked.clear()
    assert await read(reader) == by_key_group(expected(sets))
    assert store.asked == [(16, index.footer_offset)]


async def test_a_footer_longer_than_the_first_request_takes_one_more(seed: int) -> None:
    store, handle = await stored(encode_segment(many_blocks(seed), writer_id="w" * 300))
    assert (await SegmentReader(store, handle, sizes=RANGED).index()).writer_id == "w" * 300
    assert len(store.asked) == 2
    assert store.asked[1][1] == store.asked[0][0]


@pytest.mark.usefixtures("small_blocks")
async def test_requests_ahead_stay_within_the_budget(seed: int) -> None:
    sets = many_blocks(seed)
    store, handle = await stored(encode_segment(sets, writer_id="w"))
    for budget, most in ((1, 1), (12_000, 4), (10_000_000, 8)):
        reader = SegmentReader(store, handle, max_bytes_in_memory=budget, sizes=SMALL)
        await reader.index()
        store.asked.clear()
        first = await anext(found := reader.read())
        assert first.batch.num_rows
        await asyncio.sleep(0.01)
        assert 1 <= len(store.asked) <= most + 1
        if budget == 10_000_000:
            assert len(store.asked) > 4
        await found.aclose()
    assert await read(SegmentReader(store, handle, max_bytes_in_memory=1, sizes=SMALL)) == by_key_group(expected(sets))


async def test_a_range_that_the_segment_does_not_hold_is_never_the_end_of_the_log() -> None:
    store, handle = await stored(encode_segment(feature_sets(), writer_id="w"))
    reader = SegmentReader(store, handle)
    for log_id, low, high in (("log-a", 3, 6), ("log-a", 4, 10), ("log-z", 0, 1), ("log-b", 1, 2)):
        with pytest.raises(MissingState, match=log_id):
            await read(reader, None, {log_id: SequenceNumberRange(low, high)})
    assert await read(reader, None, {"log-a": SequenceNumberRange(9, 10)})
    assert await read(reader, None, {}) == {}


async def test_a_missing_object_is_named() -> None:
    with pytest.raises(ObjectNotFound):
        await SegmentReader(MemoryStore(), SegmentHandle("gone", 100, 0)).index()


@pytest.mark.usefixtures("small_blocks")
async def test_damage_in_a_block_that_is_not_wanted_does_not_matter(seed: int) -> None:
    sets = many_blocks(seed)
    data = bytearray(encode_segment(sets, writer_id="w"))
    store, handle = await stored(bytes(data))
    *_, block = (await SegmentReader(store, handle, sizes=RANGED).index()).logs[1].blocks
    data[block.offset] ^= 1
    store, _ = await stored(bytes(data))
    assert await read(SegmentReader(store, handle, sizes=RANGED), None, {"a": SequenceNumberRange(2, 5)})
    with pytest.raises(CorruptData, match=str(block.offset)):
        await read(SegmentReader(store, handle, sizes=RANGED))


@pytest.mark.parametrize("threads", [False, True])
async def test_what_is_left_out_is_not_read_and_the_rest_is(threads: bool, seed: int) -> None:
    """All blocks, some key groups of all logs, and half of the numbers of one log without some key groups."""
    sets = many_blocks(seed)
    sets[0][2].append_metadata(b"{}")
    store, handle = await stored(encode_segment(sets, writer_id="w"))
    every = {log.log_id: log.sqns for log in (await SegmentReader(store, handle).index()).logs}
    for owned, logs, without in (
        (KeyGroupRange(0, 15), every, {}),
        (KeyGroupRange(3, 9), every, {"b": frozenset({4, 9})}),
        (KeyGroupRange(0, 15), {"a": SequenceNumberRange(3, 4)}, {"a": frozenset({0, 7})}),
    ):
        wanted = by_key_group(
            {
                (log_id, sqn, key_group): rows
                for (log_id, sqn, key_group), rows in expected(sets).items()
                if log_id in logs and sqn in logs[log_id] and key_group in owned
                if key_group not in without.get(log_id, ())
            }
        )
        reader = SegmentReader(store, handle, sizes=ReadSizes(inline=-1) if threads else ReadSizes())
        assert len(wanted) > 5
        assert await read(reader, owned, logs, without) == wanted
