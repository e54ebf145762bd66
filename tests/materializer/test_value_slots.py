"""Values of one length behave as a dictionary of them, however they are put and taken."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from materializer.tables import key_column, value_slots
from materializer.tables.key_column import KeyColumn
from materializer.tables.key_places import KeyDictionary
from materializer.tables.value_slots import ValueSlots, fixed_values

WIDTH = 3


@pytest.mark.parametrize("fewest", [4, 150, 1 << 10], ids=["side by side", "both", "dictionary"])
def test_they_are_a_dictionary(rng: random.Random, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lengths keys have, and whether they lie side by side or not."""
    monkeypatch.setattr(value_slots, "FEWEST_SIDE_BY_SIDE", fewest)
    for length in (1, 3, 8, 13, 16, 21):
        keys = list({rng.randbytes(length) for _ in range(rng.choice((30, 200, 600)))})
        others = [b"", b"another length", *keys[:3]] if rng.random() < 0.3 else []
        slots, model = ValueSlots(WIDTH), dict[bytes, bytes]()
        copies: list[tuple[ValueSlots, dict[bytes, bytes]]] = []
        for _ in range(50):
            named = rng.choices(keys, k=rng.choice((1, 5, 40, 300)))
            if others and rng.random() < 0.05:
                named += others
            asked = fixed_values(named, length) if not others and rng.random() < 0.5 else named
            values = [rng.randbytes(WIDTH) for _ in named]
            match rng.randrange(5):
                case 0:
                    there = set(named) & model.keys()
                    assert slots.pop_all(asked) == sum(map(len, there))
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
                    assert slots.put_all(asked, fixed_values(values, WIDTH)) == new
                    model.update(zip(named, values, strict=True))
            assert slots == model
            wanted = [*keys, b"missing", b"", *others]
            assert slots.get_all(wanted) == [model.get(key) for key in wanted]
            assert slots.get_all(wanted[-4:]) == [model.get(key) for key in wanted[-4:]]
            assert [slots.get(key) for key in wanted[:9]] == [model.get(key) for key in wanted[:9]]
            out = np.zeros(len(wanted), f"V{WIDTH}")
            held = slots.take(wanted, out)
            assert [v if t else None for t, v in zip(held.tolist(), out.tolist(), strict=True)] == slots.get_all(wanted)
        for copied, then in copies:
            assert copied == then


@pytest.mark.parametrize("length", [4, 8, 20])
def test_keys_cannot_be_chosen_that_slow_it_down(length: int) -> None:
    """Keys that differ in their lowest, their middle or their highest bits alone have short chains."""
    for position in range(length - 1):
        ids = np.arange(60_000, dtype="<u2").view(np.uint8).reshape(-1, 2)
        keys = np.zeros((len(ids), length), np.uint8)
        keys[:, position : position + 2] = ids
        column = KeyColumn(length)
        column.put(keys.view(f"V{length}").ravel())
        chains = np.bincount(column._hashed(column._keys[: len(ids)]), minlength=len(column._buckets))
        # A key is behind half of the others in its chain: behind less than one mostly, behind 30,000 in one chain.
        assert (chains * (chains - 1) / 2).sum() / len(ids) < 100, position


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


