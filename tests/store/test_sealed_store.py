"""Objects that are sealed: what somebody without the key does to them is seen before a byte of it is used."""

import ast
import hmac
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dstl.errors import CorruptData, Invalid, ObjectNotFound
from dstl.options import SealingOptions
from dstl.store import LocalStore, MemoryStore, ObjectStore, open_store
from dstl.store.base import ByteRange
from dstl.store.sealed import CHUNK_BYTES, SEAL_BYTES, SealedStore
from worlds.store_contract import StoreContract

KEY = b"k" * 32
GOLDEN = "73746174652b38ffab651578d68faefc81e54a2a19"
SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5)


class TestSealedStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[ObjectStore]:
        store = SealedStore(LocalStore(tmp_path), KEY)
        yield store
        await store.close()


@pytest.mark.parametrize("size", SIZES)
async def test_every_range_of_a_sealed_object_is_what_was_stored(size: int, rng: random.Random) -> None:
    inner = MemoryStore()
    store, data = SealedStore(inner, KEY), rng.randbytes(size)
    assert (await store.put("a/b", data)).size == size
    assert await store.get("a/b") == data
    assert (await store.head("a/b")).size == size
    assert [info.size async for info in store.list()] == [size]
    assert (await inner.head("a/b")).size == size + SEAL_BYTES * max(1, -(-size // CHUNK_BYTES))
    cuts = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, size - 1, size, size + 100]
    for start in cuts:
        for stop in cuts:
            if 0 <= start < min(stop, size):
                assert await store.get("a/b", ByteRange(start, stop)) == data[start:stop]


async def test_any_change_to_a_sealed_object_is_refused(rng: random.Random) -> None:
    inner = MemoryStore()
    store, data = SealedStore(inner, KEY), rng.randbytes(2 * CHUNK_BYTES + 100)
    await store.put("good", data)
    stored = await inner.get("good")
    chunk = CHUNK_BYTES + SEAL_BYTES
    forged = {
        "cut within a chunk": stored[:-1],
        "cut at a chunk": stored[:chunk],
        "cut at two": stored[: 2 * chunk],
        "empty": b"",
        "too short for a seal": stored[:5],
        "extended": stored + b"x",
        "chunks swapped": stored[chunk : 2 * chunk] + stored[:chunk] + stored[2 * chunk :],
        "chunk repeated": stored[:chunk] + stored[:chunk] + stored[2 * chunk :],
        "chunk left out": stored[:chunk] + stored[2 * chunk :],
        "never sealed": data,
    }
    for _ in range(300):
        at = rng.randrange(len(stored))
        forged[f"bit of byte {at}"] = stored[:at] + bytes([stored[at] ^ (1 << rng.randrange(8))]) + stored[at + 1 :]
    for what, body in forged.items():
        await inner.delete(["good"])
        await inner.put("good", body)
        with pytest.raises(CorruptData, match="sealing key"):
            print(what, await store.get("good"))
        # A range shows what was asked for as it was, or nothing.
        for wanted in (ByteRange(0, len(data)), ByteRange(5, 50), ByteRange(chunk, 2 * CHUNK_BYTES + 1)):
            try:
                found = await store.get("good", wanted)
            except CorruptData:
                continue
            assert found == data[wanted.start : wanted.stop], what


async def test_an_object_under_another_name_or_of_another_key_is_refused() -> None:
    inner = MemoryStore()
    store = SealedStore(inner, KEY)
    await store.put("manifests/1", b"old")
    await inner.put("manifests/2", await inner.get("manifests/1"))
    with pytest.raises(CorruptData, match="manifests/2"):
        await store.get("manifests/2")
    with pytest.raises(CorruptData, match="another one"):
        await SealedStore(inner, b"j" * 32).get("manifests/1")
    with pytest.raises(ObjectNotFound):
        await store.get("manifests/3")


async def test_the_bytes_of_a_sealed_object_stay_what_they_are() -> None:
    """Those of handles/FORMAT.md, section 6."""
    inner = MemoryStore()
    await SealedStore(inner, KEY).put("a/b", b"state")
    assert (await inner.get("a/b")).hex() == GOLDEN
    own = hmac.digest(KEY, b"dstl object seal 1", "sha256")
    seal = hmac.digest(own, (3).to_bytes(2, "little") + bytes(8) + b"\1" + b"a/b" + b"state", "sha256")[:16]
    assert (b"state" + seal).hex() == GOLDEN


async def test_a_key_comes_from_a_file_that_its_owner_alone_may_read(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("3f" * 32)
    key.chmod(0o640)
    with pytest.raises(Invalid, match="chmod 600"):
        open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))
    key.chmod(0o600)
    store = open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))
    await store.put("a", b"state")
    assert (tmp_path / "state" / "a").read_bytes() != b"state"
    assert await store.get("a") == b"state"
    plain = open_store(tmp_path / "state")
    assert len(await plain.get("a")) == len(b"state") + SEAL_BYTES
    key.write_text("short")
    with pytest.raises(Invalid, match="32 bytes"):
        open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))
    key.write_text("a" * 64)
    with pytest.raises(Invalid, match="easily guessed"):
        open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))
    with pytest.raises(Invalid, match="cannot be read"):
        open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(tmp_path / "none")))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(Invalid, match="not a regular file"):
        open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(tmp_path / "pipe")))
    if os.geteuid() == 0:
        key.write_text("3f" * 32)
        os.chown(key, 65534, 0)
        with pytest.raises(Invalid, match="is of user 65534"):
            open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))


def test_no_product_code_opens_a_store_without_saying_how_its_objects_are_sealed() -> None:
    """Each call or partial of ``open_store`` has its third argument; where it is a parameter, its type says so."""
    root, calls, wrong = Path(__file__).parents[2], 0, []
    for path in (each for package in ("dstl", "handles", "materializer") for each in (root / package).rglob("*.py")):
        if path.is_relative_to(root / "dstl/testing"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_the_store = any(
            isinstance(node, ast.ImportFrom) and any(each.name == "open_store" for each in node.names)
            for node in ast.walk(tree)
        )
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            named = [getattr(each, "id", getattr(each, "attr", "")) for each in (call.func, *call.args[:1])]
            if named[0] in ("S3Store", "LocalStore") and not path.is_relative_to(root / "dstl/store"):
                wrong.append(f"{path}:{call.lineno}")
            given = len(call.args) + any(each.arg == "sealing" for each in call.keywords) * 3
            if is_the_store and (named[0] == "open_store" or named == ["partial", "open_store"]):
                calls += 1
                if given < (3 if named[0] == "open_store" else 4):
                    wrong.append(f"{path}:{call.lineno}")
    assert calls > 5, "the calls were not found"
    assert wrong == []
