"""Coordinator, TaskManagers and tasks together, over real sockets in one event loop."""

import asyncio
import gc

import pytest

from dstl.checkpoint.manifest.format import manifest_name
from dstl.checkpoint.state_catalogue import ExpectedOperator
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.errors import (
    CheckpointDeclined,
    Fenced,
    Invalid,
    MissingState,
    OutcomeUnknown,
    TaskManagerLost,
    Unavailable,
)
from dstl.files.query_records import WHOLE_EVERY
from dstl.options import CheckpointOptions, MaterializationOptions, UploadOptions
from dstl.runtime import SystemClock
from dstl.store.base import ObjectInfo
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from dstl.taskmanager import service
from handles.checkpoint import referenced_objects
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.manual_clock import ManualClock
from tests.simulation.virtual_time import seeded_runtime
from worlds.service import Driver, Job, copy_of, resolve_states, state_of
from worlds.waiting import until


async def test_a_run_is_restarted_in_the_same_driver_without_reading_state_again(job: Job) -> None:
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0)
        await driver.run_uncommitted("run-1", 1)
        # Spark did not commit batch 1: the next run replays it, from the tables that are still at batch 0.
        await driver.run_batches("run-2", (1, 2))
        await job.check()
        assert [report.bytes for report in driver.restores] == [0, 0]


async def test_only_the_lost_task_managers_key_groups_are_read_again(job: Job) -> None:
    async with job.driver(task_managers=3) as driver:
        await driver.run_batches("run-1", range(3))
        owned = {m: driver.members[m].backend.key_groups for m in driver.members}
        reads = {m: driver.members[m].store.calls["get"] for m in driver.members}
        await driver.members["tm-1"].kill()
        await driver.run_batch("run-1", 3)
        for member in ("tm-2", "tm-3"):
            assert driver.members[member].backend.key_groups == owned[member]
            assert driver.members[member].store.calls["get"] == reads[member]
        assert driver.members["tm-4"].backend.key_groups == owned["tm-1"]
        await job.check()


async def test_a_task_manager_lost_while_another_is_restored_leaves_no_key_group_without_its_owner(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = asyncio.Event(), asyncio.Event()
    restore = service.TableRestore.open

    async def slow(self: service.TableRestore, *, serves: bool = False) -> None:
        await restore(self, serves=serves)
        if not go_on.is_set():
            held.set()
            await go_on.wait()

    async with job.driver(task_managers=2) as driver:
        await driver.run_batch("run-1", 0)
        await driver.members["tm-1"].kill()
        monkeypatch.setattr(service.TableRestore, "open", slow)
        batch = asyncio.create_task(driver.run_batch("run-1", 1))
        async with asyncio.timeout(10):
            await held.wait()
        await driver.members["tm-2"].kill()
        await until(lambda: len(driver.members) == 4, "two others")
        go_on.set()
        # Each task reads what the batch before has left, of all its key groups.
        await batch
        await job.check()


async def test_an_attempt_that_wrote_to_a_lost_task_manager_never_counts(job: Job) -> None:
    events = job.events(1)
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0)
        async with driver.attempt(driver.who("run-1", "counts", 1, 0), events["counts"]) as attempt:
            await driver.members["tm-1"].kill()
            await attempt.acknowledge()
        rest = [("counts", slot) for slot in range(1, 4)] + [("sums", slot) for slot in range(2)]
        for uid, slot in rest:
            await driver.task(driver.who("run-1", uid, 1, slot), events[uid])
        await driver.task(driver.who("run-1", "sums", 1, 2), events["sums"])
        with pytest.raises(CheckpointDeclined, match="are lost: restart the query"):
            await driver.commit("run-1", 1)
        assert [c.batch_id for c in await job.retained()] == [0]
        await driver.run_batch("run-2", 1, events)
        await job.check()


async def test_a_cleaner_that_passes_during_a_checkpoint_is_no_request_of_it(job: Job) -> None:
    """A machine that was slow between the first batch's restore and its commit had it pay for the first pass."""

    class Waiting(MemoryStore):
        async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
            if name.startswith("manifests/"):
                await asyncio.sleep(0.05)
            return await super().put(name, data, if_absent=if_absent)

    async with job.driver(Waiting(), checkpoints=CheckpointOptions(clean_interval_s=0.001)) as driver:
        await driver.run_batches("run-1", range(3))
        assert [report.requests for report in driver.checkpoints] == [1, 1, 1]


