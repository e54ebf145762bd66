"""Stores against a dict: any sequence of calls gives the same answers."""

import asyncio
import tempfile
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.errors import ObjectExists, ObjectNotFound
from dstl.store import ByteRange, LocalStore, MemoryStore, ObjectStore, ShardedStore

# Elements that sort around the slash; leaves and directories never share a name.
_folders = st.lists(st.sampled_from(["d", "d-", "d.x", "d0", "s0", "s1"]), max_size=2).map(lambda parts: [*parts, ""])
_names = st.builds(
    lambda folder, leaf: "/".join(folder) + leaf, _folders, st.sampled_from(["f", "f-", "f.1", "f1", "_f"])
)
_bodies = st.binary(max_size=20)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _names, _bodies, st.booleans()),
        st.tuples(st.just("get"), _names, st.integers(0, 25), st.integers(1, 10)),
        st.tuples(st.just("delete"), st.lists(_names, max_size=3)),
        st.tuples(st.just("list"), st.sampled_from(["", "d", "d/", "d-", "s1", "s1/", "f"])),
    ),
    max_size=30,
)


async def _same_as_a_dict(store: ObjectStore, operations: list[tuple]) -> None:
    model: dict[str, bytes] = {}
    for operation in operations:
        match operation:
            case "put", name, body, if_absent:
                if if_absent and name in model:
                    with pytest.raises(ObjectExists):
                        await store.put(name, body, if_absent=True)
                else:
                    await store.put(name, body, if_absent=if_absent)
                    model[name] = body
            case "get", name, start, length:
                try:
                    body = await store.get(name, ByteRange(start, start + length))
                    assert body == model[name][start : start + length]
                except ObjectNotFound:
                    assert name not in model
            case "delete", names:
                await store.delete(names)
                for name in names:
                    model.pop(name, None)
            case "list", prefix:
                found = {info.name: info.size async for info in store.list(prefix)}
                expected_names = sorted(name for name in model if name.startswith(prefix))
                assert list(found) == expected_names
                assert list(found.values()) == [len(model[name]) for name in expected_names]


@settings(deadline=None, max_examples=60)
@given(_operations)
def test_a_local_store_is_a_dict(operations: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_same_as_a_dict(LocalStore(directory), operations))


@settings(deadline=None, max_examples=40)
@given(_operations)
def test_a_memory_store_is_a_dict(operations: list[tuple]) -> None:
    asyncio.run(_same_as_a_dict(MemoryStore(), operations))


@settings(deadline=None, max_examples=40)
@given(_operations)
def test_a_sharded_store_of_prefixes_is_a_dict(operations: list[tuple]) -> None:
    bucket = uuid.uuid4().hex  # the objects of a name stay for as long as the process
    sharded = ShardedStore([MemoryStore(bucket, "one"), MemoryStore(bucket, "two/x")])
    asyncio.run(_same_as_a_dict(sharded, operations))
