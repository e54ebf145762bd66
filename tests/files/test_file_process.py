"""``python -m dstl.files`` as Spark's plugin starts it: told on a pipe, ending with it, telling nobody the secret."""

import asyncio
import base64
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from dstl.jvm.build import own_version
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.file_messages import PlaceFiles
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret
from worlds.files import Jvm

SECRET = b"an application's secret of 32 by"


def line(**changed: Any) -> bytes:
    told = {"kind": "coordinator", "version": own_version(), "secret": SECRET, "host": "127.0.0.1", "options": {}}
    return base64.b64encode(msgpack.packb(told | changed)) + b"\n"


def started(first: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dstl.files"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(first)
    process.stdin.flush()
    return process


def said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    told: dict[str, Any] = msgpack.unpackb(base64.b64decode(process.stdout.readline()))
    return told


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
        where = {"coordinator_host": placed.coordinator_host, "coordinator_port": placed.coordinator_port}
        host = started(line(kind="host", host="127.0.0.2", member=placed.member, **where))
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


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"version": "0.0.1"}, "jar of dstl-pyspark 0.0.1"),
        ({"options": {"spark.dstl.batching.inline_threshold": "much"}}, "inline_threshold"),
        ({"options": {"spark.dstl.commit": "with_next"}}, "with-next"),
        ({"options": {"spark.dstl.batchng.byte_budget": "1"}}, "did you mean batching?"),
        ({"bind": "192.0.2.1"}, "spark.driver.bindAddress"),
        ({"kind": "broker"}, "no invitation"),
        ({"secret": b"short"}, "no invitation"),
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
