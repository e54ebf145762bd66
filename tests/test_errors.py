"""What of the user's values gets into an error: enough to find one, and no copy of it."""

import pytest

from dstl.errors import Invalid, brief, clip, error_to_wire
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import ValueCodec
from worlds.ddl import parse_ddl


@pytest.mark.parametrize(
    "value",
    [
        "x" * 50_000_000,
        b"x" * 50_000_000,
        bytearray(50_000_000),
        ["x" * 1_000_000] * 10,
        dict.fromkeys(range(1000), "x" * 1000),
        [[[["deep"] * 100] * 100] * 10],
        10**5_000,
        ValueError("x" * 1_000_000),
        range(10**9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_value_makes_a_message_long(value):
    assert len(brief(value)) < 260
    assert type(value) in (int, bytes, bytearray) or len(clip(value)) < 260


@pytest.mark.parametrize("value", ["a'b", b"\x00", None, 5, 1.5, ("k", 1), {"a": [1, 2]}, ["x"] * 3, set()])
def test_a_short_value_is_shown_as_it_is(value):
    assert brief(value) == repr(value)


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    assert "Broken" in brief(Broken())
    assert "Broken" in brief([Broken()])


@pytest.mark.parametrize("kind", ["int", "double", "boolean", "date", "timestamp", "decimal(10,2)", "array<int>"])
def test_a_wrong_value_of_megabytes_makes_no_error_of_megabytes(kind):
    """Before, a wrong string of 50 MB gave an error of 50,018,031 characters."""
    schema = parse_ddl(f"f {kind}")
    for value in ("x" * 5_000_000, ["y" * 5_000_000], 10**10_000 if kind == "int" else "z" * 5_000_000):
        with pytest.raises(Invalid, match="column 'f' of state 'total'") as caught:
            ValueCodec("total", (schema,)).encode((value,))
        assert len(str(caught.value)) < 600
        if "array" not in kind:
            with pytest.raises(Invalid) as caught:
                KeyCodec(schema).encode((value,))
            assert len(str(caught.value)) < 600


def test_no_error_is_long_on_the_wire_and_one_of_memory_says_memory():
    assert len(error_to_wire(Invalid("x" * 10_000_000))[1]) <= 1 << 16
    assert len(error_to_wire(ValueError("x" * 10_000_000))[1]) < 300
    assert error_to_wire(MemoryError())[0] == "Unavailable"
    assert "memory" in error_to_wire(MemoryError())[1]
