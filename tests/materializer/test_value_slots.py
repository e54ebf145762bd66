"""Values of one length behave as a dictionary of them, however they are put and taken."""

from __future__ import annotations

import random

import numpy as np
import pytest

from materializer.tables.value_slots import ValueSlots, fixed_values

WIDTH = 3


def test_they_are_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    keys = [b"%d" % i for i in range(200)]
    slots, model = ValueSlots(WIDTH), dict[bytes, bytes]()
    copies: list[tuple[ValueSlots, dict[bytes, bytes]]] = []
    for _ in range(150):
        named = rng.choices(keys, k=rng.choice((1, 5, 300)))
        values = [rng.randbytes(WIDTH) for _ in named]
        match rng.randrange(5):
            case 0:
                there = [key for key in dict.fromkeys(named) if key in model]
                assert slots.pop_all(dict.fromkeys(named)) == there
                for key in there:
                    del model[key]
            case 1:
                slots[named[0]] = model[named[0]] = values[0]
            case 2 if named[0] in model:
                del slots[named[0]], model[named[0]]
            case 3:
                copies.append((slots.copy(), dict(model)))
            case _:
                new = sum(map(len, set(named) - model.keys()))
                assert slots.put_all(named, fixed_values(values, WIDTH)) == new
                model.update(zip(named, values, strict=True))
        assert slots == model
        assert slots.get_all(keys) == [model.get(key) for key in keys]
        assert [slots.get(key) for key in keys[:9]] == [model.get(key) for key in keys[:9]]
        out = np.zeros(len(keys), f"V{WIDTH}")
        there_now = slots.take(keys, out)
        assert [v if t else None for t, v in zip(there_now.tolist(), out.tolist(), strict=True)] == slots.get_all(keys)
    for copied, then in copies:
        assert copied == then


def test_what_is_deleted_gives_its_memory_back() -> None:
    slots = ValueSlots(8)
    keys = [b"%d" % i for i in range(10_000)]
    slots.put_all(keys, fixed_values([bytes(8)] * len(keys), 8))
    held = slots._values.nbytes
    slots.pop_all(keys[100:])
    assert slots._values.nbytes < held / 20
    assert list(slots) == keys[:100]
    for _ in range(50):
        slots.put_all(keys[100:150], fixed_values([b"12345678"] * 50, 8))
        slots.pop_all(keys[100:150])
    assert slots._values.nbytes < held / 20


def test_a_value_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes among values of 3"):
        ValueSlots(WIDTH)[b"k"] = b"1234"


def test_the_first_values_may_stay_where_they_are() -> None:
    values = fixed_values([b"%03d" % i for i in range(50)], WIDTH).copy()
    slots = ValueSlots(WIDTH)
    keys = [b"%d" % (i % 40) for i in range(50)]
    assert slots.adopt_all(keys, values) == sum(map(len, set(keys)))
    assert np.shares_memory(slots._values, values)
    model = dict(zip(keys, values.tolist(), strict=True))
    assert slots == model
    more = [b"more-%d" % i for i in range(30)]
    slots.put_all(more, fixed_values([b"new"] * 30, WIDTH))
    assert slots == model | dict.fromkeys(more, b"new")
    with pytest.raises(ValueError, match="not the first"):
        slots.adopt_all(keys, values)
    with pytest.raises(ValueError, match="read-only"):
        ValueSlots(WIDTH).adopt_all([b"k"], np.frombuffer(b"123", f"V{WIDTH}"))


def test_no_values_at_all_may_be_set_and_asked_for() -> None:
    """A group whose base holds nothing, or whose first change set does, is read as any other."""
    for put in (ValueSlots.put_all, ValueSlots.adopt_all):
        slots = ValueSlots(WIDTH)
        assert put(slots, [], np.zeros(0, f"V{WIDTH}")) == 0
        assert slots.get_all([b"k", b"l"]) == [None, None]
        assert not slots.take([b"k"], np.zeros(1, f"V{WIDTH}")).any()
        slots[b"k"] = b"123"
        assert slots.get_all([b"l", b"k"]) == [None, b"123"]
