"""Rows of the table of failures of ``dstl://`` (``spark-directory-failures.md``), each on the real services."""

import pytest

from dstl.errors import AccessDenied, MissingState, ObjectNotFound, OutcomeUnknown, TaskManagerLost
from dstl.files import barriers
from dstl.store.base import ObjectInfo
from dstl.store.memory import MemoryStore
from tests.simulation.faulty_store import FaultyStore
from worlds.files import BIG, Stores, application, changelog, denying, driven, noise
from worlds.wrapped_store import Gate

HOST, OTHER = "127.0.0.2", "127.0.0.3"


async def test_of_attempts_on_several_hosts_the_highest_one_is_kept(stores: Stores) -> None:
    """A task's retry, a stage's retry, a second action of foreachBatch, a speculative copy."""
    async with application(stores) as app:
        driver = await app.driver("run")
        one, two = await app.executor(HOST, "run"), await app.executor(OTHER, "run")
        await driver.offsets(0)
        await one.put(changelog(0, 1), b"retry", attempt=7)
        await two.put(changelog(0, 1), b"first", attempt=2)
        await driver.put(changelog(0, 1), b"second", attempt=5)
        # A host's later attempt takes its own earlier one's place, and never the other way.
        await two.put(changelog(1, 1), b"late", attempt=9)
        await two.put(changelog(1, 1), b"slow", attempt=4)
        await driver.commit(0)
        assert await driver.read(changelog(0, 1)) == b"retry"
        assert await driver.read(changelog(1, 1)) == b"late"


