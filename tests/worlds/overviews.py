"""Overviews of jobs in several states, as the page's tests show them; names are as nasty as names can be."""

import json
import random

from dstl.checkpoint.fleet.members import Member
from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.savepoint.deletion import SavepointListing
from dstl.metrics import MetricSet
from dstl.monitoring.overview import Overview
from dstl.rpc.client import Address
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry
from handles.key_group import range_of_partition
from handles.materialized_handle import MaterializedStateHandle
from materializer.restore.progress import RestoreStatus

NOW = 1_790_000_000.0
GROUPS = 128
NASTY = "<img src=x onerror=\"document.title='broken'\">&'"


def history(count: int, seed: int = 7, fail_last: bool = False) -> list[HistoryEntry]:
    """Return so many checkpoints ten seconds apart, with a few failures and restores among them."""
    rng = random.Random(seed)
    entries = [HistoryEntry(kind="restore", at=NOW - 10 * count - 12, checkpoint_id=0, seconds=0.8)]
    state = 3e8
    for n in range(count):
        at = NOW - 10 * (count - n)
        if rng.random() < 0.012:
            entries.append(failure(n, n, at - 5))
            entries.append(
                HistoryEntry(kind="restore", at=at - 2, checkpoint_id=n, batch_id=n, seconds=4.2, new_bytes=int(state))
            )
        slow = 1.0 + 8 * (rng.random() < 0.02)
        parts = {
            "persist_s": rng.lognormvariate(-2.6, 0.35) * slow,
            "assemble_s": rng.lognormvariate(-5.6, 0.2),
            "commit_s": rng.lognormvariate(-3.2, 0.3) * (2 if slow > 1 else 1),
            "notify_s": rng.lognormvariate(-5.2, 0.3),
        }
        state *= 1 + rng.random() * 0.004
        new = int(rng.lognormvariate(13.2, 0.4))
        hedges = int(slow > 1) + (rng.random() < 0.05)
        entries.append(
            HistoryEntry(
                kind="checkpoint",
                at=at,
                checkpoint_id=n + 1,
                batch_id=n,
                seconds=sum(parts.values()),
                requests=3 + hedges,
                hedges=hedges,
                new_bytes=new,
                full_bytes=int(state * 2.1),
                late_rows=rng.randrange(40) if rng.random() < 0.1 else 0,
                state_rows=int(state / 110),
                state_bytes=int(state),
                **parts,
            )
        )
    if fail_last:
        entries.append(failure(count, count, NOW - 4))
    return entries


def failure(sequence: int, batch: int, at: float) -> HistoryEntry:
    return HistoryEntry(
        kind="failed",
        at=at,
        checkpoint_id=sequence + 1,
        batch_id=batch,
        seconds=31.4,
        error="CheckpointDeclined: the checkpoint of batch 41 failed: upload of 512044 bytes failed: "
        "no answer within 30 s; its bytes are kept: check the store",
    )


def newest(number: int, uids: tuple[str, ...] = ("aircraft", "airports"), seed: int = 3) -> CompletedCheckpoint:
    """Return a checkpoint with a base of every key group, and log behind it."""
    rng = random.Random(seed)
    bases, logs, segments = [], [], []
    for place, uid in enumerate(uids):
        lengths = [int(rng.lognormvariate(14, 0.25)) * (1 if group != 77 or place else 9) for group in range(GROUPS)]
        parts, at = [], 0
        for group, length in enumerate(lengths):
            parts.append((group, at, length))
            at += length
        name = f"0/q/w{place}/1.base"
        bases.append(
            MaterializedStateHandle(
                operator=uid,
                materialization_id=1,
                checkpoint=max(1, number - 20),
                name=name,
                size=at,
                checksum=1,
                parts=tuple(parts),
            )
        )
        for part in range(4):
            owned = range_of_partition(part, GROUPS, 4)
            logs.append(
                LogEntry(log_id=f"{place}-{part}", operator=uid, first_key_group=owned.start, last_key_group=owned.end)
            )
    for n in range(max(2, number - 19), number + 1):
        segments.append(
            SegmentEntry(
                segment=(f"0/q/w/{n}.seg", int(rng.lognormvariate(13.2, 0.3)), 1, 0),
                first_key_group=0,
                last_key_group=GROUPS - 1,
                ranges=tuple((log, n - max(2, number - 19), n - max(2, number - 19) + 1) for log in range(len(logs))),
                checkpoint=n,
            )
        )
    return CompletedCheckpoint(
        checkpoint_id=number,
        batch_id=number - 1,
        query_id="0c0a1b2c-1111-2222-3333-444455556666",
        run_id="run",
        parent=number - 1,
        max_parallelism=GROUPS,
        created_at=NOW - 6,
        watermark_ms=int(NOW * 1000) - 60_000,
        operators=tuple(
            OperatorEntry(
                uid=uid,
                parallelism=4,
                key_types="string",
                registry={
                    "key": json.dumps({"fields": [{"name": uid}, {"name": NASTY}]}),
                    "states": [{"name": "seen"}, {"name": NASTY}],
                },
            )
            for uid in uids
        ),
        materialized=tuple(bases),
        logs=tuple(logs),
        segments=tuple(segments),
    )


