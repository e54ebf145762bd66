"""``python -m dstl.process`` over a slow local store, which writes a line for each of its requests."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from dstl.options import S3Options, SealingOptions
from dstl.process.program import main
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore
from dstl.store.local import LocalStore

LATENCY = "DSTL_BENCH_LATENCY_S"
REQUESTS = "DSTL_BENCH_REQUESTS"


def interpreter(directory: Path) -> str:
    """Write a program that stands for a Python in ``spark.dstl.python``, and return its path."""
    program = directory / "slow-python"
    root = Path(__file__).parents[1]
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m bench._files_process\n')
    program.chmod(0o755)
    return str(program)


class SlowStore:
    """A local store whose every request takes as long as a PUT of S3."""

    def __init__(self, inner: ObjectStore, latency_s: float, log: Path) -> None:
        self._inner = inner
        self._latency_s = latency_s
        self._log = log.open("a", buffering=1)

    @property
    def location(self) -> str:
        return self._inner.location

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        await self._request("put", name)
        return await self._inner.put(name, data, if_absent=if_absent)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        await self._request("get", name)
        return await self._inner.get(name, byte_range)

    async def head(self, name: str) -> ObjectInfo:
        await self._request("head", name)
        return await self._inner.head(name)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        await self._request("list", prefix)
        async for info in self._inner.list(prefix):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        await self._request("delete", *names)
        await self._inner.delete(names)

    async def close(self) -> None:
        self._log.close()
        await self._inner.close()

    async def _request(self, *what: str) -> None:
        self._log.write(" ".join(what) + "\n")
        await asyncio.sleep(self._latency_s)


def open_slow(location: str, options: S3Options, sealing: SealingOptions) -> ObjectStore:
    """Open a location as the environment says."""
    return SlowStore(LocalStore(location), float(os.environ[LATENCY]), Path(os.environ[REQUESTS]))


if __name__ == "__main__":
    sys.exit(main(open_slow))
