"""The tables of a checkpoint, of any kind, all loaded."""

from collections.abc import Callable

from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from materializer.bases.table_directory import FileBases
from materializer.restore.progress import LogLine, ProgressListener
from materializer.restore.restore import RestoredTables, TableRestore
from materializer.tables import StateTable


async def restore_tables(
    checkpoint: CompletedCheckpoint | None,
    store: ObjectStore,
    owned: KeyGroupRange,
    open_table: Callable[[str], StateTable],
    runtime: Runtime,
    *,
    on_progress: ProgressListener | None = None,
    files: FileBases | None = None,
) -> RestoredTables:
    """Restore a checkpoint as a TaskManager does, from its beginning to its end; the caller closes the tables."""
    fetcher = files or FileBases(store, runtime)
    restore = TableRestore(checkpoint, fetcher, owned, open_table, on_progress or LogLine())
    try:
        await restore.open()
        await restore.load()
    except BaseException:
        restore.close_tables()
        raise
    finally:
        await restore.close()
        if fetcher is not files:
            await fetcher.close()
    return restore.restored


def fallbacks(restored: RestoredTables) -> tuple[str, ...]:
    """Return base objects that were damaged or missing, so that older ones and more log were read."""
    return tuple(sorted({name for bases in restored.bases.values() for name in bases._damaged}))
