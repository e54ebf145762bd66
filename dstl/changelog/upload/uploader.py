"""The uploader: stores frozen bodies under names of their own, with retries, hedges and deletion of what lost.

The :class:`~dstl.changelog.upload.hedging.HedgePolicy` decides; this and :mod:`.hedged_put` execute it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import google_crc32c

from dstl.changelog.upload.connection_pools import ConnectionPools
from dstl.changelog.upload.hedged_put import Upload, UploadContext
from dstl.changelog.upload.hedging import HedgePolicy
from dstl.errors import Closed
from dstl.metrics import NullRecorder, Recorder
from dstl.options import HedgingOptions, UploadOptions
from dstl.runtime import Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore


class Uploader:
    """All uploads of a process: one hedging policy, one budget, two connection pools.

    Invariants:
        1. An upload succeeds only when the store has confirmed the object's length under the winner's name.
        2. Every attempt has a name of its own. An attempt whose outcome is unknown is at worst an orphan, because only
           the winner's name is handed out; so ``Unavailable`` truly means: nowhere that anything refers to.
        3. It fails only when its last active attempt has ended (FLINK-26396), and nothing of a loser stays behind but
           what the store creates after the grace (FLINK-26485).
        4. An attempt and its hedge never share a connection pool, when there are two.

    Belongs to one event loop; made and used on it.

    Args:
        store: Where objects go.
        runtime: Clock (that of the loop) and rng (jitter).
        options: Attempts, timeouts, back-off.
        hedging: The policy's options.
        recorder: Flink's ``numberOfUploadRequests``, ``numberOfUploadFailures``, ``uploadSizes``,
            ``uploadLatenciesNanos``, ``attemptsPerUpload`` (that were needed for the winner),
            ``totalAttemptsPerUpload``; ours ``hedgesSent``, ``hedgesWon``, ``hedgesDenied.<reason>``, ``hedgeBytes``,
            ``slowDowns``, ``loopLagSeconds``, ``losersDeleted``, ``losersLeftToCleaner``.
        hedge_store: The same location over other connections; the same store when None.
        policy: Shared by several uploaders of one process and store; a new one from ``hedging`` when None.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        runtime: Runtime,
        options: UploadOptions,
        hedging: HedgingOptions,
        recorder: Recorder = NullRecorder(),
        hedge_store: ObjectStore | None = None,
        policy: HedgePolicy | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._uploads: dict[Upload, None] = {}
        self._losers = BackgroundDeleter(
            store,
            clock=runtime.clock,
            grace_s=options.delete_grace_s,
            backlog=options.delete_backlog,
            recorder=recorder,
            deleted="losersDeleted",
            left="losersLeftToCleaner",
        )
        self._context = UploadContext(
            loop=loop,
            clock=runtime.clock,
            rng=runtime.rng,
            options=options,
            hedging=hedging.enabled,
            policy=policy if policy is not None else HedgePolicy(hedging),
            pools=ConnectionPools(store, hedge_store or store, hedging.warm_after_s, runtime.clock.now()),
            losers=self._losers,
            recorder=recorder,
            settled=self._forget,
        )
        self._closed = False

    def submit(
        self,
        name_of: Callable[[int], str],
        data: bytes | memoryview,
        *,
        critical: bool = True,
        checksum: int | None = None,
    ) -> Upload:
        """Start an upload and return its handle at once.

        Args:
            name_of: Returns a name never used before for attempt 0, 1, ...; best with another first path element each
                time, for what is slow may be the part of the store that the first element leads to.
            data: The body; frozen from now on.
            critical: Whether a checkpoint waits for it; see :meth:`Upload.make_critical`.
            checksum: CRC-32C of ``data`` if it is known; computed otherwise (0.1 ms per MB, on the loop).

        Raises:
            Closed: The uploader was closed before. Awaiting the upload raises it, too, if it is closed meanwhile.
            Unavailable: When it is awaited: attempts or deadline are exhausted; nothing that may be referenced is
                stored. AccessDenied and Invalid come at once.
        """
        if self._closed:
            raise Closed("the uploader is closed: open the changelog storage again")
        if checksum is None:
            checksum = google_crc32c.value(bytes(data))
        upload = Upload(self._context, name_of, data, checksum, critical)
        self._uploads[upload] = None
        upload.attempt(hedge=False)
        return upload

    def _forget(self, upload: Upload) -> None:
        self._uploads.pop(upload, None)

    async def close(self) -> None:
        """Settle everything: pending uploads fail with ``Closed``; losers are deleted once more. Idempotent."""
        self._closed = True
        for upload in list(self._uploads):
            upload.fail(Closed("the uploader was closed before the object was stored; its bytes are kept"))
        await self._losers.close()
