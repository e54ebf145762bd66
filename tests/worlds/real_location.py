"""A small location with one of everything, every byte of it real: fences, checkpoints, segments, bases, an orphan."""

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT, ChangeSet
from dstl.changelog.object_names import SegmentNames
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.checkpoint.assembly import assemble
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.rpc.fleet_messages import Persisted, PersistedLog, PersistedSegment
from dstl.runtime import Runtime, system_runtime
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint, OperatorEntry
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializationReport, MaterializedStateHandle
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from materializer.bases.key_group_file import encode_key_group
from materializer.tables import HeapStateTable
from worlds.manifest_samples import checkpoint
from worlds.segment_samples import batch_of

QUERY = "real-query"
GROUPS = 4
ALL = KeyGroupRange(0, GROUPS - 1)


def changes(sqn: int, groups: tuple[int, ...]) -> ChangeSet:
    made = ChangeSet()
    made.append_metadata(b'{"states":[]}')
    for group in groups:
        made.append_batch(batch_of([(group, 1, OP_PUT, b"key-%d" % group, b"", b"value-%d" % sqn * 3)]))
    return made


def segment(*sets: tuple[str, int, tuple[int, ...]]) -> bytes:
    return encode_segment([(log, sqn, changes(sqn, groups)) for log, sqn, groups in sets], writer_id="writer")


class Location:
    """Writes a location step by step."""

    def __init__(self, store: ObjectStore, runtime: Runtime | None = None) -> None:
        self.store = store
        self.runtime = runtime or system_runtime()
        self.log = ManifestLog(store, self.runtime)
        self.names = SegmentNames(QUERY, "writer", self.runtime)
        self.made: list[CompletedCheckpoint] = []
        self._seals: dict[str, bytes] = {}

    async def stored(self, data: bytes) -> PersistedSegment:
        name = self.names.new_object()(0)
        await self.store.put(name, data)
        return PersistedSegment(SegmentHandle(name, len(data), segment_checksum(data)), ALL)

    def inlined(self, data: bytes) -> PersistedSegment:
        seal = f"seal-{len(self._seals)}"
        self._seals[seal] = data
        return PersistedSegment(SegmentHandle("", len(data), segment_checksum(data)), ALL, seal)

    async def base(self, checkpoint: int) -> MaterializationReport:
        table = HeapStateTable()
        rows = [(g, 1, OP_PUT, b"key-%d" % g, b"", b"base") for g in range(GROUPS)]
        table.apply(
            pa.RecordBatch.from_arrays(
                [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), CHANGE_SCHEMA, strict=True)],
                schema=CHANGE_SCHEMA,
            )
        )
        snapshot = table.snapshot()
        files = [encode_key_group(snapshot, group).data for group in range(GROUPS)]
        snapshot.close()
        table.close()
        data = b"".join(files)
        name = self.names.new_object("base")(0)
        await self.store.put(name, data)
        parts, at = [], 0
        for group, file in enumerate(files):
            parts.append((group, at, len(file)))
            at += len(file)
        handle = MaterializedStateHandle(
            operator="op",
            materialization_id=checkpoint,
            checkpoint=checkpoint,
            name=name,
            size=len(data),
            checksum=segment_checksum(data),
            parts=tuple(parts),
        )
        return MaterializationReport(
            operator="op", checkpoint=checkpoint, first_key_group=0, last_key_group=GROUPS - 1, handles=(handle,)
        )

    async def commit(
        self, segments: list[PersistedSegment], logs: list[PersistedLog], *reports: MaterializationReport
    ) -> int:
        sequence = self.log.next_sequence
        data = b"".join(self._seals[segment.seal] for segment in segments if segment.seal)
        made, inlined = assemble(
            checkpoint(
                sequence,
                len(self.made),
                query_id=QUERY,
                max_parallelism=GROUPS,
                created_at=self.runtime.clock.wall(),
                operators=(OperatorEntry(uid="op", parallelism=2, key_types="string", registry={"states": []}),),
            ),
            self.made[-1] if self.made else None,
            [Persisted(tuple(segments), tuple(logs), reports, inlined=data)],
        )
        oldest = self.made[-1].checkpoint_id if len(self.made) > 1 else 0
        await self.log.commit(made, inlined, oldest=oldest)
        self.made.append(made)
        return sequence


def piece(log: str, sqn: int, at: int = 0, key_groups: KeyGroupRange = ALL) -> PersistedLog:
    return PersistedLog(log, "op", key_groups, ((SequenceNumberRange(sqn, sqn + 1), at),))


async def fill(store: ObjectStore, runtime: Runtime | None = None) -> Location:
    """Records 1 to 7: two fences and five checkpoints, of which the last two are retained; and one orphan."""
    location = Location(store, runtime)
    await location.log.fence(QUERY)
    first = await location.stored(segment(("a", 0, (0, 1)), ("b", 0, (2, 3))))
    await location.commit([first], [piece("a", 0), piece("b", 0)])
    await location.commit([location.inlined(segment(("a", 1, (0,))))], [piece("a", 1)])
    await location.log.fence(QUERY)
    await location.commit([await location.stored(segment(("c", 0, (1, 3))))], [piece("c", 0)], await location.base(2))
    await location.commit([location.inlined(segment(("c", 1, (0, 1, 2, 3))))], [piece("c", 1)])
    await location.commit([await location.stored(segment(("c", 2, (2,)), ("loser", 0, (2,))))], [piece("c", 2)])
    await location.stored(segment(("loser", 1, (3,))))
    return location
