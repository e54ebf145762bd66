"""Every call and every reply: what one side encodes, the other decodes, and nothing else."""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.errors import CorruptData, Invalid
from dstl.rpc import fleet_messages, messages
from dstl.rpc.client import Address
from dstl.rpc.codec import CALL, Call, Message, Payload, decode_message, encode_message, reply_of
from dstl.rpc.protocol import Framing, Secret
from dstl.runtime import SystemClock
from dstl.store.memory import MemoryStore
from dstl.taskmanager.service import TaskManagerService
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializationReport
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from materializer.restore.progress import RestoreStatus
from tests.simulation.virtual_time import seeded_runtime
from worlds.service import coordinator

ALL = [
    kind
    for module in (messages, fleet_messages)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
]
CALLS: list[type[Call[Any]]] = [kind for kind in ALL if issubclass(kind, Call) and isinstance(kind.reply, type)]
REPLIES = [kind for kind in ALL if not issubclass(kind, Call)]
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    str: st.text(max_size=9),
    bytes: st.binary(max_size=9),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    KeyGroupRange: st.tuples(st.integers(0, 9), st.integers(10, 20)).map(lambda two: KeyGroupRange(*two)),
    SequenceNumberRange: st.tuples(st.integers(0, 9), st.integers(10, 20)).map(lambda two: SequenceNumberRange(*two)),
    MaterializationReport: st.integers(0, 9).map(
        lambda n: MaterializationReport(
            operator="op", checkpoint=n, first_key_group=0, last_key_group=1, unchanged=((0, n), (1, n))
        )
    ),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return the values of an annotation."""
    if typing.get_origin(hint) is typing.Annotated:
        return values_of(typing.get_args(hint)[0])
    if hint in SIMPLE:
        return SIMPLE[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if args:
        return st.one_of([values_of(each) for each in args])
    return instances(hint)


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Return the instances of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {
        field.name: SIMPLE[bytes] if hints[field.name] == Payload else values_of(hints[field.name])
        for field in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)


def through_a_frame(header: dict[str, Any], payload: Payload) -> tuple[dict[str, Any], memoryview]:
    frame = b"".join(Framing().encode(header, payload))
    return Framing().decode(frame[4:])


def decode(kind: type[Any], header: dict[str, Any], payload: memoryview) -> Any:
    assert not issubclass(kind, Call) or header.pop(CALL) == kind.name
    return decode_message(kind, header, payload)


def refused(kind: type[Any]) -> type[Exception]:
    return Invalid if issubclass(kind, Call) else CorruptData


@pytest.mark.parametrize("kind", [*CALLS, *REPLIES], ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_a_message_comes_as_it_was_sent(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    came = decode(kind, *through_a_frame(*encode_message(message)))
    assert came == message
    assert dataclasses.is_dataclass(kind)
    assert not hasattr(came, "__dict__")
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(came, field.name, None)


@pytest.mark.parametrize("kind", [*CALLS, *REPLIES], ids=lambda kind: kind.__name__)
@settings(max_examples=4)
@given(data=st.data())
def test_a_message_with_a_field_less_or_more_or_of_another_type_is_refused(
    kind: type[Any], data: st.DataObject
) -> None:
    header, payload = through_a_frame(*encode_message(data.draw(instances(kind))))
    header.pop(CALL, None)
    call = {CALL: kind.name} if issubclass(kind, Call) else {}
    for name in header:
        less = {other: value for other, value in header.items() if other != name}
        with pytest.raises(refused(kind), match=f"{kind.__name__} has no field '{name}'"):
            decode(kind, {**less, **call}, payload)
        for value in ([[["a list of lists"]]], {b"a": "map"}):
            with pytest.raises(refused(kind), match=f"{kind.__name__} has a field '{name}' that is malformed"):
                decode(kind, {**header, name: value, **call}, payload)
    with pytest.raises(refused(kind), match=f"{kind.__name__} has a field 'strange' that is unknown"):
        decode(kind, {**header, "strange": 1, **call}, payload)
    hints = typing.get_type_hints(kind, include_extras=True)
    bulk = [
        field.name for field in dataclasses.fields(kind) if typing.get_origin(hints[field.name]) is typing.Annotated
    ]
    if bulk:
        for rubbish in (b"", b"\xc1", b"\x90", msgpack.packb([5] * len(bulk)), msgpack.packb([[[]]] * (1 + len(bulk)))):
            with pytest.raises(
                refused(kind), match=f"{kind.__name__} has a field '({'|'.join(bulk)})' that is malformed"
            ):
                decode(kind, {**header, **call}, memoryview(rubbish))
    elif not any(hints[field.name] == Payload for field in dataclasses.fields(kind)):
        with pytest.raises(refused(kind), match=f"{kind.__name__} has a payload of 1 bytes"):
            decode(kind, {**header, **call}, memoryview(b"x"))


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        (messages.OpenAttempt, "batch", True),
        (messages.OpenAttempt, "batch", 1.0),
        (messages.OpenAttempt, "batch", None),
        (messages.OpenAttempt, "operator", b"op"),
        (messages.Acknowledgement, "broadcast", "text"),
        (messages.Begun, "assignments", [[[0, 1], ["host", 1]]]),
        (messages.Begun, "assignments", [[[5, 4], ["host", 1, ""]]]),
        (messages.FetchMany, "states", [1, "2"]),
        (fleet_messages.Resume, "key_groups", [0, 1, 2]),
        (fleet_messages.Persist, "winners", {"op": 5}),
        (fleet_messages.Persist, "winners", {5: [5]}),
        (fleet_messages.Resumed, "resumed", 1),
        (fleet_messages.Complete, "located", {"seal": ["name", 1, 2]}),
        (fleet_messages.Persisted, "materializations", [{"operator": "op"}]),
    ],
)
def test_types_are_exact(kind: type[Any], field: str, wrong: object) -> None:
    samples: dict[type[Any], Callable[[], Any]] = {
        messages.OpenAttempt: lambda: messages.OpenAttempt("op", 1, 2, None, 4),
        messages.Acknowledgement: lambda: messages.Acknowledgement(
            messages.TaskAttempt("q", "r", "op", 1, 2, 3, 4), 1, broadcast=b"digest"
        ),
        messages.Begun: messages.Begun,
        messages.FetchMany: lambda: messages.FetchMany("op", 1, (1, 2), (5, 5), (b"a", b"b")),
        fleet_messages.Resume: lambda: fleet_messages.Resume("q", None, KeyGroupRange(0, 1)),
        fleet_messages.Resumed: lambda: fleet_messages.Resumed(True, "w"),
        fleet_messages.Persist: lambda: fleet_messages.Persist({"op": (1,)}, 5),
        fleet_messages.Complete: lambda: fleet_messages.Complete({"s": SegmentHandle("n", 1, 2)}),
        fleet_messages.Persisted: lambda: fleet_messages.Persisted((), ()),
    }
    header, payload = through_a_frame(*encode_message(samples[kind]()))
    assert decode(kind, dict(header), payload) == samples[kind]()
    with pytest.raises(refused(kind), match=f"{kind.__name__} has a field '{field}' that is malformed"):
        decode(kind, {**header, field: wrong}, payload)


def test_a_payload_is_not_packed() -> None:
    payload = memoryview(bytearray(b"large"))
    header, sent = encode_message(messages.FetchValues("op", 1, 1, payload))
    assert sent is payload
    assert b"large" not in msgpack.packb(header)


def test_every_call_has_a_name_a_role_a_reply_and_one_handler() -> None:
    assert len({kind.name for kind in CALLS}) == len(CALLS) == 23
    for kind in CALLS:
        assert kind.role is not None, kind
        assert reply_of(kind) in REPLIES
    runtime, secret = seeded_runtime(1, SystemClock()), Secret.generate()
    task_manager = TaskManagerService(lambda query: None, MemoryStore(), runtime, secret)  # type: ignore[arg-type,return-value]
    servers = coordinator(MemoryStore(), runtime, secret).server, task_manager.server
    handled = [kind for server in servers for kind, _ in server._handlers.values()]
    assert sorted(kind.name for kind in handled) == sorted(kind.name for kind in CALLS)
    assert set(handled) == set(CALLS)


@pytest.mark.parametrize("nested", [Address, RestoreStatus, messages.TaskAttempt, messages.Assignment])
def test_a_nested_value_is_a_list_of_its_fields(nested: type[Any]) -> None:
    """So that a small message stays small; its order is a part of the protocol's version."""
    names = [field.name for field in dataclasses.fields(nested)]
    assert (
        names
        == {
            "Address": ["host", "port", "path"],
            "RestoreStatus": ["done", "total", "seconds", "rate", "eta_s", "operators", "finished"],
            "TaskAttempt": [
                "query_id",
                "run_id",
                "operator",
                "batch_id",
                "slot",
                "stage_id",
                "attempt_id",
                "invocation",
            ],
            "Assignment": ["key_groups", "address"],
        }[nested.__name__]
    )
