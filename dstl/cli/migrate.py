"""``dstl files migrate``: the state of a query on Spark's own store as a savepoint for ``StateBackend``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dstl.cli import console
from dstl.errors import Invalid
from dstl.monitoring.text import size_text

if TYPE_CHECKING:
    from dstl.state.vectorised.aggregation import OutputMode


def migrate(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="The stopped query's checkpointLocation: dstl://, s3a://, a path."),
    ],
    location: console.Location,
    name: Annotated[str, typer.Option(help="The savepoint's name.")] = "migrated",
    operator: Annotated[
        list[str] | None, typer.Option(help="ID=NAME: Spark's operator id, and its name= in the new query. Repeatable.")
    ] = None,
    ttl: Annotated[
        list[str] | None, typer.Option(help="STATE=15m: the time to live of a state that has one. Repeatable.")
    ] = None,
    aggregate: Annotated[
        list[str] | None,
        typer.Option(help="ID:COLUMN=FUNCTION(ARGUMENT), such as 0:total=sum(v): an aggregate, in the query's order."),
    ] = None,
    type_: Annotated[
        list[str] | None,
        typer.Option(
            "--type", help="COLUMN=decimal(6,2): an aggregated column's type, of decimals of up to 11 digits."
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="ID:COLUMN, a grouping column's name in the new query, where Spark has none. Repeatable."),
    ] = None,
    output_mode: Annotated[
        str, typer.Option(help="The query's, where it has aggregations: update, append or complete.")
    ] = "update",
    max_parallelism: Annotated[int, typer.Option(min=1, help="Key groups of the new backend.")] = 128,
    new_checkpoint: Annotated[
        str, typer.Option(help="An empty directory, which gets the old query's offsets for the new one to go on with.")
    ] = "",
    conf: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the Spark session that reads the state. Repeatable.")
    ] = None,
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Make a savepoint at LOCATION of the state of a stopped query of transformWithState or groupBy().agg().

    The old directory is only read, by a Spark session of this command. Start the processors with
    StateBackend(restore_from=...) then, at any parallelism.
    """
    from dstl.spark import migrate_state

    operators = console.pairs(operator, "--operator")
    if not all(map(str.isdecimal, operators)):
        raise Invalid("--operator is ID=NAME, the id a number: --operator 0=visits")
    report = migrate_state(
        checkpoint,
        location,
        name=name,
        operators={int(number): uid for number, uid in operators.items()},
        ttl_ms={key: int(console.parse_duration(each) * 1000) for key, each in console.pairs(ttl, "--ttl").items()},
        aggregates=_aggregates(aggregate),
        types=console.pairs(type_, "--type"),
        keys=_keys(key),
        output_mode=cast("OutputMode", output_mode),  # checked there
        max_parallelism=max_parallelism,
        new_checkpoint=new_checkpoint,
        spark=console.spark_session(console.pairs(conf, "--conf"), (checkpoint, new_checkpoint)),
        s3=console.s3_options(endpoint_url),
        sealing=console.sealing_options(),
    )

    def show() -> None:
        for uid, states in report.operators.items():
            typer.echo(console.printable(f"operator {uid}: {', '.join(states)}"))
        size = size_text(report.bytes)
        typer.echo(f"{report.entries:,} entries, {size}, behind batch {report.batch_id} of query {report.query_id}")
        typer.echo(console.printable(f"go on with restore_from={report.savepoint!r}"))
        if report.checkpoint:
            typer.echo("     and checkpointLocation backend.checkpoint_location,")
            typer.echo(console.printable(f"     of the backend whose _spark is {report.checkpoint!r}"))

    return console.Answer(dataclasses.asdict(report), show)


def _aggregates(given: Sequence[str] | None) -> dict[int, dict[str, str]]:
    from dstl.state.vectorised.aggregation import Aggregate

    found: dict[int, dict[str, str]] = {}
    for key, text in console.pairs(given, "--aggregate").items():
        number, column = _of_operator(key, "--aggregate")
        found.setdefault(number, {})[column] = str(Aggregate.of(text))  # refused before Spark starts
    return found


def _keys(given: Sequence[str] | None) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for each in given or ():
        number, column = _of_operator(each, "--key")
        found.setdefault(number, []).append(column)
    return found


def _of_operator(given: str, option: str) -> tuple[int, str]:
    number, _, column = given.partition(":")
    if not number.isdecimal() or not column:
        raise Invalid(f"{option} {given!r} does not begin with ID:COLUMN, the id a number: {option} 0:total")
    return int(number), column
