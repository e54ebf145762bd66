"""Groups of Spark's own aggregations, read as what ours keep.

Spark's state names its columns by their functions alone: two sums are both ``sum``. So whoever moves it says what the
query's aggregates are, in their order. The types are those of Spark's columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DataType, DecimalType, DoubleType, LongType, StructField, StructType

from dstl.errors import Invalid, named
from dstl.spark.migration.operator_reader import OperatorReader
from dstl.spark.query.placement import key_group_of
from dstl.spark.saved_state.entries import StateFrame
from dstl.state.vectorised.aggregate_functions import DecimalSum, Extreme
from dstl.state.vectorised.aggregation import WINDOW_END, WINDOW_START, Aggregate, state_fields

_COLUMNS = {
    "count": ("count",),
    "sum": ("sum",),
    "mean": ("sum", "count"),
    "min": ("min",),
    "max": ("max",),
    "first": ("first", "valueSet"),
    "last": ("last", "valueSet"),
}
"""Spark's columns of the functions whose accumulators are the same here."""
_IS_EMPTY = "isEmpty"
_WINDOW = "spark.timeWindow"
"""In the metadata of a grouping column that is a window."""
_FEW_DIGITS: dict[str, tuple[int, type[DataType]]] = {"sum": (8, LongType), "mean": (11, DoubleType)}
"""Digits of decimals up to which Spark adds them up as whole numbers, and of which type."""
_EXACT = 1 << 53
"""Whole numbers up to here are doubles."""
_DIGITS = 19
"""Those of the largest long."""
_EXPRESSION = "_groupingexpression"
"""Spark's name of a grouping column that is an expression, whatever the query calls it."""


@dataclass(frozen=True, slots=True)
class HeldAggregate:
    """One aggregate and its columns in Spark's state.

    Attributes:
        fields: Its columns here.
        position: That of its first column there.
        may_overflow: Spark's sum of decimals, which is null behind an overflow too.
        scale: Digits behind the point, where Spark keeps the sum of decimals as a number without a point.
    """

    fields: tuple[StructField, ...]
    position: int
    may_overflow: bool
    scale: int | None = None


@dataclass(frozen=True, slots=True)
class NamedAggregation:
    """The part of an aggregation that Spark's state does not say.

    Attributes:
        aggregates: By the output column, in the old query's order. Spark keeps one that is there twice once.
        types: Of aggregated columns, as far as they are decimals whose sums Spark keeps without a point.
        keys: Names of the grouping columns, without the window; empty for those that Spark has.
        output_mode: The query's.
    """

    aggregates: Mapping[str, Aggregate]
    types: Mapping[str, DataType] = field(default_factory=dict)
    keys: Sequence[str] = ()
    output_mode: str = "update"


def held_aggregates(where: str, held: StructType, named: NamedAggregation) -> list[HeldAggregate]:
    """Return which columns of Spark's state are which aggregate. Pure.

    Args:
        where: The operator, for messages.
        held: Columns of Spark's state, without the key's.
        named: The rest of the aggregation.

    Raises:
        Invalid: They do not fit together, or an aggregate has no counterpart; shows both sides.
    """
    known: dict[Aggregate, HeldAggregate] = {}
    found = []
    at = 0
    for name, each in named.aggregates.items():
        if each.function not in _COLUMNS:
            raise Invalid(f"{where}: {name}={each} cannot be moved: DSTL does not keep it as Spark does")
        before = known.get(each)
        if before is not None:
            found.append(replace(before, fields=_fields(name, each, before.fields, named.output_mode)))
            continue
        expected = _COLUMNS[each.function]
        columns = held.fields[at : at + len(expected)]
        of = named.types.get(each.column or "")
        scale = _scale_without_point(where, name, each, of, columns)
        is_decimal = bool(columns) and isinstance(columns[0].dataType, DecimalType)
        expected += (_IS_EMPTY,) if is_decimal and each.function == "sum" else ()
        if tuple(held.names[at : at + len(expected)]) != expected:
            raise _mismatch(where, held, named.aggregates)
        _check_types(where, name, each, [column.dataType for column in columns])
        if scale is not None:
            assert of is not None
            columns = [StructField("sum", DecimalSum(of).result), *columns[1:]]
        may_overflow = is_decimal and each.function in ("sum", "mean")
        if may_overflow or scale is not None:
            columns = [columns[0], StructField("lost", BooleanType()), *columns[1:]]
        known[each] = HeldAggregate(_fields(name, each, columns, named.output_mode), at, may_overflow, scale)
        found.append(known[each])
        at += len(expected)
    if at != len(held.fields):
        raise _mismatch(where, held, named.aggregates)
    return found


def group_frame(reader: OperatorReader, named: NamedAggregation) -> StateFrame:
    """Return the groups of one aggregation.

    Args:
        reader: Reads its state.
        named: The rest of the aggregation.

    Raises:
        Invalid: As :func:`held_aggregates`; or there are no grouping columns, or other ones.
    """
    where = str(reader)
    df, schema = reader.read(where)
    key, held = schema["key"].dataType, schema["value"].dataType
    assert isinstance(key, StructType)
    assert isinstance(held, StructType)
    if not key.fields:
        raise Invalid(f"{where} aggregates without grouping columns, and there is no state without a key here")
    found = held_aggregates(where, held, named)
    # Several columns may have one name there: a cast goes by their places.
    df = df.select(F.col("key").cast(_numbered(key)).alias("key"), F.col("value").cast(_numbered(held)).alias("value"))
    fields, columns, placing = _key(where, key, named.keys)
    values = [
        column.alias(field.name) for each in found for field, column in zip(each.fields, _columns(each), strict=True)
    ]
    rows = df.select(
        key_group_of(placing, reader.max_parallelism).alias("key_group"),
        F.struct(*(column.alias(f"k{at}") for at, column in enumerate(columns))).alias("key"),
        F.struct(*values).alias("value"),
    )
    return StateFrame(rows, fields, None, StructType([field for each in found for field in each.fields]))


