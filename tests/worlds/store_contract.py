"""The contract of an object store, as tests: subclass, give a ``store`` fixture, and inherit them all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import ClassVar

import pytest

from dstl.errors import Closed, Invalid, ObjectExists, ObjectNotFound, Unavailable
from dstl.store.base import ByteRange, ObjectStore

BAD_NAMES = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/..",
    "./a",
    ".hidden",
    "a/.hidden",
    "a.",
    "a..b",
    "a b",
    "a%2e%2e",
    "%2e%2e/a",
    "a\0b",
    "a\n",
    "a\\b",
    "C:a",
    "a?b",
    "a*",
    "ä",
    "a/\u2024\u2024/b",
    "\uff0e\uff0e/a",
    "\u0430",
    "a\ud800",
    "x" * 513,
)
"""Names that no store may take: ways out of the location, and what some store reads differently than another."""


@pytest.mark.asyncio
class StoreContract:
    """The contract of :class:`~dstl.store.base.ObjectStore`.

    Example::

        class TestMyStore(StoreContract):
            @pytest.fixture
            async def store(self):
                store = MyStore(...)
                yield store
                await store.close()

    The store must be empty. Override ``big`` with a size that takes your store's path for large objects, and ``many``
    with one that needs two pages of a list.
    """

    big: ClassVar[int] = 12 << 20
    many: ClassVar[int] = 1_100

    async def test_an_object_reads_back_as_written(self, store: ObjectStore) -> None:
        for name, data in (("a/b-1.x", b"bytes"), ("empty", b""), ("zeros", bytes(70_000))):
            info = await store.put(name, data)
            assert (info.name, info.size) == (name, len(data))
            assert await store.get(name) == data
            head = await store.head(name)
            assert (head.name, head.size) == (name, len(data))
            # One clock stamps both; some stores keep whole seconds.
            assert abs(head.modified - info.modified) <= 2

    async def test_a_memoryview_is_taken_with_its_own_bounds(self, store: ObjectStore) -> None:
        await store.put("view", memoryview(b"0123456789")[2:5])
        assert await store.get("view") == b"234"

    async def test_put_if_absent_never_overwrites(self, store: ObjectStore) -> None:
        await store.put("once", b"first", if_absent=True)
        with pytest.raises(ObjectExists):
            await store.put("once", b"second", if_absent=True)
        assert await store.get("once") == b"first"

    async def test_a_plain_put_replaces(self, store: ObjectStore) -> None:
        await store.put("twice", b"first")
        await store.put("twice", b"2nd")
        assert await store.get("twice") == b"2nd"
        assert (await store.head("twice")).size == 3

    async def test_of_racing_puts_exactly_one_wins(self, store: ObjectStore) -> None:
        for race in range(5):
            name = f"race/{race}"
            bodies = [f"writer {writer}".encode() * 1000 for writer in range(8)]
            outcomes = await asyncio.gather(
                *(store.put(name, body, if_absent=True) for body in bodies), return_exceptions=True
            )
            winners = [body for body, one in zip(bodies, outcomes, strict=True) if not isinstance(one, Exception)]
            losers = [one for one in outcomes if isinstance(one, Exception)]
            assert len(winners) == 1
            assert all(isinstance(one, ObjectExists) for one in losers), losers
            assert await store.get(name) == winners[0]

    async def test_a_reader_never_sees_half_an_object(self, store: ObjectStore) -> None:
        size = 300_000
        await store.put("changing", b"0" * size)

        async def write() -> None:
            for digit in range(1, 6):
                await store.put("changing", str(digit).encode() * size)

        writing, whole = asyncio.create_task(write()), 0
        while not writing.done():
            # A store may fail for a moment: moto answers 500 to a read that an overwrite has overtaken.
            with suppress(Unavailable):
                body = await store.get("changing")
                assert len(body) == size
                assert len(set(body)) == 1
                whole += 1
            await asyncio.sleep(0)
        await writing
        assert whole > 0
        assert await store.get("changing") == b"5" * size

    async def test_what_is_missing_is_not_found(self, store: ObjectStore) -> None:
        await store.put("here/x", b"1")
        for name in ("missing", "here", "here/y", "here/x-2", "not/here/x"):
            with pytest.raises(ObjectNotFound):
                await store.get(name)
            with pytest.raises(ObjectNotFound):
                await store.get(name, ByteRange(0, 1))
            with pytest.raises(ObjectNotFound):
                await store.head(name)

    async def test_ranges_are_half_open_and_end_with_the_object(self, store: ObjectStore) -> None:
        data = bytes(range(100))
        await store.put("ranged", data)
        for start, stop in ((0, 1), (0, 100), (10, 20), (99, 100), (90, 1000), (100, 101), (5000, 6000)):
            assert await store.get("ranged", ByteRange(start, stop)) == data[start:stop]

    async def test_a_large_object(self, store: ObjectStore) -> None:
        data = random.Random(1).randbytes(self.big)
        info = await store.put("large", memoryview(data), if_absent=True)
        assert info.size == self.big == (await store.head("large")).size
        assert await store.get("large") == data
        middle = self.big // 2
        assert await store.get("large", ByteRange(middle - 10, middle + 10)) == data[middle - 10 : middle + 10]
        with pytest.raises(ObjectExists):
            await store.put("large", bytes(self.big), if_absent=True)
        assert await store.get("large", ByteRange(0, 100)) == data[:100]
        await store.put("other", memoryview(data))
        assert await store.get("other") == data

    async def test_a_folder_is_listed_in_the_order_of_names(self, store: ObjectStore) -> None:
        # "-" and "." sort before "/": who lists folder by folder has another order of whole names.
        def by_folder(names: Iterable[str]) -> list[tuple[str, str]]:
            return sorted(((name.rpartition("/")[0], name) for name in names), key=itemgetter(0))

        names = ["a-b", "a.b", "a/z", "a/b/c", "a0", "B", "_", "=x", "a-b.c/d", "z/0", "z/00", "z/1", "z-/1", "a=1/b=2"]
        for name in names:
            await store.put(name, name.encode())
        ordered = sorted(names)
        assert by_folder(ordered) == by_folder([info.name async for info in store.list()])
        for prefix in ("a", "a/", "a/b", "a-", "z/0", "z", "nothing", "a=1/b=2"):
            matching = [name for name in ordered if name.startswith(prefix)]
            assert by_folder(matching) == by_folder([info.name async for info in store.list(prefix)])
        sizes = {info.name: info.size async for info in store.list()}
        assert sizes == {name: len(name) for name in names}

    async def test_many_objects_are_listed_and_deleted(self, store: ObjectStore) -> None:
        names = [f"many/{number:05d}" for number in range(self.many)]
        for at in range(0, self.many, 16):
            await asyncio.gather(*(store.put(name, b"x", if_absent=True) for name in names[at : at + 16]))
        assert names == [info.name async for info in store.list("many/")]
        await store.delete(names[1:])
        left = [info.name async for info in store.list()]
        assert left == names[:1]

    async def test_a_list_may_be_left_early(self, store: ObjectStore) -> None:
        for number in range(5):
            await store.put(f"n{number}", b"")
        async for info in store.list():
            assert info.name == "n0"
            break
        assert (await store.head("n4")).size == 0

    async def test_deleting_is_idempotent(self, store: ObjectStore) -> None:
        await store.put("d/1", b"1")
        await store.put("d/2", b"2")
        await store.delete([])
        await store.delete(["d/1", "d/missing", "nowhere/at/all"])
        await store.delete(["d/1"])
        await store.delete(["d"])
        left = [info.name async for info in store.list()]
        assert left == ["d/2"]
        await store.put("d/1", b"again", if_absent=True)
        assert await store.get("d/1") == b"again"

    async def test_names_outside_the_grammar_are_refused(self, store: ObjectStore) -> None:
        await store.put("good", b"")
        for name in BAD_NAMES:
            for call in (
                partial(store.put, name, b""),
                partial(store.put, name, b"", if_absent=True),
                partial(store.get, name),
                partial(store.head, name),
                partial(store.delete, ["good", name]),
            ):
                with pytest.raises(Invalid):
                    await call()
        left = [info.name async for info in store.list()]
        assert left == ["good"]

    async def test_a_cancelled_put_leaves_all_or_nothing(self, store: ObjectStore) -> None:
        data = random.Random(2).randbytes(self.big)
        for turns in (0, 1, 3, 10, 50):
            name = f"cancelled/{turns}"
            putting = asyncio.create_task(store.put(name, data, if_absent=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
            with suppress(ObjectNotFound):
                assert await store.get(name) == data
        assert (await store.put("afterwards", b"x", if_absent=True)).size == 1

    async def test_calls_may_overlap(self, store: ObjectStore, seed: int) -> None:
        rng = random.Random(seed)
        bodies = {f"over/{number}": rng.randbytes(rng.randrange(1, 5000)) for number in range(30)}
        await asyncio.gather(*(store.put(name, body) for name, body in bodies.items()))
        reads = await asyncio.gather(*(store.get(name) for name in bodies))
        assert list(bodies.values()) == reads

    async def test_after_close_every_call_is_refused(self, store: ObjectStore) -> None:
        await store.put("before", b"x")
        await store.close()
        await store.close()
        with pytest.raises(Closed):
            await store.put("after", b"")
        with pytest.raises(Closed):
            await store.get("before")
        with pytest.raises(Closed):
            await store.head("before")
        with pytest.raises(Closed):
            await store.delete(["before"])
        with pytest.raises(Closed):
            [info async for info in store.list()]
        assert store.location

    @pytest.fixture
    def seed(self) -> int:
        """Of random bodies; override it to replay a run."""
        return 0