async def test_a_driver_that_was_overtaken_before_its_first_task_takes_nothing_from_the_one_at_work(job: Job) -> None:
    """The crash point T11 has found it: it fenced the newer driver, only to be refused itself."""
    async with job.driver() as late, job.driver() as new:
        await late.plan("run-1", 0)
        await new.run_batches("run-2", range(3))
        before = await job.names()
        await late.run_tasks("run-1", 0, job.events(0), {})
        for _ in range(2):
            with pytest.raises(Fenced, match="taken over"):
                await late.commit("run-1", 0)
        assert before == await job.names()
        await new.run_batch("run-2", 3)
        await job.check()


async def test_tasks_of_a_replaced_run_are_fenced(job: Job) -> None:
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0)
        zombie = driver.attempt(driver.who("run-1", "counts", 1, 0))
        async with zombie as late:
            await driver.run_batch("run-2", 1)
            with pytest.raises(Fenced, match="run-1"):
                await late.acknowledge()
        with pytest.raises(Fenced, match="run-1"):
            await driver.task(driver.who("run-1", "counts", 1, 0))
        await driver.run_batch("run-2", 2)
        assert all(op.registry == {"states": []} for op in (await job.retained())[-1].operators)


async def test_a_new_run_waits_for_the_old_runs_checkpoint_and_never_takes_it_for_its_own(job: Job) -> None:
    """Before, the old run's checkpoint was committed under the new epoch and marked the new run's batch as done."""
    job.store = FaultyStore(MemoryStore(), latency=lambda verb, *_: 0.15 if verb == "put" else 0.0)
    first, second = job.events(1), job.events(1)
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0)
        await driver.run_uncommitted("run-1", 1, first)
        stopped = asyncio.create_task(driver.commit("run-1", 1))
        await asyncio.sleep(0.05)
        batch = await driver.next_batch("run-2")
        await stopped
        job.wrote(first if batch == 2 else {})
        await driver.run_batch("run-2", batch, second)
        await job.check()
        assert [(c.batch_id, c.run_id) for c in await job.retained()][-2:] == [(1, "run-1"), (2, "run-2")]


async def test_another_query_and_a_directory_elsewhere_are_refused_before_anything_is_written(job: Job) -> None:
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0, {})
        with pytest.raises(Invalid, match=r"query-2.*query-1.*one StateBackend per streaming query"):
            await driver.task(driver.who("run-x", "counts", 0, 0, query="query-2"))
        await driver.run_batch("run-1", 1, {})
        held = await job.names()
    async with job.driver() as other:
        for _ in range(2):
            with pytest.raises(Invalid, match=r'\n +\.option\("checkpointLocation", backend\.checkpoint_location\)\n'):
                await other.task(other.who("run-x", "counts", 0, 0, query="query-2"))
        assert await job.names() == held


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_parallelism": 64}, r"max_parallelism=128.*has 64"),
        ({"operators": {"counts": 4}}, r"'sums'.*allow_non_restored_state"),
    ],
    ids=["max_parallelism", "operators"],
)
async def test_a_query_that_does_not_fit_its_state_is_refused_every_time(
    changed: dict[str, object], says: str, job: Job
) -> None:
    """Refused once, a task that Spark tries again is refused again: nothing is half open."""
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0, {"counts": {b"a": b"1"}})
    async with job.driver(**changed) as other:
        for _ in range(2):
            with pytest.raises(Invalid, match=says):
                await other.task(other.who("run-2", "counts", 1, 0))
        assert [c.batch_id for c in await job.retained()] == [0]


async def test_what_a_declined_checkpoint_has_stored_goes_when_its_batch_runs_again(job: Job) -> None:
    async with job.driver(inline_threshold=0, commit_attempts=2) as driver:
        await driver.run_batch("run-1", 0)
        await driver.run_uncommitted("run-1", 1)
        job.store.rules = [FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only="manifests/")]
        with pytest.raises(CheckpointDeclined):
            await driver.commit("run-1", 1)
        stored = await job.names(suffix=".seg")
        job.store.rules = []
        await driver.run_batches("run-2", (1, 2))
        await job.check()
        named = {name for each in await job.retained() for name in referenced_objects(each)}
        assert stored - named, "the declined checkpoint has stored something"
        assert not (stored - named) & await job.names()


