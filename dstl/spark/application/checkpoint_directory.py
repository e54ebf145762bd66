"""The checkpoint directory that Spark keeps in a backend's own log, served to the driver's JVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from py4j.java_gateway import JavaPackage  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from dstl.checkpoint.service import CoordinatorService
from dstl.errors import DstlError, Invalid
from dstl.files.directory import Directory
from dstl.files.file_log import FileLog
from dstl.files.invitation import check_version
from dstl.files.namespace import SCHEME, backend_root, plain_location_of
from dstl.files.query_directory import QueryDirectory
from dstl.files.roots import CheckpointRoots
from dstl.files.service import FileService
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret
from dstl.runtime import IoLoop, Runtime
from dstl.spark.jar import jar_path
from dstl.store.base import ObjectStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from handles.file_record import FILES_OWNER
from materializer.scratch_directory import ScratchDirectory

__all__ = ["CheckpointDirectory"]


class CheckpointDirectory:
    """Spark's checkpoint directory in a backend's log, served once it is asked for.

    Args:
        session: The session of the query.
        store: The backend's location; stays the caller's.
        config: The backend's options; its location is absolute.
        open_store: Opens a location.
        service: The coordinator of the query.
        runtime: Clock, jitter and ids.
        loop: The coordinator's.
    """

    def __init__(
        self,
        session: SparkSession,
        store: ObjectStore,
        config: TaskManagerConfig,
        open_store: Callable[[str], ObjectStore],
        service: CoordinatorService,
        runtime: Runtime,
        loop: IoLoop,
    ) -> None:
        self._session = session
        self._store, self._config, self._open_store = store, config, open_store
        self._checkpoints, self._runtime, self._loop = service.commits, runtime, loop
        self._root = ""
        self._secret = Secret.generate()
        self._roots = CheckpointRoots()
        self._files = FileService(self._of, self._roots, self._secret, {})
        self._scratch: ScratchDirectory | None = None
        self._directory: QueryDirectory | None = None

    def location(self) -> str:
        """Return what ``checkpointLocation`` is set to; the driver's JVM finds it from now on.

        Raises:
            Invalid: The JVM is without the jar, or has another version's; or no such root names the location.
        """
        if not self._root:
            owned = _owned_roots(self._session)
            check_version(str(owned.version()))
            root = backend_root(self._config.location)
            socket = self._loop.run(self._listen(root))
            configuration = self._session.sparkContext._jsc.hadoopConfiguration()
            configuration.set(f"fs.{SCHEME}.impl", "dstl.fs.DstlFileSystem")
            configuration.set(f"fs.AbstractFileSystem.{SCHEME}.impl", "dstl.fs.DstlFs")
            # Each instance reads the run of its query from its own configuration.
            configuration.setBoolean(f"fs.{SCHEME}.impl.disable.cache", True)
            # The secret lets this JVM in, and nobody else: it is of this directory alone.
            owned.own(root, socket, self._secret.reveal(), PROTOCOL_VERSION)
            self._root = root
        return self._root

    async def close(self) -> None:
        """Stop listening, and store what was written outside of the query; on the loop. Idempotent."""
        await self._files.server.close()
        if self._directory is not None:
            await self._directory.close()
        if self._scratch is not None:
            self._scratch.close()

    async def _listen(self, root: str) -> str:
        if self._directory is None:
            plain = self._open_store(plain_location_of(root))
            changelog = Changelog(self._config, Components(store=self._store, runtime=self._runtime), FILES_OWNER)
            log = FileLog(changelog, self._runtime, self._config.batching.inline_threshold)
            self._directory = QueryDirectory(root, self._store, plain, log, self._checkpoints, self._runtime)
            self._roots.add(root)
        if self._scratch is None:
            self._scratch = ScratchDirectory()
            await self._files.server.listen_unix(str(self._scratch.path / "files"))
        return str(self._scratch.path / "files")

    async def _of(self, root: str) -> Directory:
        if self._directory is None or root != self._directory.root:
            raise Invalid(f"{root} is not served here: this is the driver of {self._root}")
        return self._directory


def _owned_roots(session: SparkSession) -> Any:
    jvm: Any = session._jvm
    owned = jvm.dstl.fs.OwnedRoots
    if isinstance(owned, JavaPackage):
        raise _missing()  # what py4j does not find it takes for a package
    return owned


def _missing() -> Invalid:
    try:
        jar = jar_path()
    except DstlError as error:
        jar = f"<the jar of dstl-pyspark; {error}>"
    return Invalid(
        "checkpoint_location needs DSTL's jar in the driver, and this session was made without it. The missing line:\n"
        f'    .config("spark.jars", "{jar}")  # what dstl.spark.jar_path() returns\n'
        "before getOrCreate(). Without the jar, give the query a checkpointLocation of its own, as ever"
    )
