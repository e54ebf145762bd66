"""Bits that the disks of a simulated store have lost, of the newest base of a key group, until a replica helps.

The log goes back to the base before it, or to the beginning: no query may fail of it, and no state be another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from handles.materialized_handle import MaterializedStateHandle
from tests.simulation.store import Stored
from tests.simulation.world import World

_AGAIN_S = 0.5


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
    name = rng.choice([each for each in names if each in objects])
    world.damaged[name] = objects[name]
    objects[name] = with_flipped_bit(objects[name], rng)
    world.trace("damaged", name)
    for each in world.running("tm"):
        each.kill()


def repair(world: World) -> None:
    """Bring back what was there."""
    for name, stored in world.damaged.items():
        if name in world.store.objects:
            world.store.objects[name] = stored
    world.damaged.clear()


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