def _key(where: str, key: StructType, names: Sequence[str]) -> tuple[StructType, list[Column], list[Column]]:
    """Return the key here: its window's start and end and then the other columns; and the columns that place it."""
    windows = [at for at, field in enumerate(key.fields) if field.metadata.get(_WINDOW)]
    starts: list[Column] = []
    columns: list[Column] = []
    fields: list[StructField] = []
    for at in windows[:1]:
        window = key.fields[at].dataType
        assert isinstance(window, StructType)
        starts = [_at("key", at).getField("start")]
        columns = [*starts, _at("key", at).getField("end")]
        fields = [StructField(WINDOW_START, window["start"].dataType), StructField(WINDOW_END, window["end"].dataType)]
    others = [at for at in range(len(key.fields)) if at not in windows[:1]]
    held = [key.names[at] for at in others]
    names = names or held
    if len(names) != len(held) or len({*names}) != len(held) or _EXPRESSION in names:
        raise Invalid(
            f"{where} groups by ({', '.join(held)}){' beside the window' if windows else ''}, in Spark's names: of an "
            "expression it keeps no other. Give each its name in the new query (keys={0: ['day', ...]}, --key 0:day)"
        )
    columns += [_at("key", at) for at in others]
    fields += [StructField(name, key.fields[at].dataType) for name, at in zip(names, others, strict=True)]
    return StructType(fields), columns, [_at("key", at) for at in others] or starts


def _fields(
    name: str, aggregate: Aggregate, columns: Sequence[StructField], output_mode: str
) -> tuple[StructField, ...]:
    return tuple(state_fields(name, aggregate, [column.dataType for column in columns], output_mode))


def _scale_without_point(
    where: str, name: str, aggregate: Aggregate, of: DataType | None, columns: Sequence[StructField]
) -> int | None:
    """Return the scale of decimals of so few digits that Spark adds them up as whole numbers; None of others.

    Raises:
        Invalid: Spark has not kept them as the type says.
    """
    if not isinstance(of, DecimalType) or aggregate.function not in _FEW_DIGITS or not columns:
        return None
    digits, kind = _FEW_DIGITS[aggregate.function]
    has_few = of.precision <= digits
    if not isinstance(columns[0].dataType, kind if has_few else DecimalType):
        shown = columns[0].dataType.simpleString()
        raise Invalid(
            f"{where}: {name}={aggregate} is kept as {shown} by Spark, which is not one of {of.simpleString()}"
        )
    return int(of.scale) if has_few else None


def _columns(held: HeldAggregate) -> list[Column]:
    """Return an aggregate's columns here, of Spark's."""
    if held.scale is None and not held.may_overflow:
        return [_at("value", held.position + at) for at in range(len(held.fields))]
    # Of decimals: here whether they have overflowed is behind the sum, and then for a mean how many numbers it has.
    first, second = _at("value", held.position), _at("value", held.position + 1)
    kind, is_mean = held.fields[0].dataType, len(held.fields) == 3
    count = [second] if is_mean else []
    if held.scale is not None:
        whole = first
        if is_mean:
            inexact = _failed(held, "has more digits than Spark's double", first)
            whole = F.when(F.abs(first) > F.lit(_EXACT), inexact).otherwise(first)
        point = F.lit(10**held.scale).cast(DecimalType(_DIGITS, 0))
        return [(whole.cast(DecimalType(_DIGITS, 0)) / point).cast(kind), F.lit(False), *count]
    is_empty = second == F.lit(0) if is_mean else second
    return [F.when(is_empty, F.lit(None)).otherwise(first), first.isNull() & ~is_empty, *count]


def _failed(held: HeldAggregate, what: str, like: Column) -> Column:
    """Return a column of the type of another one, which fails the reading."""
    return F.coalesce(F.raise_error(F.lit(f"the sum of {held.fields[0].name} {what}")), like)


def _at(struct: str, position: int) -> Column:
    return F.col(struct).getField(f"c{position}")


def _numbered(struct: StructType) -> StructType:
    return StructType([StructField(f"c{at}", field.dataType) for at, field in enumerate(struct.fields)])


def _check_types(where: str, name: str, aggregate: Aggregate, kinds: list[DataType]) -> None:
    """Refuse a type that is not kept here.

    Raises:
        Invalid: Names it.
    """
    first, *more = kinds
    expected: dict[str, tuple[type[DataType], ...]] = {
        "count": (LongType,),
        "sum": (LongType, DoubleType, DecimalType),
        "mean": (DoubleType, DecimalType),
    }
    is_known = isinstance(first, expected.get(aggregate.function, (DataType,)))
    if not is_known or not all(isinstance(each, (LongType, BooleanType)) for each in more):
        raise Invalid(f"{where}: {name}={aggregate} is kept as {first.simpleString()} by Spark, and not so here")
    if aggregate.function in ("min", "max"):
        with named(f"{where}: {name}={aggregate}"):
            Extreme(first, largest=aggregate.function == "max")


def _mismatch(where: str, held: StructType, aggregates: Mapping[str, Aggregate]) -> Invalid:
    shown = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in held.fields)
    given = ", ".join(f"{name}={each}" for name, each in aggregates.items())
    return Invalid(
        f"{where}: its state has the columns ({shown}), which are not those of {given}. Name the aggregates of the old "
        f"query in its order; those that DSTL keeps as Spark does are {', '.join(_COLUMNS)}"
    )
