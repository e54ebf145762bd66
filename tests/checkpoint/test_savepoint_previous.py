"""``restore="previous"``: an older checkpoint takes a damaged one's place, never silently, never by default."""

import logging
import random

import pytest

import worlds.service
from dstl.checkpoint.manifest.format import manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import CorruptData, MissingState
from dstl.store.base import ObjectStore
from worlds.files import HastyClock
from worlds.savepoints import a_job, a_runtime, contents, replace
from worlds.service import Job, retained, state_of, without_empty


@pytest.fixture
async def job(seed: int, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of four batches, and what it must have after the last but one."""
    monkeypatch.setattr(worlds.service, "SystemClock", HastyClock)
    job = Job(seed)
    job.drivers += 1
    job.model = (await a_job(job.store, seed, inlined=False))[2]
    return job


HARMS = ["manifest-flipped", "manifest-missing", "segment-missing", "segment-flipped", "record-swapped"]


async def damage(store: ObjectStore, harm: str, seed: int) -> None:
    """Harm what only the newest checkpoint needs."""
    *_, before, newest = await retained(store)
    manifest = manifest_name(newest.checkpoint_id)
    (name, size, _, offset) = newest.segments[-1].segment
    assert name not in {entry.segment[0] for entry in before.segments}
    data = await store.get(manifest)
    rng = random.Random(seed)
    if harm == "manifest-missing":
        await store.delete([manifest])
    elif harm == "record-swapped":
        await replace(store, manifest, await store.get(manifest_name(before.checkpoint_id)))
    elif harm == "manifest-flipped":
        at = rng.randrange(len(data))
        await replace(store, manifest, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif harm == "segment-missing":
        await store.delete([name])
    else:
        data = await store.get(name)
        at = offset + rng.randrange(size)
        await replace(store, name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("harm", HARMS)
async def test_by_default_a_damaged_newest_checkpoint_is_an_error(job: Job, harm: str) -> None:
    await damage(job.store, harm, job.seed)
    async with job.driver() as driver:
        with pytest.raises((CorruptData, MissingState)) as caught:
            await driver.run_batch("run-2", 4, model={})
    assert "restore" in str(caught.value) or "older checkpoint" in str(caught.value)


@pytest.mark.parametrize("harm", HARMS)
async def test_with_previous_the_one_before_is_taken_and_a_loss_is_told(
    job: Job, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    await damage(job.store, harm, job.seed)
    async with job.driver(fall_back=True) as driver:
        # Without its record, a commit is missing as its checkpoint is: the batch is run again, and nothing is lost.
        lost = 1 if harm.startswith("segment") else 0
        assert await driver.next_batch("run-2") == 3 + lost
        with caplog.at_level(logging.WARNING, "dstl.checkpoint.run_opening"):
            await driver.run_batch("run-2", 3 + lost)
        (restored,) = driver.restores
        assert (restored.lost_batches, len(restored.skipped)) == (lost, lost)
        assert ("what 1 batches did to the state is lost" in caplog.text) == bool(lost)
        # The batches after it follow the ordinary rule.
        await driver.run_batch("run-2", 4 + lost)
        assert len(driver.restores) == 1
    # As ``retained``, in a log that holds a damaged record.
    newest = (await ManifestLog(job.store, a_runtime()).scan()).retained[-1]
    assert without_empty(await state_of(newest, job.store)) == without_empty(job.model)


async def test_an_empty_state_is_never_taken_for_an_older_one(job: Job) -> None:
    for name in await contents(job.store, "manifests/"):
        await replace(job.store, name, (await job.store.get(name))[:-1])
    for batch in (0, 4):
        async with job.driver(fall_back=True) as driver:
            with pytest.raises(CorruptData, match="is damaged"):
                await driver.run_batch("run-2", batch, {}, {})
