"""Deletions in the background: after a grace, together, in order, within bounds, and to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dstl.errors import Unavailable
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.memory import MemoryStore
from tests.simulation.virtual_time import LoopClock, virtual
from worlds.memory_recorder import MemoryRecorder


class Store(MemoryStore):
    """Notes each deletion, which takes a second and fails for names that are to stay."""

    def __init__(self, *stays: str) -> None:
        super().__init__()
        self.requests: list[tuple[float, list[str]]] = []
        self.stays = set(stays)

    async def delete(self, names: Sequence[str]) -> None:
        self.requests.append((LoopClock().now(), list(names)))
        await asyncio.sleep(1.0)
        if self.stays.intersection(names):
            raise Unavailable("not now")


def deleter(store: Store, grace_s: float = 0.0, backlog: int = 1000) -> tuple[BackgroundDeleter, MemoryRecorder]:
    recorder = MemoryRecorder()
    return BackgroundDeleter(
        store, clock=LoopClock(), grace_s=grace_s, backlog=backlog, recorder=recorder, deleted="gone", left="left"
    ), recorder


@virtual
async def test_names_are_deleted_together_after_their_grace() -> None:
    store = Store()
    soon, recorder = deleter(store, grace_s=10.0)
    soon.delete(["a"])
    await asyncio.sleep(3.0)
    soon.delete(["b", "c"])
    await asyncio.sleep(5.0)
    soon.delete(["d"])
    await soon.settled()
    assert store.requests == [(15.0, ["a", "b", "c"]), (pytest.approx(23.0), ["d"])]
    assert recorder.counters == {"gone": 4}


@virtual
async def test_a_group_waits_for_the_one_before_it_and_stays_where_that_stays() -> None:
    """A manifest goes before the objects that it names."""
    store = Store("m2")
    soon, recorder = deleter(store)
    soon.delete(["m1"], ["o1", "o2"])
    soon.delete(["m2", "m3"], ["o3"])
    soon.delete([], ["o4"])
    await soon.settled()
    assert [names for _, names in store.requests] == [["m1"], ["o1", "o2"], ["m2", "m3"], ["o4"]]
    assert recorder.counters == {"gone": 4, "left": 3}


@virtual
async def test_no_more_is_remembered_than_the_backlog_and_no_request_is_too_large() -> None:
    store = Store()
    soon, recorder = deleter(store, grace_s=1.0, backlog=1200)
    for number in range(1500):
        soon.delete([f"n{number}"])
    await soon.settled()
    assert [len(names) for _, names in store.requests] == [500, 500, 200]
    assert recorder.counters == {"gone": 1200, "left": 300}
    soon.delete(["one more"])
    await soon.settled()
    assert recorder.counters["gone"] == 1201


@virtual
async def test_closing_deletes_at_once_what_is_remembered_and_waits_for_it() -> None:
    store = Store()
    soon, recorder = deleter(store, grace_s=1000.0)
    soon.delete(["a"])
    await asyncio.sleep(1.0)
    soon.delete(["b"])
    await soon.close()
    await soon.close()
    assert store.requests == [(1.0, ["a", "b"])]
    assert recorder.counters == {"gone": 2}
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_a_deleter_that_is_given_up_leaves_the_rest_to_the_cleaner_and_nothing_running() -> None:
    store = Store()
    soon, recorder = deleter(store)
    soon.delete(["a"], ["b"])
    soon.delete(["c"], ["d"])
    await asyncio.sleep(1.5)
    await soon.close(finish=False)
    assert [names for _, names in store.requests] == [["a"], ["b"]]
    assert recorder.counters == {"gone": 1, "left": 3}
    assert len(asyncio.all_tasks()) == 1