async def test_a_checkpoint_that_takes_too_long_is_declined_and_no_task_manager_is_lost(job: Job) -> None:
    options = CheckpointOptions(timeout_s=1.0, task_manager_timeout_s=5.0)
    upload = UploadOptions(attempt_timeout_s=1.4, delete_grace_s=0.0)
    events = job.events(1)
    async with job.driver(inline_threshold=0, checkpoints=options, upload=upload) as driver:
        await driver.run_batch("run-1", 0)
        job.store.rules = [FaultRule(Fault.STUCK, "put", nth=(1,), only=".seg", delay_s=0.0)]
        with pytest.raises(CheckpointDeclined, match=r"batch 1 failed.*within 1 s"):
            await driver.run_batch("run-1", 1, events)
        assert driver.lost == []
        await driver.run_batch("run-2", 1, events)
        await job.check()


async def test_a_commit_that_its_driver_leaves_is_no_error_of_asyncio_s(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told as one in the driver's log where its part of the state could not be stored either."""
    options = CheckpointOptions(timeout_s=1.0, task_manager_timeout_s=5.0)
    async with job.driver(inline_threshold=0, checkpoints=options) as driver:
        await driver.run_uncommitted("run-1", 0)
        job.store.rules = [FaultRule(Fault.STUCK, "put", chance=1.0, only=".seg", delay_s=0.0)]
        commit = asyncio.ensure_future(driver.commit("run-1", 0))
        await until(lambda: job.store.fired, "the put")
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        job.store.rules = []
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_commit_that_runs_out_of_time_says_what_the_store_answered(job: Job) -> None:
    """A full disk, say: the message named the deadline alone."""
    options = CheckpointOptions(timeout_s=1.0, task_manager_timeout_s=5.0)
    async with job.driver(checkpoints=options) as driver:
        await driver.run_batch("run-1", 0)
        await driver.plan("run-1", 1)
        job.store.rules = [FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only="manifests/")]
        with pytest.raises(OutcomeUnknown, match=r"does not take it \(.*unavailable \(injected\)\): restart the query"):
            await driver.run_batch("run-1", 1)
        job.store.rules = []


@pytest.mark.parametrize("lands", [True, False])
async def test_a_commit_whose_outcome_is_unknown_stops_the_run_and_keeps_its_segments(lands: bool, job: Job) -> None:
    """DESIGN 5.6: unknown is never treated as failed. Before, the segments of a late manifest were given up."""
    options = CheckpointOptions(timeout_s=1.0, task_manager_timeout_s=5.0)
    events = job.events(1)
    async with job.driver(inline_threshold=0, checkpoints=options) as driver:
        await driver.run_batch("run-1", 0)
        await driver.plan("run-1", 1)
        delay_s = 0.01 if lands else 60.0
        job.store.rules = [FaultRule(Fault.STUCK, "put", nth=(1,), only="manifests/", delay_s=delay_s)]
        with pytest.raises(OutcomeUnknown, match="is unknown"):
            await driver.run_batch("run-1", 1, events)
        await asyncio.sleep(0.05)
        with pytest.raises(TaskManagerLost, match="run-1 of the query is over"):  # no task may go on in this batch
            await driver.task(driver.who("run-1", "counts", 1, 0), events["counts"])
        found = await job.retained()
        assert [c.batch_id for c in found] == ([0, 1] if lands else [0])
        job.store.rules = []
        async with driver.attempt(driver.who("run-2", "counts", 1, 0)):
            # The attempts of the run before are dropped now; whatever is there can still be restored.
            await asyncio.sleep(0.05)
            await state_of(found[-1], job.store)
        job.wrote(events if lands else {})
        assert await driver.next_batch("run-3") == 1 + lands
        for batch in range(1 + lands, 4):
            await driver.run_batch("run-3", batch, events if batch == 1 else job.events(batch))
            await job.check()


