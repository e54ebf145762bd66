"""What a simulated world does once and then remembers, for it would be done again and again and is not under test.

Each process of a world reads the records of the others. That their bytes are read back as what was written, that each
damage is found, is for other tests to show. Here the same bytes are always the same record.
"""

from __future__ import annotations

from collections.abc import Callable

from dstl.checkpoint.manifest.format import ManifestRecord, decode_record

_MOST = 4096


def remembering_records() -> Callable[[bytes, str], ManifestRecord]:
    """Return :func:`decode_record`, which decodes the bytes of one world once."""
    known: dict[tuple[str, bytes], ManifestRecord] = {}

    def decode(data: bytes, name: str) -> ManifestRecord:
        found = known.get((name, data))
        if found is None:
            if len(known) > _MOST:
                known.clear()
            found = known[name, data] = decode_record(data, name)
        return found

    return decode
