"""What of the user's values gets into an error: enough to find one, and no copy of it."""

import pytest

from dstl.errors import clipped, shown


@pytest.mark.parametrize(
    "value",
    [
        "x" * 50_000_000,
        b"x" * 50_000_000,
        bytearray(50_000_000),
        ["x" * 1_000_000] * 1_000,
        dict.fromkeys(range(1000), "x" * 1000),
        [[[[["deep"] * 100] * 100] * 100] * 100],
        10**5_000,
        ValueError("x" * 1_000_000),
        range(10**9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_value_makes_a_message_long(value):
    assert len(shown(value)) < 260
    assert type(value) in (int, bytes, bytearray) or len(clipped(value)) < 260


@pytest.mark.parametrize("value", ["a'b", b"\x00", None, 5, 1.5, ("k", 1), {"a": [1, 2]}, ["x"] * 3, set()])
def test_a_short_value_is_shown_as_it_is(value):
    assert shown(value) == repr(value)


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    assert "Broken" in shown(Broken())
    assert "Broken" in shown([Broken()])
