"""``python -m dstl.process`` as Spark's plugin starts it: told on a pipe, ending with it, telling nobody the secret."""

import asyncio
import base64
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dstl.errors import TaskManagerLost, Unavailable
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.file_messages import PlaceFiles
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret
from worlds.file_processes import SECRET, hang, line, said, started
from worlds.files import Application, Jvm, application
from worlds.waiting import until
from worlds.wrapped_store import Gate


def test_it_serves_until_its_input_closes_and_leaves_no_socket(tmp_path: Path) -> None:
    process = started(line())
    told = said(process)
    assert told["protocol"] == PROTOCOL_VERSION
    root = f"dstl://{tmp_path}/query"

    async def use() -> None:
        jvm = Jvm(await AsyncConnection.open(Address("h", path=told["socket"]), Secret(SECRET)), "run", root)
        await jvm.batch(0, {"state/0/0/1.changelog": b"a"})
        # Outside of a query; stored when the driver ends.
        await jvm.delete("state/0/0/1.changelog", run="")
        jvm.close()

    asyncio.run(use())
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")
    assert not Path(told["socket"]).exists()
    assert len(list((tmp_path / "query/_dstl/manifests").iterdir())) == 4


def test_a_host_s_process_hands_its_files_over_at_sigterm(tmp_path: Path) -> None:
    """As a pod gets it that is to go; the tasks that it has served are through, and the batch is committed."""
    coordinator = started(line())
    socket, root = said(coordinator)["socket"], f"dstl://{tmp_path}/query"

    async def jvm(path: str) -> Jvm:
        return Jvm(await AsyncConnection.open(Address("h", path=path), Secret(SECRET)), "run", root)

    async def use() -> None:
        driver = await jvm(socket)
        ask = await AsyncConnection.open(Address("h", path=socket), Secret(SECRET))
        placed = await ask.call(PlaceFiles("127.0.0.2", ""))
        ask.close()
        where = [placed.coordinator_host, placed.coordinator_port]
        host = started(line(host="127.0.0.2", bind="127.0.0.2", member_id=placed.member, coordinator=where))
        task = await jvm(said(host)["socket"])
        await driver.offsets(0)
        await task.put("state/0/0/1.changelog", b"of a task")
        host.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(host.communicate, timeout=30)
        assert (host.returncode, errors) == (0, b"")
        await driver.commit(0)
        assert await driver.read("state/0/0/1.changelog") == b"of a task"
        task.close()
        driver.close()

    asyncio.run(use())
    _, errors = coordinator.communicate(timeout=30)
    assert coordinator.returncode == 0
    assert errors.count(b"\n") == 1, "that the service is gone"


@pytest.mark.parametrize("commit", ["now", "with-next"])
async def test_a_host_that_hangs_is_lost_within_the_commits_time_and_the_next_run_goes_on(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its directory was blocked until somebody killed it: the commit, and every later run's first call."""
    monkeypatch.setattr("dstl.checkpoint.fleet.members.ANSWER_S", 1.0)
    root, host = f"dstl://{tmp_path}/query", "127.0.0.2"
    async with (
        application({}, **{"commit": commit, "checkpoints.timeout_s": "1"}) as app,
        host_process(app, host) as (process, socket),
    ):
        driver = await app.driver("run", root)
        task = Jvm(await AsyncConnection.open(Address("h", path=socket), app.secret), "run", root)
        await driver.offsets(0)
        await task.put("state/0/0/1.changelog", b"of a task")
        await driver.commit(0)
        await driver.offsets(1)
        await task.put("state/0/0/2.changelog", b"lost with its host")
        hang(process)

        async def make_it_durable() -> None:
            await driver.commit(1)
            await driver.offsets(2)

        async with asyncio.timeout(20):
            with pytest.raises(TaskManagerLost, match=f"{host} does not answer persist: restart the query"):
                await make_it_durable()
            again = await app.driver("next", root)
            assert await again.names("commits") == ["0"]
            await again.put("state/0/0/2.changelog", b"again")
            await again.commit(1)
            assert await again.read("state/0/0/2.changelog") == b"again"
        process.send_signal(signal.SIGCONT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=30)
        assert (process.returncode, errors) == (0, b""), "it does not end, though it was given up"
        task.close()


async def test_a_host_that_has_given_its_coordinator_up_is_replaced_where_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents that a coordinator's pause of a minute ends all tasks of a host for as long as the application lives."""
    monkeypatch.setattr("dstl.rpc.async_connection.SILENCE_S", 0.5)
    gate = Gate("get")
    gate.opened.set()
    async with application({}, gate) as app:
        await (await app.driver("first")).batch(0, {"state/0/0/1.changelog": b"a"})
    async with application(app.stores, gate) as app:
        task = await app.executor("127.0.0.2", "run")

        async def is_gone() -> bool:
            return (await app.place("127.0.0.2")).member != ""

        gate.opened.clear()
        with pytest.raises(Unavailable, match="no sign of life"):
            await task.read("state/0/0/1.changelog")
        await until(is_gone, "the host's end")  # the host gives up a moment after its task
        gate.opened.set()


@contextlib.asynccontextmanager
async def host_process(app: Application, host: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """The service of a host in a process of its own, and where it listens."""
    placed = await app.place(host)
    where, secret = [placed.coordinator_host, placed.coordinator_port], app.secret.reveal()
    with started(line(host=host, bind=host, member_id=placed.member, coordinator=where, secret=secret)) as process:
        try:
            yield process, (await asyncio.to_thread(said, process))["socket"]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"version": "0.0.1"}, "jar of dstl-pyspark 0.0.1"),
        ({"options": {"spark.dstl.batching.inline_threshold": "much"}}, "inline_threshold"),
        ({"options": {"spark.dstl.commit": "with_next"}}, "with-next"),
        ({"options": {"spark.dstl.batchng.byte_budget": "1"}}, "did you mean batching?"),
        ({"bind": "192.0.2.1"}, "spark.driver.bindAddress"),
        ({"kind": "broker"}, "not a launch spec"),
        ({"secret": b"short"}, "not a launch spec"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_without_the_secret(changed: dict[str, Any], wrong: str) -> None:
    process = started(line(**changed))
    told = said(process)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert wrong in told["error"]
    assert SECRET not in errors
    assert base64.b64encode(SECRET) not in errors