def members(silent: bool = False) -> list[MemberMetrics]:
    rng = random.Random(5)
    found = []
    for n in range(3):
        metrics = MetricSet()
        for _ in range(400):
            metrics.observe("uploadLatenciesNanos", rng.lognormvariate(-2.9, 0.5) * 1e9)
        for name, value in (
            ("numberOfUploadRequests", 400), ("hedgesSent", 21), ("hedgesWon", 17), ("completedMaterialization", 6),
            ("backpressureSeconds", 0.0 if n else 3.25), ("processCpuSeconds", 712.0),
        ):  # fmt: skip
            metrics.increment(name, value)
        gauges = {"residentBytes": 9.1e8 + n * 4e7, "changelogBytesHeld": 2.2e6, "stateBytes.aircraft": 1.1e8}
        sample = metrics.sample(gauges | {"stateEntries.aircraft": 1_021_334, "stateBytes.airports": 2.1e7})
        member = Member(
            f"10.0.0.{n + 4}-{NASTY}" if n == 2 else f"10.0.0.{n + 4}-9a31c2f0",
            Address(f"10.0.0.{n + 4}", 41233),
            None,
            2114 + n,
            end_lifeline=lambda: None,
            on_lost=lambda member: None,
            key_groups=range_of_partition(n, GROUPS, 3),
        )
        found.append(MemberMetrics(member, sample, not (silent and n == 2)))
    return found


SAVEPOINTS = (
    SavepointListing("before-the-upgrade", "complete", None, 3, 311_000_000, NOW - 86_400 * 3, ""),
    SavepointListing(NASTY, "damaged", None, 1, 4096, NOW - 5000, f"the descriptor is damaged: {NASTY}"),
)
LOCATION = "s3://bucket/jobs/flights"
QUERY = "0c0a1b2c-1111-2222-3333-444455556666"


def _job(entries: list[HistoryEntry], **more: object) -> Overview:
    last = max(e.checkpoint_id for e in entries if e.kind == "checkpoint")
    rng = random.Random(11)
    batch_s = {
        e.batch_id: (e.seconds or 0.0) + rng.lognormvariate(-0.6, 0.2) for e in entries if e.kind == "checkpoint"
    }
    settings: dict[str, object] = {
        "savepoints": SAVEPOINTS,
        "members": members(),
        "wanted": 3,
        "batch_s": batch_s,
        **more,
    }
    return Overview(
        LOCATION,
        "driver",
        NOW,
        QUERY,
        entries,
        newest(last),
        [last - 2, last - 1, last],
        **settings,  # type: ignore[arg-type]
    )


SCENES: dict[str, Overview] = {
    "running": _job(history(60)),
    "restoring": _job(
        history(60),
        restoring=RestoreStatus(
            412_000_000,
            633_000_000,
            7.2,
            71e6,
            3.1,
            {"aircraft": (400_000_000, 480_000_000), "airports": (12_000_000, 153_000_000)},
        ),
    ),
    "failed": _job(
        history(41, fail_last=True), members=members(silent=True), damaged=((17, f"manifest 17 is damaged ({NASTY})"),)
    ),
    "empty": Overview(f"/data/{NASTY}", "store", NOW, ""),
    "many": _job(history(500)),
    "stored": Overview(LOCATION, "store", NOW, QUERY, history(60), newest(60), [58, 59, 60]),
    "first": Overview(
        LOCATION, "driver", NOW, QUERY, history(2), newest(2, ("only",)), [1], members=members()[:1], wanted=1
    ),
}
"""Each state that the page is looked at in."""
