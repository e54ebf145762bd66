"""Conversion of the rows that a processor yields to Arrow batches, as Spark's own worker builds them.

A ``Row`` or a dict is matched by name: what the schema does not know is left out, what is missing is null. A tuple is
matched by position (Spark refuses it). A naive datetime is taken as UTC, as Spark's worker takes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, Row, StructType, UserDefinedType

from dstl.errors import Invalid, brief, clip
from dstl.state.frames.output_checks import forbids_nulls, refuse_null

# PySpark 4.1 and 4.2 know no time zone here: they always mean UTC.
_IN_UTC = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
_FIELDS = attrgetter("__fields__")
MOST_BYTES = 1 << 30
"""Of one column of a batch: half of what the 32-bit offsets of text reach."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark takes rows of this schema from a Python worker."""
    return to_arrow_schema(schema, **_IN_UTC)


def arrow_schema_of(schema: StructType, what: str) -> pa.Schema:
    """Return the Arrow schema in which these columns cross between Spark and a Python worker.

    Args:
        schema: The columns.
        what: Names the operator and which of its columns they are, for messages.

    Raises:
        Invalid: Two columns of one name, or a type that does not cross (an interval of months, an array of void); names
            the column.
    """
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise Invalid(f"{what} has two columns {name!r}: rename one")
    for field in schema.fields:
        try:
            arrow_schema(StructType([field]))
        except (PySparkException, ValueError):  # the latter is Arrow's, of a void that may not be null
            raise Invalid(
                f"{what}'s column {field.name!r} is {field.dataType.simpleString()}, which Spark cannot bring to or "
                "from a Python worker: cast or drop it"
            ) from None
    return arrow_schema(schema)


class RowWriter:
    """Builds batches of one schema.

    Args:
        schema: The output schema.
        operator: For messages.
        most_rows: A batch has about so many.
        most_bytes: A column of a batch has at most so many, unless a row alone has more.
    """

    at_once = 64
    """Rows that are best given at once. Python keeps the memory of 80 dictionaries and as many lists for the next ones,
    and a ``Row`` has one of each: making one takes 0.7 us so, and 1.2 where thousands are alive."""

    def __init__(
        self, schema: StructType, operator: str, most_rows: int = 10_000, most_bytes: int = MOST_BYTES
    ) -> None:
        self.schema = arrow_schema(schema)
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._types = schema
        self._operator = operator
        self._names = tuple(schema.names)
        self._names_in_list = list(self._names)
        self._converters = [_converter(f.dataType) for f in schema.fields]
        self._forbids = [not f.nullable or forbids_nulls(f.dataType) for f in schema.fields]
        self._layouts: dict[tuple[str, ...], list[int | None]] = {}

    def batches(self, parts: Iterable[Sequence[Any]]) -> Iterator[pa.RecordBatch]:
        """Return these rows in batches; a batch more where a column is too large for one.

        Args:
            parts: The rows, some at a time; what is taken of each row is kept, not the row.

        Raises:
            Invalid: Something is not a row of the schema; names the operator, the column and both types.
        """
        count, columns = 0, self._no_rows()
        for rows in parts:
            for column, values in zip(columns, self._columns(rows), strict=True):
                column += values
            count += len(rows)
            if count >= self._most_rows:
                yield from self._built(count, columns)
                count, columns = 0, self._no_rows()
        if count:
            yield from self._built(count, columns)

    def batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """Return these rows, or no row, as one batch.

        Raises:
            Invalid: As :meth:`batches` does.
            ValueError: A column is too large for one batch.
        """
        (made,) = self._built(len(rows), list(map(list, self._columns(rows))))
        return made

    def _no_rows(self) -> list[list[Any]]:
        return [[] for _ in self._names]

    def _built(self, count: int, columns: list[list[Any]]) -> list[pa.RecordBatch]:
        arrays = []
        for name, values, field, convert, forbids in zip(
            self._names, columns, self.schema, self._converters, self._forbids, strict=True
        ):
            try:
                if convert is not None:
                    values = [None if one is None else convert(one) for one in values]
                array = pa.array(values, field.type)
            except (pa.ArrowException, TypeError, ValueError, AttributeError, AssertionError, OverflowError) as error:
                raise Invalid(
                    f"operator {self._operator!r} yielded a row whose column {name!r} is not "
                    f"{self._types[name].dataType.simpleString()}: {clip(error)}"
                ) from error
            if array.nbytes > self._most_bytes and count > 1:
                middle = count // 2
                halves = [column[:middle] for column in columns], [column[middle:] for column in columns]
                return [*self._built(middle, halves[0]), *self._built(count - middle, halves[1])]
            if forbids:
                refuse_null(array, self._types[name], self._operator)
            arrays.append(array)
        if not arrays:
            return [pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))]
        return [pa.RecordBatch.from_arrays(arrays, schema=self.schema)]

    def _columns(self, rows: Sequence[Any]) -> Sequence[Sequence[Any]]:
        if not rows:
            return self._no_rows()
        count = len(rows)
        try:
            # The usual cases, decided without a Python loop: every row has the output's fields in their order.
            if type(rows[0]) is tuple:
                usual = [*map(type, rows)].count(tuple) == count and [*map(len, rows)].count(len(self._names)) == count
            else:
                fields = [*map(_FIELDS, rows)]
                # Row(k=1) has its fields in a list, Row("k")(1) in a tuple.
                usual = fields.count(self._names_in_list) == count or fields.count(self._names) == count
            if usual:
                return list(zip(*rows, strict=True))
        except (AttributeError, TypeError, ValueError):
            pass
        return list(zip(*[self._values(row) for row in rows], strict=True))

    def _values(self, row: Any) -> Sequence[Any]:
        if isinstance(row, Row) and hasattr(row, "__fields__"):
            fields = tuple(row.__fields__)
            layout = self._layouts.get(fields)
            if layout is None:
                layout = [fields.index(n) if n in fields else None for n in self._names]
                if len(self._layouts) < 256:
                    self._layouts[fields] = layout
            return [None if i is None else tuple.__getitem__(row, i) for i in layout]
        if isinstance(row, dict):
            return [row.get(name) for name in self._names]
        if isinstance(row, (tuple, list)):
            if len(row) != len(self._names):
                raise Invalid(
                    f"operator {self._operator!r} yielded {len(row)} values for the {len(self._names)} output columns"
                )
            return row
        raise Invalid(
            f"operator {self._operator!r} yielded {type(row).__name__}: a Row-style processor yields pyspark.sql.Row; "
            "one that yields data frames is run by transformWithStateInPandas"
        )


