"""Object stores: local directory, memory, S3, and wrappers. Only here is a storage SDK imported."""

from dstl.store.base import ByteRange, ObjectInfo, ObjectStore, check_name
from dstl.store.instrumented import InstrumentedStore
from dstl.store.local import LocalStore
from dstl.store.location import open_store
from dstl.store.memory import MemoryStore
from dstl.store.probe import probe
from dstl.store.s3 import S3Store
from dstl.store.sharded import ShardedStore, shard_names

__all__ = [
    "ByteRange",
    "InstrumentedStore",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "S3Store",
    "ShardedStore",
    "check_name",
    "open_store",
    "probe",
    "shard_names",
]
