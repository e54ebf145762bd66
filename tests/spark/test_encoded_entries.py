"""Rows of a state become the bytes that a processor of ours would have written, without Spark."""

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, LongType, StringType, StructType

from dstl.errors import Invalid
from dstl.spark.saved_state.entries import EntryEncoder, pack_key_groups
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import ValueCodec, write_time_ms
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.list_state import element_user_key
from dstl.state.registry import StateRegistry
from dstl.state.timers import expiry_user_key
from materializer.bases.key_group_file import decode_key_group

KEY = StructType().add("k", StringType()).add("j", LongType())
VALUE = StructType().add("n", LongType(), nullable=False).add("s", StringType())
USER_KEY = StructType().add("a", LongType())


def described(kind: StateKind, ttl_ms: int = 0) -> StateDescriptor:
    registry = StateRegistry(KEY)
    registry.declare("before", StateKind.VALUE, VALUE)
    value, user_key = (
        (StructType() if kind is StateKind.TIMER else VALUE),
        (USER_KEY if kind is StateKind.MAP else None),
    )
    return registry.declare("s", kind, value, user_key, ttl_ms)


def encoded(kind: StateKind, rows: list[dict[str, Any]], ttl_ms: int = 0) -> list[dict[str, Any]]:
    descriptor = described(kind, ttl_ms)
    encoder = EntryEncoder(descriptor, KEY, USER_KEY if kind is StateKind.MAP else None, descriptor.value_schemas[-1])
    return [row for batch in encoder([pa.RecordBatch.from_pylist(rows)]) for row in batch.to_pylist()]


def row(group: int, key: str | None, **more: Any) -> dict[str, Any]:
    return {"key_group": group, "key": {"k": key, "j": 7}} | more


def test_each_kind_has_the_user_keys_and_values_of_its_state() -> None:
    values, keys, user_keys = ValueCodec("s", [VALUE]), KeyCodec(KEY), KeyCodec(USER_KEY)
    five, none = {"n": 5, "s": "x"}, {"n": 6, "s": None}
    found = encoded(StateKind.VALUE, [row(3, "a", value=five), row(3, None, value=none)])
    assert found == [
        {"key_group": 3, "state": 1, "key": keys.encode(("a", 7)), "user_key": b"", "value": values.encode((5, "x"))},
        {"key_group": 3, "state": 1, "key": keys.encode((None, 7)), "user_key": b"", "value": values.encode((6, None))},
    ]
    found = encoded(StateKind.LIST, [row(3, "a", user_key=each, value=five) for each in (0, 1, 300)])
    assert [each["user_key"] for each in found] == [element_user_key(0, each) for each in (0, 1, 300)]
    found = encoded(
        StateKind.MAP, [row(3, "a", user_key={"a": None}, value=none), row(3, "a", user_key={"a": 4}, value=five)]
    )
    assert [each["user_key"] for each in found] == [user_keys.encode((None,)), user_keys.encode((4,))]
    found = encoded(StateKind.TIMER, [row(3, "a", user_key=-5), row(3, "a", user_key=1_700_000_000_000)])
    assert [(each["user_key"], each["value"]) for each in found] == [
        (expiry_user_key(-5), b""),
        (expiry_user_key(1_700_000_000_000), b""),
    ]


def test_a_value_was_written_its_time_to_live_before_it_ends_or_never_ends() -> None:
    first, second = encoded(
        StateKind.VALUE,
        [row(0, "a", value={"n": 5, "s": "x"}, ends=90_000), row(0, "b", value={"n": 6, "s": "y"}, ends=None)],
        ttl_ms=60_000,
    )
    codec = ValueCodec("s", [VALUE])
    assert (write_time_ms(first["value"]), codec.decode(first["value"])) == (30_000, (5, "x"))
    assert (write_time_ms(second["value"]), codec.decode(second["value"])) == (None, (6, "y"))


def test_two_entries_of_one_place_are_refused_by_the_name_of_their_state() -> None:
    rows = [{**row(2, None, value={"n": i, "s": None}), "key": {"d": d}} for i, d in enumerate((0.5, 0.0, -0.0))]
    key, registry = StructType().add("d", DoubleType()), StateRegistry(KEY)
    encoder = EntryEncoder(registry.declare("s", StateKind.VALUE, VALUE), key, None, VALUE)
    entries = list(encoder([pa.RecordBatch.from_pylist(rows)]))
    with pytest.raises(Invalid, match=r"state 's': two rows have the same key.* 0\.0 and -0\.0 are one key"):
        list(pack_key_groups({0: "s"}, entries))


def test_key_groups_are_packed_whole_whatever_the_batches_that_they_come_in() -> None:
    rows = [row(group, f"k{i}", value={"n": i, "s": None}) for group in (2, 5, 9) for i in range(4)]
    entries = pa.Table.from_pylist(encoded(StateKind.VALUE, rows))
    schema = pa.schema(
        [
            ("key_group", pa.int32()),
            ("state", pa.int32()),
            *((each, pa.binary()) for each in ("key", "user_key", "value")),
        ]
    )
    packed = [
        batch.to_pylist()[0] for batch in pack_key_groups({1: "s"}, entries.cast(schema).to_batches(max_chunksize=3))
    ]
    assert [(each["key_group"], each["entries"]) for each in packed] == [(2, 4), (5, 4), (9, 4)]
    for each in packed:
        pages = list(decode_key_group(each["data"], each["key_group"]))
        assert sum(page.num_rows for page in pages) == 4