def _converter(data_type: DataType) -> Callable[[Any], Any] | None:
    """Return what converts a value to one that Arrow takes; None for nothing."""
    if isinstance(data_type, StructType):
        inner = [(f.name, _converter(f.dataType)) for f in data_type.fields]

        def convert_struct(value: Any) -> dict[str, Any]:
            if isinstance(value, Row) and hasattr(value, "__fields__"):
                value = dict(zip(value.__fields__, value, strict=False))
            if isinstance(value, dict):
                parts = [value.get(name) for name, _ in inner]
            elif isinstance(value, (tuple, list)) and len(value) == len(inner):
                parts = list(value)
            else:
                raise TypeError(f"{brief(value)} is not a struct of {len(inner)} fields")
            return {
                name: part if convert is None or part is None else convert(part)
                for (name, convert), part in zip(inner, parts, strict=True)
            }

        return convert_struct
    if isinstance(data_type, ArrayType):
        element = _converter(data_type.elementType)
        return None if element is None else lambda value: [None if one is None else element(one) for one in value]
    if isinstance(data_type, MapType):
        key, item = _converter(data_type.keyType), _converter(data_type.valueType)

        def convert_map(value: Any) -> list[tuple[Any, Any]]:
            pairs = value.items() if isinstance(value, dict) else value
            return [(key(k) if key else k, v if item is None or v is None else item(v)) for k, v in pairs]

        return convert_map
    if isinstance(data_type, UserDefinedType):
        inner_converter = _converter(data_type.sqlType())
        if inner_converter is None:
            serialize: Callable[[Any], Any] = data_type.serialize
            return serialize
        return lambda value: inner_converter(data_type.serialize(value))
    if type(data_type).__name__ == "VariantType":
        return lambda value: {"value": value.value, "metadata": value.metadata} if hasattr(value, "metadata") else value
    return None
