"""``dstl gc``: delete the objects that crashes and aborted batches left in a location."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.upkeep.cleaner import CleanerReport, LiveDriver, clean
from dstl.cli import console
from dstl.files.namespace import SCHEME, location_of
from dstl.monitoring.text import age_text, size_text
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore


@console.answering
def gc(
    location: console.Location,
    commit: Annotated[bool, typer.Option("--commit", help="Delete. Without it, only say what would go.")] = False,
    grace: Annotated[
        str, typer.Option(help="Leave everything younger alone, by the store's clock: 90s, 15m, 24h or 7d.")
    ] = "24h",
    stopped: Annotated[
        bool,
        typer.Option(
            "--stopped",
            help="The query does not run and nothing is being restored: no object waits for its checkpoint any more. "
            "Without it, what the latest batches stored stays, for they may be running.",
        ),
    ] = False,
    at_most: Annotated[int, typer.Option(min=1, help="Most deletions of this pass.")] = 10_000,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
) -> console.Answer:
    """Delete the objects of LOCATION that no checkpoint needs; a dry run unless --commit is given.

    LOCATION may be a checkpoint directory, dstl://bucket/path, where nothing else deletes what crashed uploads left.
    Safe beside a running query (a StateBackend's cleans up by itself). Never touched: other queries' objects, names
    that are not DSTL's, savepoints, fences.

    Exit codes: 0 done; 1 a manifest is damaged, so nothing was deleted; 2 refused; 3 the store did not answer: try
    again.
    """
    with console.progress_bar("looking for orphans", "deleting") as on_progress:
        grace_s = console.parse_duration(grace)

        async def nobody() -> tuple[str, ...]:
            return ()

        async def work(store: ObjectStore, runtime: Runtime) -> CleanerReport:
            return await clean(
                store,
                ManifestReader(store, runtime),
                grace_s=grace_s,
                driver=LiveDriver(writer_ids=nobody if stopped else None),
                dry_run=not commit,
                max_deletions=at_most,
                on_progress=on_progress,
            )

        store = location_of(location) if location.startswith(f"{SCHEME}://") else location
        report = console.run_at(store, endpoint_url, work)
    return console.Answer(_describe(location, report), lambda: _show(location, report, wide))


def _describe(location: str, report: CleanerReport) -> dict[str, Any]:
    return {
        "location": location,
        "query_id": report.query_id,
        "dry_run": report.dry_run,
        "objects": report.objects,
        "bytes": report.bytes,
        "deleted": report.deleted,
        "orphans": [
            {
                "object": each.info.name,
                "size": each.info.size,
                "age_s": round(report.now - each.info.modified, 3),
                "reason": each.reason,
            }
            for each in report.plan.deletions
        ],
        "orphan_bytes": report.orphan_bytes,
        "kept": [
            {"reason": reason.value, "objects": count, "bytes": report.plan.kept_bytes[reason]}
            for reason, count in report.plan.kept.items()
        ],
    }


def _show(location: str, report: CleanerReport, wide: bool) -> None:
    orphans = report.plan.deletions
    table = console.new_table(
        f"{'orphans' if report.dry_run else 'deleted'} in {location}, query {report.query_id}",
        (("object", "left"), ("size", "right"), ("age", "right"), ("why", "left")),
    )
    for each in orphans[: console.SHOWN_ROWS]:
        age = age_text(report.now - each.info.modified)
        console.add_row(table, each.info.name, size_text(each.info.size), age, each.reason)
    if orphans:
        console.print_table(table, wide=wide)
    if len(orphans) > console.SHOWN_ROWS:
        typer.echo(f"and {len(orphans) - console.SHOWN_ROWS} more (all with --json)")
    for reason, count in report.plan.kept.items():
        typer.echo(f"kept {count} objects, {size_text(report.plan.kept_bytes[reason])}: {reason.value}")
    if report.dry_run:
        typer.echo(f"{len(orphans)} objects, {size_text(report.orphan_bytes)}, would go: pass --commit to delete them")
    else:
        typer.echo(f"deleted {report.deleted} objects, {size_text(report.orphan_bytes)}")
