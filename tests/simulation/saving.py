"""The command line in the simulated world: savepoints, made beside a query and kept to the end, and what lists and
verifies a location when everything is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from tempfile import NamedTemporaryFile
from typing import Any

from dstl.changelog.segment.inspection import describe_segment, dump_segment, fetch_segment, parse_key_groups
from dstl.checkpoint.manifest.format import manifest_sequence
from dstl.checkpoint.savepoint.creation import create_savepoint
from dstl.checkpoint.savepoint.deletion import delete_savepoint, list_savepoints
from dstl.checkpoint.savepoint.format import (
    SAVEPOINTS,
    Savepoint,
    descriptor_name,
    directory_of,
    parse_savepoint_location,
)
from dstl.checkpoint.savepoint.restore import SavepointRestore
from dstl.checkpoint.upkeep.listing import describe_checkpoint, list_checkpoints, list_states
from dstl.checkpoint.upkeep.verification import verify_location, verify_savepoint
from dstl.errors import CorruptData, DstlError, Invalid
from dstl.files.inspection import opened_files, roll_back, verify_files
from dstl.files.namespace import backend_root, location_of
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from handles.checkpoint import referenced_objects
from tests.simulation.damage import with_flipped_bit
from tests.simulation.faults import FaultKind
from tests.simulation.process import Process
from tests.simulation.store import Stored
from tests.simulation.world import World

_MOST_STEPS = 40
"""A savepoint takes a few dozen steps: with 500 none of 100 seeds had one that was killed."""
_DAMAGED, _ROLLED_BACK, _WITH_STRAYS = 0.3, 0.3, 0.3
_MOST = 12
"""Of one world: each is restored at its end, which takes as long as a batch."""


async def save_periodically(world: World) -> None:
    """Make savepoints now and then, in some worlds."""
    rng = world.rng("savepoints")
    if rng.random() >= world.plan.saves:
        return
    number = 0
    while number < _MOST:
        await asyncio.sleep(rng.uniform(0.1, 1.0) if world.plan.strike else rng.uniform(0.2, 8.0))
        number += 1
        process = world.process(f"world.savepoint-{number}")
        if rng.random() < 0.2 and not world.plan.healed:
            world.light_fuse(process, _MOST_STEPS, lambda process=process: _kill(world, process))  # type: ignore[misc]
        process.spawn(_save(world, process, f"s-{number}"), "main")


def delete_unfinished(world: World) -> None:
    """Delete what failed savepoints have left, as ``dstl savepoint delete`` does: it holds a cleaner for a day."""
    made = {directory_of(savepoint.name) for savepoint in world.savepoints}
    for name in sorted(world.store.objects):
        if name.startswith(SAVEPOINTS) and not any(name.startswith(directory) for directory in made):
            del world.store.objects[name]


async def check_savepoints(world: World) -> None:
    """Restore every savepoint that was made, when its job and two sweeps of the cleaner are over (I6)."""
    for savepoint in world.savepoints:
        await world.check.check_savepoint(savepoint)


async def look_at_everything(world: World) -> bool:
    """List and verify what is there, as an operator of the cluster does, and delete a savepoint: all is sound (I6).

    Returns:
        Whether the query can go on behind it: nothing was rolled back or harmed.
    """
    process = world.process("world.command-line")
    return await process.spawn(_look(world, process), "main")


async def look_before_the_sweep(world: World) -> None:
    """Verify what is there, in some worlds, with all that nobody needs: all is sound (I6)."""
    if world.rng("strays").random() < _WITH_STRAYS:
        process = world.process("world.command-line-before")
        await process.spawn(_verify_strays(world, process), "main")


async def _verify_strays(world: World, process: Process) -> None:
    problems = (await verify_location(world.store.client(process), world.runtime(process.name))).problems
    if problems:
        world.check.fail("I6", f"before the cleaner has been there, {problems}")


async def _look(world: World, process: Process) -> bool:
    store, runtime, fail = world.store.client(process), world.runtime(process.name), world.check.fail
    retained = [each.checkpoint_id for each in world.check.retained()]
    verified = await verify_location(store, runtime)
    if verified.problems or [each.checkpoint_id for each in verified.checkpoints] != retained:
        fail("I6", f"verified are {[each.checkpoint_id for each in verified.checkpoints]}: {verified.problems}")
    listed = [each["checkpoint_id"] for each in (await list_checkpoints(store, runtime))["checkpoints"]]
    if listed != retained:
        fail("I6", f"listed are checkpoints {listed}, and retained are {retained}")
    described = await describe_checkpoint(store, runtime)
    states = {each["operator"] for each in await list_states(store, runtime)}
    if described["checkpoint_id"] != retained[-1] or states != {*world.operators, *world.faces}:
        fail("I6", f"checkpoint {described['checkpoint_id']} is the last, with states of {sorted(states)}")
    for name in [name for name in world.store.objects if name.endswith(".seg") and "/files/" not in name][:2]:
        groups = parse_key_groups(f"0-{world.logs.max_parallelism - 1}")
        with NamedTemporaryFile() as copy:
            # As one that somebody has fetched.
            copy.write(await store.get(name))
            copy.flush()
            segment = await fetch_segment(copy.name)
        if not (describe_segment(segment, name) and any(dump_segment(segment, name, key_groups=groups))):
            fail("I6", f"{name} shows nothing")
    for savepoint in world.savepoints:
        problems = (await verify_savepoint(store, runtime, savepoint.name)).problems
        if problems:
            fail("I6", f"savepoint {savepoint.name}: {problems}")
    if world.savepoints:
        await _start_from(world, store, world.savepoints[-1].name, runtime, claims=False)
        moved = MemoryStore()
        await create_savepoint(store, moved, runtime, "moved")
        await _start_from(world, moved, "moved", runtime, claims=True)
        await _refuse_what_cannot_be(world, store, runtime)
    made = sorted(each.name for each in world.savepoints)
    for _ in range(min(2, len(made) + 1)):
        listing = await list_savepoints(store, runtime)
        if [each.name for each in listing if each.state == "complete"] != made:
            fail("I6", f"listed are savepoints {listing}, and made were {made}")
        if made:
            await delete_savepoint(store, runtime, made.pop(), commit=True)
    rolled_back = await _roll_back(world, store, runtime)
    return not (await _damage(world, store, runtime) or rolled_back)


async def _roll_back(world: World, store: ObjectStore, runtime: Runtime) -> bool:
    """Take the last batch of the query back, in some worlds, and return whether: what is left is whole (I8)."""
    root, plain = backend_root("/jobs/query"), MemoryStore()

    def open_store(location: str) -> ObjectStore:
        return store if location == location_of(root) else plain

    async with opened_files(root, runtime, open_store) as files:
        batches, problems = files.batches, await verify_files(files)
    retained = {each.batch_id for each in world.check.retained()}
    if problems or not retained.issuperset(batches[-1:]):
        world.check.fail("I8", f"commits of {batches} are there, with checkpoints of {sorted(retained)}: {problems}")
    if world.rng("rollback").random() >= _ROLLED_BACK or not retained.issuperset(batches[-2:]) or len(batches) < 2:
        return False
    await roll_back(root, batches[-2], runtime, open_store)
    async with opened_files(root, runtime, open_store) as files:
        if files.batches != batches[:-1] or await verify_files(files):
            world.check.fail("I8", f"rolled back to {batches[-2]}, the query has commits of {files.batches}")
    return True


async def _damage(world: World, store: ObjectStore, runtime: Runtime) -> bool:
    """Flip a bit that the last checkpoint needs, in some worlds, and return whether: verification says so (I6)."""
    rng, objects = world.rng("damage"), world.store.objects
    # Records hold more than it needs.
    needed = referenced_objects(world.check.retained()[-1])
    named = [name for name in needed if name in objects and manifest_sequence(name) is None]
    if not named or rng.random() >= _DAMAGED:
        return False
    name = rng.choice(sorted(named))
    objects[name] = with_flipped_bit(objects[name], rng)
    verified = await verify_location(store, runtime)
    if not verified.problems:
        world.check.fail("I6", f"a bit of {name} is wrong, and verification finds nothing")
    return True


async def _start_from(world: World, source: ObjectStore, name: str, runtime: Runtime, *, claims: bool) -> None:
    """Make a savepoint the first checkpoint of a new query, which has the state of the old one (I6)."""
    target = source if claims else MemoryStore()
    restore = SavepointRestore(source, target, name, "claim" if claims else "no_claim", runtime)
    savepoint = await restore.load(world.logs.max_parallelism)
    query_id = runtime.new_id()
    first = await restore.first_checkpoint(
        savepoint,
        checkpoint_id=savepoint.checkpoint_id,
        batch_id=-1,
        query_id=query_id,
        run_id="run-of-another-query",
        operators=[each.uid for each in savepoint.operators],
        check=lambda checkpoint: None,
    )
    await restore.settle(query_id, [first])
    objects = {info.name: Stored(await target.get(info.name), info.modified) async for info in target.list()}
    if claims and descriptor_name(name) in objects:
        world.check.fail("I6", f"savepoint {name} was claimed and can be restored once more")
    await world.check.check_first(first.model_copy(update={"batch_id": savepoint.batch_id}), objects)


async def _refuse_what_cannot_be(world: World, source: ObjectStore, runtime: Runtime) -> None:
    """Nothing goes on from a savepoint for other key groups, or with a wrong bit; and no file of others' goes (I6)."""
    store, groups = MemoryStore(), world.logs.max_parallelism
    await create_savepoint(source, store, runtime, "broken")
    savepoint = await SavepointRestore(store, store, "broken", "no_claim", runtime).load(groups)
    where, name = parse_savepoint_location(f"sim://jobs/{directory_of('broken')}")
    if (where, name) != ("sim://jobs", "broken") or bool(savepoint.entries) != bool(savepoint.files):
        world.check.fail("I6", f"{savepoint.entries} entries in {len(savepoint.files)} files of {name} in {where}")
    notes = f"{directory_of('broken')}notes.txt"
    await store.put(notes, b"of somebody else")
    mistakes: list[Coroutine[Any, Any, object]] = [
        SavepointRestore(store, store, "broken", "no_claim", runtime).load(groups + 1),
        delete_savepoint(store, runtime, "broken", commit=True),
    ]
    for file in savepoint.files[:1]:
        whole = savepoint.object_name(file)
        await store.put(whole, with_flipped_bit(Stored(await store.get(whole), 0.0), world.rng("broken")).body)
        mistakes.append(_start_from(world, store, "broken", runtime, claims=False))
    for mistake in mistakes:
        try:
            done = await mistake
        except (Invalid, CorruptData) as error:
            world.trace("refused", type(error).__name__)
        else:
            world.check.fail("I6", f"{done} of a savepoint that is broken")


async def _save(world: World, process: Process, name: str) -> None:
    store, runtime = world.store.client(process), world.runtime(process.name)
    try:
        savepoint: Savepoint = await create_savepoint(store, store, runtime, name)
    except DstlError as error:
        world.trace("savepoint-failed", type(error).__name__)
        corrupt = isinstance(error, CorruptData) and not (world.may_corrupt or world.check.damage.names)
        if type(error) is Invalid or corrupt:
            world.check.fail("I21", f"savepoint {name} failed: {error!r}")
    else:
        world.trace("savepoint", f"{name} of {savepoint.checkpoint_id}")
        world.savepoints.append(savepoint)
    process.kill()


def _kill(world: World, process: Process) -> None:
    world.count(FaultKind.SAVEPOINT_CRASH)
    process.kill()
