"""A null that the output's schema rules out is refused, wherever in a value it is: Spark itself would take it."""

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, IntegerType, MapType, StringType, StructField, StructType

from dstl.errors import Invalid
from dstl.state.frames.frame_writer import FrameWriter
from dstl.state.frames.row_writer import RowWriter

INNER = StructType([StructField("x", IntegerType(), False), StructField("y", StringType())])


def schema(kind, nullable=True):
    return StructType([StructField("k", StringType()), StructField("v", kind, nullable)])


CASES = [
    (schema(IntegerType(), False), 1, None, "column 'v'"),
    (schema(StringType(), False), "", None, "column 'v'"),
    (schema(INNER), {"x": 1, "y": None}, {"x": None, "y": "a"}, ".x of column 'v'"),
    (schema(ArrayType(IntegerType(), False)), [1], [1, None], "[] of column 'v'"),
    (schema(ArrayType(INNER)), [None, {"x": 1, "y": None}], [{"x": None, "y": None}], "[].x of column 'v'"),
    (schema(MapType(StringType(), IntegerType(), False)), {"a": 1}, {"a": 1, "b": None}, "[] of column 'v'"),
    (
        schema(MapType(StringType(), StructType([StructField("l", ArrayType(StringType(), False))]))),
        {"a": None, "b": {"l": None}, "c": {"l": ["z"]}},
        {"a": None, "b": {"l": ["z", None]}},
        "[].l[] of column 'v'",
    ),
]


@pytest.mark.parametrize(("of", "right", "wrong", "where"), CASES)
@pytest.mark.parametrize("style", ["row", "pandas"])
def test_a_null_that_the_schema_rules_out_is_refused_and_no_other(of, right, wrong, where, style):
    def write(*values):
        if style == "row":
            return RowWriter(of, "op").batches([Row(k=None, v=value) for value in values])
        return FrameWriter(of, "op").batches([pd.DataFrame({"k": [None], "v": [value]}) for value in values])

    rights = [right, None, right] if of["v"].nullable else [right, right]
    (batch,) = write(*rights)
    assert batch.num_rows == len(rights)
    for values in ([wrong], [right, wrong], [wrong, right]):
        with pytest.raises(Invalid) as raised:
            write(*values)
        assert f"operator 'op' yielded a null in {where}, which is NOT NULL" in str(raised.value)
