"""What a simulated world does once and then remembers, for it would be done again and again and is not under test.

Each process of a world reads the records and segments of the others. That their bytes are read back as what was
written, that each damage is found, is for other tests to show. Here the same bytes are always the same record, the same
footer, the same block and the same index of a base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dstl.changelog.segment import reader as segments
from dstl.checkpoint.manifest import reader as manifests
from materializer.bases import cold_reads, key_group_file
from tests.simulation import audit

_MOST = 4096


_PLACES: tuple[tuple[Any, str], ...] = (
    (manifests, "decode_record"),
    (audit, "decode_record"),
    (segments, "decode_block"),
    (segments, "unpack_footer"),
    (key_group_file, "read_index"),
    (cold_reads, "read_index"),
)
"""Where each of them is called."""


@contextmanager
def remembering() -> Iterator[None]:
    """Decode the bytes of one world once."""
    before = [getattr(module, name) for module, name in _PLACES]
    once = {decode: _remembered(decode) for decode in before}
    try:
        for (module, name), decode in zip(_PLACES, before, strict=True):
            setattr(module, name, once[decode])
        yield
    finally:
        for (module, name), decode in zip(_PLACES, before, strict=True):
            setattr(module, name, decode)


def _remembered(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another once for the same arguments; the first of them are bytes."""
    known: dict[tuple[Any, ...], Any] = {}

    def look_up(data: bytes | memoryview, *of: Any, **named: Any) -> Any:
        key = (bytes(data), *of, *named.values())
        found = known.get(key)
        if found is None:
            if len(known) > _MOST:
                known.clear()
            found = known[key] = decode(data, *of, **named)
        return found

    return look_up