@pytest.mark.parametrize("commit", ["now", "with-next"])
async def test_a_zombie_behind_the_commit_changes_nothing_wherever_it_runs(
    commit: str, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A commit with the next offsets must not have a record of its own before.
    monkeypatch.setattr(barriers, "LINGER_S", 60.0)
    async with application(stores, commit=commit) as app:
        driver, far = await app.begun(HOST)
        await far.put(changelog(0, 1), b"kept", attempt=1)
        await driver.put(changelog(1, 1), b"kept", attempt=1)
        await driver.commit(0)
        for zombie in (driver, far):
            for partition in (0, 1):
                await zombie.put(changelog(partition, 1), b"zombie", attempt=99)
        await driver.batch(1, {changelog(0, 2): b"on", changelog(1, 2): b"on"})
    async with driven(stores) as driver:
        assert [await driver.read(changelog(each, 1)) for each in (0, 1)] == [b"kept", b"kept"]


async def test_a_large_file_whose_service_dies_in_the_middle_is_never_cut_short(stores: Stores) -> None:
    async with application(stores) as app:
        driver, task = await app.begun(HOST)
        await task.stage("a-token", b"first half, ")
        await app.end_host(HOST)
        again = await app.executor(HOST, "run")
        with pytest.raises(TaskManagerLost, match="run again"):
            await again.put(changelog(0, 1), b"second half", token="a-token", staged=12)
        await again.stage("another", b"first half, ")
        await again.put(changelog(0, 1), b"second half", token="another", staged=12, attempt=2)
        await driver.commit(0)
        assert await driver.read(changelog(0, 1)) == b"first half, second half"


async def test_a_host_that_is_asked_to_end_and_fails_to_store_costs_one_batch(stores: Stores) -> None:
    async with application(stores, denying(chance=1.0, only=".seg")) as app:
        driver, far = await app.begun(HOST)
        await far.put(changelog(0, 1), b"lost", attempt=1)
        await app.dismiss_host(HOST)
        with pytest.raises(TaskManagerLost):
            await driver.commit(0)


async def test_files_that_a_host_has_of_no_run_outlive_a_record_that_failed(stores: Stores) -> None:
    gate = Gate()
    gate.opened.set()
    async with application(stores, gate) as app:
        driver, far = await app.driver("run"), await app.executor(HOST, "")
        await driver.batch(0, {changelog(1, 1): b"a"})
        await far.put("state/0/0/2.zip", b"of no run")
        await driver.offsets(1)
        await driver.put(changelog(1, 2), b"b")
        gate.refusal = AccessDenied("the bucket policy has changed")
        with pytest.raises(AccessDenied):
            await driver.commit(1)
        gate.refusal = None
        again = await app.driver("next")
        await again.put(changelog(1, 2), b"c")
        await again.commit(1)
    async with application(stores) as app:
        assert await (await app.driver("last")).read("state/0/0/2.zip") == b"of no run"


async def test_files_of_no_run_are_stored_anew_for_the_next_run_because_a_cleaner_may_have_taken_them_for_orphans(
    stores: Stores,
) -> None:
    """Another driver may have led in between: what is older than its fence, and in no record, its cleaner deletes."""
    silent = type("_Silence", (_Silent,), {"drops": True})
    async with application(stores, silent, is_hasty=True) as app:
        driver, far = await app.driver("run"), await app.executor(HOST, "")
        await driver.offsets(0)
        await far.put("state/0/0/SSTs/1-aa.sst", noise(BIG))
        silent.silent = True
        with pytest.raises(OutcomeUnknown):
            await driver.commit(0)
        silent.silent = False
        store = stores["/jobs/query/_dstl"]
        orphans = [each.name async for each in store.list() if not each.name.startswith("manifests/")]
        assert orphans
        await store.delete(orphans)
        again = await app.driver("next")
        await again.commit(0)
        last, is_stored = 0, False
        while not is_stored or last < 3:  # a large snapshot rides in the record that follows its upload
            is_stored = any([not each.name.startswith("manifests/") async for each in store.list()])
            last += 1
            await again.batch(last, {})
            assert last < 1000, "nothing is stored anew"
    async with driven(stores, "last") as driver:
        assert await driver.names("commits") == sorted(map(str, range(last + 1)))
        assert await driver.read("state/0/0/SSTs/1-aa.sst") == noise(BIG)


async def test_purge_tombstones_that_are_lost_are_asked_for_again(stores: Stores) -> None:
    async with application(stores) as dying:
        driver, far = await dying.driver("run"), await dying.executor(HOST, "run")
        for batch in range(3):
            await driver.batch(batch, {changelog(0, batch + 1): b"%d" % batch})
        await driver.delete("offsets/0")
        await far.delete(changelog(0, 1))
        assert await driver.names("offsets") == ["1", "2"]
        assert await far.names("state/0/0") == ["2.changelog", "3.changelog"]
        async with driven(stores) as again:
            assert await again.names("offsets") == ["0", "1", "2"], "they were in no record"
            assert await again.read(changelog(0, 1)) == b"0", "and what they name is still whole"
            await again.delete("offsets/0")
            await again.delete(changelog(0, 1))
            await again.batch(3, {changelog(0, 4): b"3"})
            assert await again.names("offsets") == ["1", "2", "3"]
            assert await again.names("state/0/0") == ["2.changelog", "3.changelog", "4.changelog"]


@pytest.mark.parametrize("has_new_offsets", [False, True])
async def test_state_of_batches_that_users_take_back_is_gone_with_the_next_record(
    has_new_offsets: bool, stores: Stores
) -> None:
    """Spark begins with the newest snapshot up to the version that it loads: with one of the batches taken back."""
    async with application(stores) as app:
        driver, far = await app.driver("run"), await app.executor(HOST, "run")
        for batch in range(4):
            await driver.offsets(batch)
            await far.put(f"state/0/0/{batch + 1}.zip", b"old")
            await driver.put(changelog(0, batch + 1), b"old")
            await driver.commit(batch)
        # Of the batch that runs nothing is kept.
        await driver.offsets(4)
        await far.put("state/0/0/5.zip", b"pending")
        for path in ("commits/3", "commits/2", "offsets/4", "offsets/3", *(["offsets/2"] if has_new_offsets else [])):
            await driver.delete(path, run="")
        again = await app.driver("next")
        if has_new_offsets:
            await again.offsets(2)
        await again.put(changelog(0, 3), b"new")
        await again.commit(2)
        names = ["1.changelog", "1.zip", "2.changelog", "2.zip", "3.changelog"]
        assert await again.names("state/0/0") == names
        assert await again.read(changelog(0, 3)) == b"new"
        await again.batch(3, {changelog(0, 4): b"new"})
        # Spark's own purge of old batches takes nothing back.
        for path in ("commits/0", "offsets/0"):
            await again.delete(path)
        await again.batch(4, {changelog(0, 5): b"new"})
        assert await again.names("state/0/0") == [*names, "4.changelog", "5.changelog"]


async def test_a_plain_directory_that_was_rolled_back_by_hand_comes_without_the_state_of_what_was_taken_back(
    stores: Stores,
) -> None:
    plain = stores["/jobs/query"] = MemoryStore()
    for path in ("metadata", "offsets/0", "offsets/1", "commits/0", "state/0/0/1.delta", "state/0/0/2.snapshot"):
        await plain.put(path, b"{}")
    async with driven(stores, "run") as driver:
        assert await driver.names("state/0/0") == ["1.delta"]
        await driver.put("state/0/0/2.delta", b"new")
        await driver.commit(1)
        assert await driver.names("state/0/0") == ["1.delta", "2.delta"]
    assert await plain.get("state/0/0/2.snapshot") == b"{}", "the way back is as it was"


async def test_a_job_whose_files_went_with_its_coordinator_is_not_committed(stores: Stores) -> None:
    async with application(stores) as dying:
        driver, main = await dying.driver("run"), await dying.driver("")
        await driver.batch(0, {changelog(0, 1): b"0", changelog(1, 1): b"0"})
        await main.offsets(1)
        await main.put("state/0/0/2.zip", b"lost")
        async with application(stores) as app:
            main = await app.driver("")
            with pytest.raises(TaskManagerLost, match="was never put"):
                await main.commit(1)
            await main.put("state/0/0/2.zip", b"kept")
            await main.commit(1)
            assert await (await app.driver("next")).names("commits") == ["0", "1"]


async def test_a_run_that_looked_before_another_driver_rolled_back_writes_nothing(stores: Stores) -> None:
    """Of two drivers that start at once the later one must not go on behind batches that are no longer there."""
    async with application(stores) as app, application(stores) as other:
        driver, stale = await app.driver("run"), await other.driver("stale")
        for batch in range(4):
            await driver.batch(batch, {changelog(0, batch + 1): b"state"})
        assert await stale.names("commits") == ["0", "1", "2", "3"]
        for path in ("commits/3", "offsets/3", "commits/2", "offsets/2"):
            await driver.delete(path, run="")
        again = await app.driver("again")
        await again.batch(2, {changelog(0, 3): b"anew"})
        # What another run has just seen is not what a new one begins with.
        fresh = await other.driver("fresh")
        assert await fresh.names("commits") == ["0", "1", "2"]
        await again.batch(3, {changelog(0, 4): b"anew"})
        # The stale one has seen such batches, and not these.
        for each in (stale, fresh):
            with pytest.raises(TaskManagerLost, match="restart it: another driver has written"):
                await each.offsets(4)
        last = await other.driver("last")
        assert await last.names("offsets") == ["0", "1", "2", "3"]
        await last.batch(4, {changelog(0, 5): b"on"})


async def test_barriers_of_a_thread_without_a_run_drop_nobody_s_files(stores: Stores) -> None:
    """As those of asynchronous progress tracking, which are written by threads of their own."""
    async with application(stores) as app:
        query, writer = await app.driver("run"), await app.driver("")
        for batch in range(3):
            await query.put(f"sources/0/{batch}", b"a")
            await writer.offsets(batch)
            await writer.commit(batch)
        await query.delete("offsets/0")
        await writer.offsets(3)
    async with driven(stores) as driver:
        assert await driver.names("sources/0") == ["0", "1", "2"]
        assert await driver.names("offsets") == ["1", "2", "3"]


async def test_a_committed_file_whose_object_is_lost_is_not_taken_for_one_that_was_never_written(
    stores: Stores,
) -> None:
    """Spark goes on without a file that is not there: without a batch's offsets, it would plan the batch again."""
    path = "offsets/0"
    async with driven(stores, "run") as driver:
        await driver.put(path, noise(BIG))
        await driver.commit(0)
    [store] = (store for location, store in stores.items() if location.endswith("_dstl"))
    [lost] = [info.name async for info in store.list() if info.name.endswith(".seg")]
    await store.delete([lost])
    async with driven(stores) as driver:
        with pytest.raises(MissingState, match=f"{path} is lost, for its object {lost}.*dstl files rollback") as raised:
            await driver.read(path)
        assert type(raised.value) is MissingState
        with pytest.raises(ObjectNotFound):
            await driver.read("offsets/7")


class _Silent(FaultyStore):
    """Stores these PUTs, or drops them; answers neither to them nor to what is asked about them, until it is healed."""

    silent = False
    drops = False

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        if type(self).silent and type(self).drops and name.startswith("manifests/"):
            raise OutcomeUnknown("no answer")
        stored = await super().put(name, data, if_absent=if_absent)
        if type(self).silent and name.startswith("manifests/"):
            raise OutcomeUnknown("no answer")
        return stored

    async def get(self, name: str, byte_range: object = None) -> bytes:
        if type(self).silent:
            raise OutcomeUnknown("no answer")
        return await super().get(name, byte_range)  # type: ignore[arg-type]


@pytest.mark.parametrize("commit", ["now", "with-next"])
async def test_a_commit_whose_outcome_is_unknown_ends_its_run_and_the_next_one_finds_out(
    commit: str, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A commit with the next offsets must not have a record of its own before.
    monkeypatch.setattr(barriers, "LINGER_S", 1e6)
    silent = type("_Silence", (_Silent,), {})
    async with application(stores, silent, is_hasty=True, commit=commit) as app:
        driver = await app.driver("run")
        await driver.offsets(0)
        await driver.put(changelog(0, 1), b"a")
        if commit == "with-next":
            await driver.commit(0)
        silent.silent = True
        with pytest.raises(OutcomeUnknown):
            await (driver.commit(0) if commit == "now" else driver.offsets(1))
        silent.silent = False
        with pytest.raises(TaskManagerLost):
            await driver.put(changelog(0, 2))
        again = await app.driver("next")
        assert await again.names("commits") == ["0"], "it was stored, and Spark goes on behind it"
        assert await again.read(changelog(0, 1)) == b"a"
        batch = len(await again.names("offsets"))
        await again.batch(batch, {changelog(0, batch + 1): b"b"})
        assert await again.read(changelog(0, batch + 1)) == b"b"
