"""Bits that the disks of a simulated store have lost.

Where it is the newest base of a key group, until a replica helps, the log goes back to the base before it, or to the
beginning: no query may fail of it, and no state be another. Where it is a segment of the log, whoever reads it refuses,
and names it; when a replica has helped, the query goes on as if nothing had been. When everything is over and none
helps, it goes on from an older checkpoint where it may.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from dstl.checkpoint.manifest.format import manifest_sequence
from dstl.errors import DstlError
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializedStateHandle
from materializer.tables import HeapStateTable
from tests.simulation.cluster_manager import ClusterManager
from tests.simulation.raw_store import RawStore
from tests.simulation.store import Stored
from tests.simulation.virtual_time import seeded_runtime
from tests.simulation.world import World
from tests.worlds.restored import restore_tables

_AGAIN_S = 0.5
_SEGMENTS = 0.3
"""Share of the worlds in which one is damaged in the end, where nothing else was done to what they have left: it
takes a third as long as all that was before."""
_GOES_ON_S = 900.0


def damage_base(world: World, rng: random.Random) -> None:
    """Flip a bit of a base, any one that is the newest of a key group, as soon as there is one; and have it read.

    Only one of a world is damaged, and where two are kept.
    """
    if world.plan.healed or world.generations < 2 or world.damaged:
        return
    # Seldom is there one: what is asked every half second is not worked out before.
    retained, objects = world.check.retained() if world.materialized else (), world.store.objects
    names = newest_bases(retained[-1].materialized if retained else ())
    if objects.keys().isdisjoint(names):
        world.loop.call_later(_AGAIN_S, damage_base, world, rng, context=world.context)
        return
    _damage(world, rng.choice([each for each in names if each in objects]), rng)
    for each in world.running("tm"):
        each.kill()


def damage_segment(world: World, rng: random.Random, seconds: float) -> None:
    """Flip a bit of a segment that the newest checkpoint names, have it read, and bring it back after so long."""
    names = _newest_segments(world)
    if world.plan.healed or world.damaged or not names:
        return
    _damage(world, rng.choice(names), rng)
    for each in world.running("tm"):
        each.kill()
    world.loop.call_later(seconds, repair, world, context=world.context)


async def meet_damaged_segment(world: World, cluster: ClusterManager) -> None:
    """Flip a bit of a segment that the newest checkpoint names, in some worlds, and start the query again (I6).

    It goes on as if nothing was wrong where it does not need that; else it refuses, and names the object, until it is
    told that it may go back: then it goes on from the newest checkpoint that is sound, and loses what it says.
    """
    rng, check = world.rng("damaged-segment"), world.check
    retained, names, refusals = check.retained(), _newest_segments(world), check.damage.refusals
    if not names or rng.random() >= _SEGMENTS:
        return
    name = rng.choice(names)
    _damage(world, name, rng)
    sound = [each.checkpoint_id for each in retained if await _is_sound(world, each)]
    if retained[-1].checkpoint_id not in sound:
        if await _goes_on(world, cluster) or check.damage.refusals == refusals:
            check.fail("I6", f"the query has not refused to go on: a bit of {name} is wrong")
        went_back = await _goes_on(world, cluster, goes_back=True)
        if went_back != bool(sound) or check.damage.went_back != sound[-1:]:
            check.fail("I6", f"sound are checkpoints {sound}, and the query went back to {check.damage.went_back}")
        if not sound:
            return
    world.is_calm = True
    if not world.violated.is_set() and not await _goes_on(world, cluster):
        check.fail("I6", f"the query does not go on, and needs no bit of {name} that is wrong")
    world.is_calm = False
    await check.settle()
    await check.check_retained(1)


async def _is_sound(world: World, checkpoint: CompletedCheckpoint) -> bool:
    store, groups = RawStore(world.store.objects), KeyGroupRange.all(checkpoint.max_parallelism)
    try:
        restored = await restore_tables(checkpoint, store, groups, lambda _: HeapStateTable(), seeded_runtime(0))
    except DstlError:
        return False
    for table in restored.tables.values():
        table.close()
    return True


async def _goes_on(world: World, cluster: ClusterManager, *, goes_back: bool = False) -> bool:
    """Start the query for a batch, and return whether it has one more."""
    before = world.logs.committed
    driver = cluster.start_driver(1, goes_back=goes_back)
    await driver.process.wait_dead(_GOES_ON_S)
    driver.process.kill()
    return world.logs.committed > before


def repair(world: World) -> None:
    """Bring back what was there."""
    for name, stored in world.damaged.items():
        if name in world.store.objects:
            world.store.objects[name] = stored
    world.damaged.clear()


def _newest_segments(world: World) -> list[str]:
    """Return the segments that the newest checkpoint names and that are objects of their own."""
    retained = world.check.retained()
    named = {each.handle.name for each in retained[-1].segments} if retained else set()
    return sorted(name for name in named & world.store.objects.keys() if manifest_sequence(name) is None)


def _damage(world: World, name: str, rng: random.Random) -> None:
    objects = world.store.objects
    world.damaged[name] = objects[name]
    world.check.damage.names.add(name)
    objects[name] = with_flipped_bit(objects[name], rng)
    world.trace("damaged", name)


def newest_bases(handles: Sequence[MaterializedStateHandle]) -> list[str]:
    """Return the objects that hold the newest base of some key group, and none that another one falls back on."""
    newest: dict[tuple[str, int], int] = {}
    for each in handles:
        for group, _, _ in each.parts:
            place = each.operator, group
            newest[place] = max(newest.get(place, 0), each.checkpoint)
    names: dict[str, bool] = {}
    for each in handles:
        is_newest = all(newest[each.operator, group] == each.checkpoint for group, _, _ in each.parts)
        for name in (each.name, *(file.name for file in each.files)):
            names[name] = is_newest and names.get(name, True)
    return [name for name, is_newest in names.items() if is_newest]


def with_flipped_bit(stored: Stored, rng: random.Random) -> Stored:
    """Return an object with one of its bits flipped."""
    body, at = stored.body, rng.randrange(len(stored.body))
    return Stored(body[:at] + bytes([body[at] ^ 1 << rng.randrange(8)]) + body[at + 1 :], stored.modified)
