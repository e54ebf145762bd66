import datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.state.frames.row_reader import python_values, row_class, rows_of

ZONES = [None, "UTC", "+00:00", "America/New_York", "Europe/London", "Australia/Lord_Howe", "Asia/Kolkata", "+05:30"]
INSTANTS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999) | st.integers(-(10**15), 2 * 10**15)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.none() | INSTANTS, max_size=4), st.sampled_from(ZONES))
def test_timestamps_are_what_arrow_makes_one_by_one(instants, zone):
    column = pa.array(instants, pa.timestamp("us", zone))
    try:
        expected = [one.as_py() for one in column]
    except (ValueError, OverflowError) as error:  # year 0 or 10000 in the zone
        with pytest.raises(type(error)):
            python_values(column)
        return
    found = python_values(column)
    assert found == expected
    assert [repr(one) for one in found] == [repr(one) for one in expected]


def test_the_hour_that_comes_twice():
    first = 1604206800 * 10**6  # 2020-11-01 05:00 UTC: 01:00 in New York, for the first time
    column = pa.array([first, first + 3600 * 10**6], pa.timestamp("us", "America/New_York"))
    one, two = python_values(column)
    assert (one.hour, one.fold, two.hour, two.fold) == (1, 0, 1, 1)
    assert two.timestamp() - one.timestamp() == 3600


@settings(deadline=None, max_examples=50)
@given(st.lists(st.none() | st.dates(datetime.date.min, datetime.date.max), max_size=4))
def test_dates_are_what_arrow_makes_one_by_one(dates):
    assert python_values(pa.array(dates, pa.date32())) == dates


def test_a_row_with_two_columns_of_one_name_is_read_as_pysparks():
    (row,) = rows_of(("a", "a", "class", "x y"), [[1], [2], [3], [4]])
    assert (row.a, row["a"], row[1], row["x y"], getattr(row, "class")) == (1, 1, 2, 4, 3)
    assert repr(row) == "Row(a=1, a=2, class=3, x y=4)"
    assert row_class(("a",)) is row_class(("a",))