@pytest.mark.parametrize("is_tried_again", [False, True])
async def test_no_record_behind_a_gateway_names_a_deleted_segment(is_tried_again: bool, job: Job) -> None:
    """It answers 503 to a commit that its server has carried out, and until that has restarted.

    Before, the commit counted as failed: the TaskManager deleted the record's segments when it ended, and a driver
    whose task was tried again fenced itself, from which no restart recovers.
    """
    events = job.events(2)
    async with job.driver(inline_threshold=0, commit_attempts=3) as driver:
        await driver.run_batches("run-1", range(2))
        await driver.plan("run-1", 2)
        job.store.rules = [
            FaultRule(Fault.STORED_SLOW_DOWN, "put", nth=(1,), only="manifests/"),
            FaultRule(Fault.SLOW_DOWN, "put", chance=1.0, only="manifests/"),
        ]
        with pytest.raises(OutcomeUnknown, match=r"slow-down \(injected\)"):
            await driver.run_batch("run-1", 2, events)
        job.store.rules = []
        if is_tried_again:
            with pytest.raises(TaskManagerLost, match="run-1 of the query is over"):
                await driver.task(driver.who("run-1", "counts", 2, 0), events["counts"])
    await asyncio.sleep(0.1)
    found = await job.retained()
    assert [c.batch_id for c in found] == [0, 1, 2]
    assert (await verify_location(job.store, seeded_runtime(job.seed, SystemClock()))).problems == ()
    async with job.driver() as successor:
        assert await successor.next_batch("run-2") == 3
        job.wrote(events)
        await successor.run_batch("run-2", 3)
        await job.check()


async def test_a_task_manager_that_hangs_is_lost_and_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl.checkpoint.fleet.members.ANSWER_S", 1.0)
    events = job.events(1)
    options = CheckpointOptions(timeout_s=1.0, task_manager_timeout_s=5.0)
    async with job.driver(checkpoints=options) as driver:
        await driver.run_batch("run-1", 0)
        async with driver.members["tm-1"].service._turn:  # as a stopped process: it takes calls and does not answer
            with pytest.raises(TaskManagerLost, match=r"tm-1 on 127\.0\.0\.1 does not answer persist"):
                await driver.run_batch("run-1", 1, events)
        assert driver.lost == ["tm-1"]
        await driver.run_batch("run-2", 1, events)
        await job.check()


async def test_a_task_manager_that_misses_a_completed_checkpoint_is_restored_from_it(job: Job) -> None:
    """It was given to another run, say, between persist and complete: the next batch must not find it behind."""
    forgetful: list[Driver] = []

    def latency(verb: str, *_: object) -> float:
        # The put of the record, and not that of the offsets before it.
        if forgetful and verb == "put" and forgetful[0].members["tm-1"].backend._persisted is not None:
            forgetful.pop().members["tm-1"].backend.abort()
        return 0.0

    job.store = FaultyStore(MemoryStore(), latency=latency)
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0)
        forgetful.append(driver)
        await driver.run_batch("run-1", 1)
        assert forgetful == []
        await driver.run_batch("run-1", 2)
        await job.check()
        assert len(driver.restores) == 1, "the run was not restarted"