@pytest.mark.parametrize("width", [8, 11])
def test_no_key_is_lost_where_no_factors_make_short_chains(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw in some hundred makes a long chain of numbers in a row, so all of them may."""
    monkeypatch.setattr(key_column, "_LONG_CHAIN", 0)
    keys = [b"%0*d" % (width, i) for i in range(5000)]
    model = {key: key[-WIDTH:] for key in keys}
    slots = ValueSlots(WIDTH)
    slots.put_all(keys[:2000], fixed_values(list(model.values())[:2000], WIDTH))
    for key in keys[2000:4000]:
        slots[key] = model[key]
    slots.put_all(keys[4000:], fixed_values(list(model.values())[4000:], WIDTH))
    assert slots.get_all(keys) == list(model.values())
    assert slots.pop_all(keys) == len(keys) * width
    assert not slots


def test_what_is_deleted_one_by_one_gives_its_memory_back() -> None:
    """As what has expired is."""
    keys = [b"%08d" % i for i in range(20_000)]
    tracemalloc.start()
    slots = ValueSlots(16)
    slots.put_all(fixed_values(keys, 8), np.zeros(len(keys), "V16"))
    held = tracemalloc.get_traced_memory()[0]
    for key in keys[500:]:
        del slots[key]
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert slots == dict.fromkeys(keys[:500], bytes(16))
    assert left < held / 4, (left, held)


def test_long_keys_are_not_hashed_word_by_word(rng: random.Random) -> None:
    """One of 1,024 bytes would take 100 times as long as in a dictionary."""
    for length, kind in ((64, KeyColumn), (65, KeyDictionary), (1024, KeyDictionary)):
        model = {rng.randbytes(length): rng.randbytes(WIDTH) for _ in range(2000)}
        keys = list(model)
        slots = ValueSlots(WIDTH)
        for part in (keys[:500], keys[500:]):
            slots.put_all(fixed_values(part, length), fixed_values([model[key] for key in part], WIDTH))
        assert isinstance(slots._places, kind)
        assert slots == model
        assert slots.pop_all(fixed_values(keys[:1700], length)) == 1700 * length
        assert slots == {key: model[key] for key in keys[1700:]}


@pytest.mark.parametrize("before", [0, 2000])
def test_a_key_that_comes_often_takes_memory_once(before: int) -> None:
    keys = [b"%08d" % i for i in range(before)]
    slots = ValueSlots(16)
    slots.put_all(keys, np.zeros(before, "V16"))
    often = fixed_values([b"hot-%04d" % (i % 7) for i in range(60_000)], 8)
    tracemalloc.start()
    assert slots.put_all(often, np.zeros(len(often), "V16")) == 7 * 8
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert slots == dict.fromkeys([*keys, *often.tolist()], bytes(16))
    assert taken < 400_000, taken


def test_a_value_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4 bytes among values of 3"):
        ValueSlots(WIDTH)[b"k"] = b"1234"


def test_the_first_values_may_stay_where_they_are() -> None:
    values = fixed_values([b"%03d" % i for i in range(50)], WIDTH).copy()
    keys = [b"%d" % i for i in range(50)]
    for owned in (True, False):
        slots = ValueSlots(WIDTH)
        assert slots.put_all(keys, values, owned=owned) == sum(map(len, keys))
        assert np.shares_memory(slots._values, values) == owned
    model = dict(zip(keys, values.tolist(), strict=True))
    assert slots == model
    more = [b"more-%d" % i for i in range(30)]
    slots.put_all(more, fixed_values([b"new"] * 30, WIDTH), owned=True)
    assert slots == model | dict.fromkeys(more, b"new")


def test_of_a_repeated_key_the_last_value_stays() -> None:
    for keys in ([b"%d" % (i % 30) for i in range(50)], [b"%04d" % (i % 1500) for i in range(4000)]):
        slots = ValueSlots(WIDTH)
        mine = fixed_values([b"%03d" % (i % 1000) for i in range(len(keys))], WIDTH)
        assert slots.put_all(keys, mine) == sum(map(len, set(keys)))
        assert slots == dict(zip(keys, mine.tolist(), strict=True))


def test_no_values_at_all_may_be_set_and_asked_for() -> None:
    """A group whose base holds nothing, or whose first change set does, is read as any other."""
    for owned in (True, False):
        slots = ValueSlots(WIDTH)
        assert slots.put_all([], np.zeros(0, f"V{WIDTH}"), owned=owned) == 0
        assert slots.get_all([b"k", b"l"]) == [None, None]
        assert not slots.take([b"k"], np.zeros(1, f"V{WIDTH}")).any()
        slots[b"k"] = b"123"
        assert slots.get_all([b"l", b"k"]) == [None, b"123"]


def test_many_keys_of_one_length_take_no_object_each(rng: random.Random) -> None:
    keys = list({rng.randbytes(8) for _ in range(50_000)})
    tracemalloc.start()
    slots = ValueSlots(16)
    slots.put_all(fixed_values(keys, 8), np.zeros(len(keys), "V16"))
    taken = tracemalloc.get_traced_memory()[0] / len(keys)
    tracemalloc.stop()
    assert slots.get(keys[7]) == bytes(16)
    assert taken < 60, taken
