"""The checkpoint directory that Spark keeps in a backend's own log, served to the driver's JVM."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import SparkSession

from dstl.checkpoint.service import CoordinatorService
from dstl.errors import Invalid
from dstl.files.file_log import FileLog
from dstl.files.namespace import backend_root, plain_location_of
from dstl.files.options import FileOptions
from dstl.files.query_directory import QueryDirectory
from dstl.files.reader import FileReader
from dstl.files.roots import CheckpointRoots
from dstl.files.service import FileService
from dstl.rpc.file_messages import BatchStat, StatBatch
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret
from dstl.rpc.server import Peer
from dstl.runtime import IoLoop, Runtime
from dstl.spark.application.driver_jar import driver_roots
from dstl.store.base import ObjectStore
from dstl.store.location import split_locations
from dstl.taskmanager.config import TaskManagerConfig
from materializer.local_disk import ScratchDirectory


class CheckpointDirectory:
    """Spark's checkpoint directory in a backend's log, served once it is asked for.

    Args:
        session: The session of the query.
        config: The backend's options; its location is absolute.
        open_store: Opens a location.
        service: The coordinator of the query.
        runtime: Clock, jitter and ids.
        loop: The coordinator's.
        options: When a batch waits for its record.
    """

    def __init__(
        self,
        session: SparkSession,
        config: TaskManagerConfig,
        open_store: Callable[[str], ObjectStore],
        service: CoordinatorService,
        runtime: Runtime,
        loop: IoLoop,
        options: FileOptions,
    ) -> None:
        self._session = session
        self._config, self._open_store = config, open_store
        self._checkpoints, self._runtime, self._loop = service.commits, runtime, loop
        self._options = options
        self._root = ""
        self._secret = Secret.generate()
        self._roots = CheckpointRoots()
        self._files = FileService(self._of, self._roots, self._secret, {StatBatch: self._stat_batch})
        self._scratch: ScratchDirectory | None = None
        self._directory: QueryDirectory | None = None
        self._first: ObjectStore | None = None

    def location(self) -> str:
        """Return what ``checkpointLocation`` is set to; the driver's JVM finds it from now on.

        Raises:
            Invalid: As :func:`driver_roots`.
        """
        if not self._root:
            roots = driver_roots(self._session)
            root = backend_root(split_locations(self._config.location)[0])
            socket = self._loop.run(self._listen(root))
            # The secret lets this JVM in, and nobody else: it is of this directory alone.
            roots.own(root, socket, self._secret.reveal(), PROTOCOL_VERSION)
            self._root = root
        return self._root

    async def settle(self) -> None:
        """Make a commit durable that waits for the next offsets; on the loop."""
        if self._directory is not None:
            await self._directory.settle()

    async def close(self) -> None:
        """Stop listening, and store what was written outside of the query; on the loop. Idempotent."""
        await self._files.server.close()
        if self._directory is not None:
            await self._directory.close()
        if self._first is not None:
            await self._first.close()
        if self._scratch is not None:
            self._scratch.close()

    async def _listen(self, root: str) -> str:
        if self._directory is None:
            plain = self._open_store(plain_location_of(root))
            # Of several locations the first has the log, and all that is needed to read Spark's half of it.
            self._first = self._open_store(split_locations(self._config.location)[0])
            log = FileLog(self._config, self._runtime, FileReader(self._first, plain, self._runtime))
            self._directory = QueryDirectory(root, log, self._checkpoints, self._runtime, self._options)
            self._roots.add(root)
        if self._scratch is None:
            self._scratch = ScratchDirectory()
            await self._files.server.listen_unix(str(self._scratch.path / "files"))
        return str(self._scratch.path / "files")

    async def _stat_batch(self, peer: Peer, call: StatBatch) -> BatchStat:
        place = self._roots.place(call.path, call.run)
        return BatchStat(await (await self._of(place.root)).lacks_tasks(place.inner, call.run))

    async def _of(self, root: str) -> QueryDirectory:
        if self._directory is None or root != self._directory.root:
            raise Invalid(f"{root} is not served here: this is the driver of {self._root}")
        return self._directory
