import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_CLEAR
from dstl.state.overlay import Overlay
from worlds.memory_source import MemorySource

POINT, ENTRIES = 0, 1
KEYS = [b"a", b"b", b"c", b""]


def group_of(key):
    return len(key) * 7 + 3 * key.count(b"a")


write = st.one_of(
    st.tuples(st.just("point"), st.sampled_from(KEYS), st.none() | st.binary(max_size=3)),
    st.tuples(
        st.just("entry"), st.sampled_from(KEYS), st.sampled_from([b"u", b"v"]), st.none() | st.binary(max_size=3)
    ),
    st.tuples(st.just("clear"), st.sampled_from(KEYS)),
    st.tuples(st.just("drain")),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(write, max_size=25), st.lists(write, max_size=25))
def test_applying_what_was_drained_gives_what_was_written(before, after):
    source, points, entries = MemorySource(), {}, {}
    for batch in (before, after):
        overlay = Overlay()

        def drain(overlay=overlay):
            for part in overlay.drain():
                assert part.schema == CHANGE_SCHEMA
                groups = part.column("key_group").to_pylist()
                assert groups == sorted(groups)
                places = list(zip(*(part.column(i).to_pylist() for i in (1, 3, 4)), strict=True))
                clears = part.column("op").to_pylist()
                written = [p for p, op in zip(places, clears, strict=True) if op != OP_CLEAR]
                assert len(written) == len(set(written)), "one change for each place"
                source.apply(part)

        for kind, *rest in batch:
            if kind == "point":
                key, value = rest
                overlay.put_values(POINT, [group_of(key)], [key], [value])
                points[key] = value
            elif kind == "entry":
                key, user_key, value = rest
                overlay.entry_writes(ENTRIES, group_of(key), key).entries[user_key] = value
                entries.setdefault(key, {})[user_key] = value
            elif kind == "clear":
                (key,) = rest
                writes = overlay.entry_writes(ENTRIES, group_of(key), key)
                writes.cleared = True
                writes.entries.clear()
                entries[key] = {}
            else:
                drain()
            seen = [None] * len(KEYS)
            overlay.overlay_values(POINT, KEYS, seen)
            base = source.fetch_many([POINT], [group_of(k) for k in KEYS], KEYS)[0]
            assert [s if s is not None else None for s in seen] == [
                points.get(k) if any(r[1] == k for r in batch if r[0] == "point") and s is not None else s
                for k, s in zip(KEYS, seen, strict=True)
            ]
            assert len(base) == len(KEYS)
        for key in KEYS:
            cleared, own = overlay.written_entries(ENTRIES, key)
            stored = {} if cleared else dict(source.fetch_entries(ENTRIES, [group_of(key)], [key], 1 << 20)[0])
            stored.update(own)
            live = {u: v for u, v in entries.get(key, {}).items() if v is not None}
            assert {u: v for u, v in stored.items() if v is not None} == live
        drain()
        assert overlay.drain() == []
        assert overlay.nbytes == 0
    assert source.content(POINT) == {(k, b""): v for k, v in points.items() if v is not None}
    assert source.content(ENTRIES) == {
        (k, u): v for k, of_key in entries.items() for u, v in of_key.items() if v is not None
    }


def test_a_large_change_set_is_cut_into_batches_that_fit_a_frame():
    overlay = Overlay()
    keys = [b"%d" % i for i in range(20)]
    overlay.put_values(0, [i % 3 for i in range(20)], keys, [bytes(5 << 20)] * 20)
    parts = overlay.drain()
    assert len(parts) > 1
    assert sum(part.num_rows for part in parts) == 20
    assert all(part.nbytes < 64 << 20 for part in parts)
    groups = pa.Table.from_batches(parts).column("key_group").to_pylist()
    assert groups == sorted(groups)


def test_what_was_drained_is_forgotten_but_for_keys_that_are_still_to_be_read():
    overlay = Overlay()
    overlay.put_values(0, [1, 1], [b"k", b"held"], [b"v", b"v"])
    overlay.entry_writes(1, 1, b"held").entries[b"u"] = b"1"
    overlay.entry_writes(1, 1, b"k").entries[b"u"] = b"1"
    first = pa.Table.from_batches(overlay.drain({b"held"}))
    values = [b"base", b"base"]
    overlay.overlay_values(0, [b"k", b"held"], values)
    assert values == [b"base", b"v"]
    assert overlay.written_entries(1, b"k") == (False, {})
    assert overlay.written_entries(1, b"held") == (False, {b"u": b"1"})
    rest = pa.Table.from_batches(overlay.drain())
    assert first.column("key").to_pylist() == [b"k", b"k"]
    assert rest.column("key").to_pylist() == [b"held", b"held"]
    assert overlay.drain() == []
