"""What the command line does with a directory of ``dstl://`` whose query has ended, in a simulated world.

It is verified, exported, rolled back and forked. The query goes on at each of these directories, and what must hold of
the first must hold there: see ``file_query``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy

from dstl.errors import Invalid, MissingState
from dstl.files.forking import fork, release
from dstl.files.inspection import export_files, opened_files, roll_back, verify_files
from dstl.files.namespace import StateFile, location_of, plain_location_of
from dstl.files.origins import OpenStore
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from tests.simulation.file_services import ROOT, FileServices, FileWorld, Outside

COPY = "dstl:///jobs/copy"
"""A plain directory, which has been exported."""
_FORKS = ("dstl:///jobs/fork", "dstl:///jobs/forks/first")
"""One is a fork; the latter is not beside the others, so that its query has to name them."""
_SECOND_FORK = "dstl:///jobs/forks/second"
_COPIED, _FORKED = 0.4, 0.6
"""Shares of the worlds in which the query goes on there."""
_BATCHES = 2

Drive = Callable[[FileWorld, FileServices, Outside, int], Awaitable[bool]]
"""Runs a query until so many batches have ended well; False where it does not go on."""


async def look(world: FileWorld, services: FileServices, outside: Outside, drive: Drive) -> None:
    """Do what the command line does, and let the query go on wherever its directory is then."""
    runtime, opened = world.runtime(services.process), world.open_store(services.process)

    def open_store(location: str) -> ObjectStore:
        return opened(location, world.config.s3, world.config.sealing)

    rng, query = world.rng("copies"), _Query(world, drive)
    copies, forks = rng.random() < _COPIED, rng.random() < _FORKED
    target = world.store_of(plain_location_of(COPY)).client(services.process, plain_location_of(COPY))
    async with opened_files(ROOT, runtime, open_store) as files:
        batches, problems = files.batches, await verify_files(files)
        copied = await export_files(files, target)
    if problems or not copied or len(batches) < 2:
        query.violate(f"of batches {batches} {copied} bytes were copied: {problems}")
        return
    if copies:
        await query.go_on(COPY, deepcopy(outside))
    back = batches[-2]
    await roll_back(ROOT, back, runtime, open_store)
    async with opened_files(ROOT, runtime, open_store) as files:
        state = [(path, found.version) for path in files.entries if (found := StateFile.of(path)) is not None]
        ahead = [path for path, version in state if version > back + 1]
        if files.batches != batches[:-1] or ahead or await verify_files(files):
            query.violate(f"rolled back to {back}, it has {files.batches} and {ahead}")
    # What the user takes back the sink and the source take back.
    outside.told = min(outside.told, back)
    for batch in [each for each in outside.sink if each > back]:
        del outside.sink[batch]
    await query.go_on(ROOT, outside)
    if forks:
        await _fork(query, ROOT, rng.choice(_FORKS), outside, runtime, open_store)


async def _fork(
    query: _Query, source: str, target: str, outside: Outside, runtime: Runtime, open_store: OpenStore
) -> None:
    """Fork a directory, and its fork once more; each goes its own way. Then the last one is gone, and is let go of."""
    made = await fork(source, target, runtime, open_store)
    if made.also != (() if target == _FORKS[0] else (source,)):
        query.violate(f"the query of {target} is to name {made.also}, for it was forked from {source}")
    forked = deepcopy(outside)
    await query.go_on(source, outside)
    await query.go_on(target, forked, made.also)
    try:
        await fork(target, _SECOND_FORK, runtime, open_store)
        query.violate(f"{source} was taken over for a fork of {target}, and nobody has named it")
    except Invalid:
        second = await fork(target, _SECOND_FORK, runtime, open_store, [source])
    await query.go_on(_SECOND_FORK, deepcopy(forked), second.also)
    await query.go_on(target, forked, made.also)
    for root in (source, target, _SECOND_FORK):
        async with opened_files(root, runtime, open_store, (ROOT, target)) as files:
            problems, elsewhere = await verify_files(files), files.elsewhere
        if problems or (root == source and elsewhere):
            query.violate(f"{root} has objects of {sorted(elsewhere)}: {problems}")
    # As the user deletes the fork that came last.
    query.world.store_of(location_of(_SECOND_FORK)).objects.clear()
    let_go = await release(source, _SECOND_FORK, runtime, open_store)
    if not made.batches or not let_go or await release(source, _SECOND_FORK, runtime, open_store):
        query.violate(f"{source} has let go of {let_go} objects of a fork of {made.batches} batches")
    try:
        await release(source, target, runtime, open_store)
        query.violate(f"{source} has let go of what {target} needs")
    except Invalid:
        await query.go_on(target, forked, made.also)
    try:
        async with opened_files(_SECOND_FORK, runtime, open_store):
            query.violate(f"{_SECOND_FORK} is deleted, and opened")
    except MissingState:
        await query.go_on(source, outside)


class _Query:
    """The query, wherever its directory is."""

    def __init__(self, world: FileWorld, drive: Drive) -> None:
        self.world = world
        self._drive = drive
        self._drivers = 0

    async def go_on(self, root: str, outside: Outside, also: Sequence[str] = ()) -> None:
        """Run some batches, and look at everything once more, with the configuration that a fork needs."""
        if self.world.violations:
            return
        self._drivers += 1
        driver = FileServices(
            self.world, f"driver-again-{self._drivers}", root=root, hosts=self._drivers % 2, also=also
        )
        if not await self._drive(self.world, driver, outside, _BATCHES):
            self.violate(f"the query does not go on in {root}")
        await driver.close()
        reader = FileServices(self.world, f"reader-{self._drivers}", root=root, also=also)
        await self._drive(self.world, reader, outside, 0)
        reader.kill()

    def violate(self, what: str) -> None:
        """Note what must not be."""
        self.world.violations.append(f"seed {self.world.seed}: {what}")