@pytest.mark.parametrize("at_once", [False, True])
async def test_two_actions_of_200_tasks_are_one_checkpoint_and_none_of_them_fails(
    at_once: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes in foreachBatch: each acknowledgement of the second ended all of its tasks that were at work."""
    monkeypatch.setattr("worlds.service.MAX_PARALLELISM", 256)
    # Some partitions have no rows; those of the second action are the same, its workers are other ones.
    written = {f"key-{n}".encode(): b"%d" % n for n in range(300)}
    async with job.driver(operators={"op": 200}, max_parallelism=256) as driver:

        async def action(stage: int) -> None:
            cores = asyncio.Semaphore(40)

            async def task(slot: int) -> None:
                who = driver.who("run-1", "op", 0, slot, stage=stage)
                async with cores, driver.attempt(who, written, {}) as attempt:
                    # The second action is slower: some of its tasks are at work when the first's checkpoint is made.
                    await asyncio.sleep(0.01 if stage == 1 else 0.15)
                    await attempt.read(list(written)[:1])
                    await attempt.acknowledge()

            await asyncio.gather(*map(task, range(200)))

        if at_once:
            await asyncio.gather(action(1), action(2))
        else:
            await action(1)
            await action(2)
        await driver.commit("run-1", 0)
        assert [report.batch_id for report in driver.checkpoints] == [0]
        job.wrote({"op": written})
        await job.check()


@pytest.mark.parametrize("why", ["no checkpoint", "no store"])
async def test_a_run_that_cannot_be_opened_leaves_one_fence_however_many_tasks_try(why: str, job: Job) -> None:
    """Every scan reads the fences behind the boundary: 5 restarts with 4 tries of 4 tasks left 80."""
    async with job.driver(inline_threshold=0) as driver:
        await driver.run_batch("run-1", 0, {"counts": {b"a": b"1"}})
    before = len(await job.names("manifests/"))
    batch, error, runs, tries = (5, MissingState, 5, 16) if why == "no checkpoint" else (1, Unavailable, 1, 2)
    async with job.driver() as driver:
        if why == "no store":
            job.store.rules = [FaultRule(Fault.UNAVAILABLE, "get", chance=1.0, only=".seg")]
        for run in range(runs):
            for slot in range(tries):
                with pytest.raises(error):
                    await driver.task(driver.who(f"run-{2 + run}", "counts", batch, slot % 4))
        assert len(await job.names("manifests/")) == before + 1
        job.store.rules = []
        # What may pass is tried again within the run; what may not, in another one.
        await driver.run_batch("run-2" if why == "no store" else "run-9", 1, {"counts": {b"b": b"2"}})
        await job.check()


async def test_a_start_costs_the_same_requests_however_many_came_before(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents that a scheduled job's starts get slower for years: each left a fence, which each cleaner pass read."""
    caplog.set_level("INFO", "dstl.checkpoint.upkeep.cleaner")
    monkeypatch.setattr(Driver, "materialization", MaterializationOptions(min_log_bytes=1))
    clock = ManualClock()
    store = job.store = InstrumentedStore(MemoryStore(clock=clock))
    requests, records, kept = [], [], 5
    for run in range(38):
        before = store.calls.total()
        async with job.driver() as driver:
            await driver.run_batch(f"run-{run}", run, {"counts": {b"a": b"%d" % run}})
            for kind in ("offsets", "commits"):
                # As Spark does, which keeps a hundred: each lies in a record.
                await driver.directory.delete(f"{kind}/{run - kept}", f"run-{run}")
            await driver.service.bases.finish()
            await until(lambda: "the cleaner has passed" in caplog.text, "the cleaner")
        caplog.clear()
        requests.append(store.calls.total() - before)
        records.append(len(await job.names("manifests/")))
        await clock.advance(4 * 3600.0)
    # Six starts a day, a fence each, what is retained, and what lies behind the next whole index.
    assert max(records[24:]) <= 6 + 2 + 2 * kept + 2 * WHOLE_EVERY, records
    # A materialization that has just not ended costs two.
    assert max(requests[26:]) <= max(requests[12:26]) + 5, requests


async def test_a_run_whose_opening_failed_is_over_once_another_has_begun(job: Job) -> None:
    """A late task of it would have taken the location from its successor."""
    async with job.driver() as driver:
        await driver.run_batch("run-1", 0, {})
        with pytest.raises(MissingState):
            await driver.task(driver.who("run-2", "counts", 7, 0))
        await driver.run_batch("run-3", 1, {})
        for run in ("run-1", "run-2"):
            with pytest.raises(Fenced, match=rf"run {run} .*is over"):
                await driver.task(driver.who(run, "counts", 1, 0))
        await driver.run_batch("run-3", 2, {})


async def test_a_task_that_names_a_job_group_of_the_users_belongs_to_the_latest_run(job: Job) -> None:
    """``setJobGroup`` in foreachBatch: two groups fenced each other, and one outlived its run's failure."""
    async with job.driver() as driver:
        for batch, group in enumerate(["", "orders", "audit", "", "orders"]):
            driver.job_group = group
            await driver.run_batch("run-1", batch)
        async with driver.attempt(driver.who("run-1", "counts", 5, 0)) as attempt:
            await driver.run_batch("run-2", 5)
            with pytest.raises(Fenced, match="never began"):
                await attempt.acknowledge()
        assert len(driver.restores) == 2
        assert [c.run_id for c in await job.retained()][-1] == "run-2"
        driver.job_group = ""
        with pytest.raises(Fenced, match=r"run-1 .*is over"):
            await driver.task(driver.who("run-1", "counts", 5, 0))
        await job.check()


async def test_a_late_task_of_a_query_that_was_refused_does_not_take_the_directory_of_the_next_one(job: Job) -> None:
    """It counted as one of the latest run, and fenced for a query without a directory: the right one was refused."""
    async with job.driver() as driver:
        await driver.begin_run("run-1")
        late = driver.who("run-0", "counts", 0, 0, query="query-0")
        with pytest.raises(Invalid, match=r"query-0 keeps its .* directory elsewhere(?s:.*) of one StateBackend"):
            await driver.task(late)
        await driver.run_batch("run-1", 0)
        with pytest.raises(Invalid, match=r"serves query query-1"):
            await driver.task(late)
        await job.check()


class _Running:
    """Spark, of which one run is running."""

    def __init__(self, run: str) -> None:
        self.run = run

    async def check(self, query_id: str) -> None:
        pass

    async def is_running(self, run_id: str) -> bool:
        return run_id == self.run

    async def fitted_offsets(self, run_id: str, content: bytes) -> bytes:
        return content


async def test_a_late_look_of_an_earlier_run_does_not_fence_the_one_that_spark_is_running(job: Job) -> None:
    """A purge of the run before came behind the first look of the next, which then counted as replaced."""
    async with job.driver(execution=_Running("run-2")) as driver:
        await driver.begin_run("run-2")
        await driver.directory.listing("commits", "run-1")
        await driver.run_batch("run-2", 0)
        await job.check()


async def test_a_driver_that_finds_objects_gone_because_another_has_gone_on_is_fenced(job: Job) -> None:
    """A TaskManager that comes late restores what the newer driver needs no more: that is no damage."""
    options = CheckpointOptions(retained=2, task_manager_timeout_s=5.0)
    async with job.driver(inline_threshold=0) as old:
        await old.run_batches("run-1", (0, 1))
        stale = copy_of(job.model)
        async with job.driver(inline_threshold=0, checkpoints=options) as new:
            await new.run_batches("run-2", range(2, 5))
            gone = {name for c in old.service.completed for name in referenced_objects(c)}
            await job.store.delete(sorted(gone - {n for c in new.service.completed for n in referenced_objects(c)}))
            await job.store.delete([name for name in sorted(gone) if name.endswith(".seg")])
            await old.members["tm-1"].kill()
            with pytest.raises(Fenced, match="taken over"):
                await old.task(old.who("run-1", "counts", 2, 0), {}, stale["counts"])


async def test_the_cleaner_leaves_what_a_long_savepoint_reads(job: Job) -> None:
    """Its checkpoint is subsumed, its objects are older than any grace; only the hold keeps them."""
    clock = ManualClock()
    store = job.store = MemoryStore(clock=clock)
    options = CheckpointOptions(clean_interval_s=0.02, task_manager_timeout_s=5.0)
    async with job.driver(inline_threshold=0, checkpoints=options) as driver:
        await driver.run_batches("run-1", range(2))
        checkpoint, hold = driver.service.hold()
        await driver.run_batches("run-1", range(2, 7))
        assert checkpoint not in driver.service.completed
        for old in range(2):
            orphan = f"probe/{old:032x}"
            await store.put(orphan, b"")
            await clock.advance(10 * 86_400)
            async with asyncio.timeout(10):
                while orphan in await job.names("probe/"):  # noqa: ASYNC110 - it polls
                    await asyncio.sleep(0.01)
        for name in (*referenced_objects(checkpoint), manifest_name(checkpoint.checkpoint_id)):
            await store.head(name)
        driver.service.release(hold)


async def test_an_operator_cannot_be_added_once_a_query_has_run(job: Job) -> None:
    async with job.driver() as driver:
        with pytest.raises(Invalid, match="two operators"):
            driver.service.expect(ExpectedOperator("counts", 1, "string", resolve_states))
        await driver.run_batch("run-1", 0, {})
        with pytest.raises(Invalid, match="while the query runs"):
            driver.service.expect(ExpectedOperator("late", 1, "string", resolve_states))
