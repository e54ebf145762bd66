"""Mutations of bytes and of JSON values, all of one generator: the same seed makes the same inputs."""

import copy
import json
import random
from typing import Any

NUMBERS = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
DEEP = "nested deeper than any parser goes"
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1 << 31, 1 << 63, -(1 << 63), 1 << 70, float("inf"), float("nan"), "", "a",
    "../../x", "/etc/x", "\x00", "x" * 300, "$timers", "\ud800", [], {}, [[]],
    {"type": "udt"}, [None] * 20, {"a": {"a": {}}},
)  # fmt: skip


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Return the bytes with one to four mutations."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, kind = rng.randrange(len(found) + 1), rng.randrange(8)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at : at + 1] = rng.randbytes(rng.randrange(1, 5))
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) + rng.randrange(-2, 3)
            found[at : at + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, rng.choice(("little", "big")))
        elif kind == 3:
            del found[at : at + rng.randrange(1, 20)]
        elif kind == 4:
            found[at:at] = rng.randbytes(rng.randrange(1, 12))
        elif kind == 5:
            found[at:at] = found[max(0, at - 40) : at]
        elif kind == 6:
            del found[at:]
        else:
            other = rng.choice(others)
            cut = rng.randrange(len(other) + 1)
            found[at : at + 64] = other[cut : cut + 64]
    return bytes(found)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value in which something is changed, added, gone, or nested too deep."""
    found = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _walk(found, places)
        if not places:
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        kind = rng.randrange(7)
        if kind <= 2:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            other, of = rng.choice(places)
            if _has(other, of) and _has(holder, key):
                holder[key] = copy.deepcopy(other[of])
        elif kind == 5:
            if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            else:
                holder[rng.choice(("x", "", "__class__", key + "x"))] = 1
        elif isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 1 << 16, 1 << 32))
        elif rng.random() < 0.1:
            holder[key] = DEEP
    return found


def to_text(rng: random.Random, value: Any) -> bytes:
    """Return a JSON value as text; where it says so, arrays or objects are nested deeper than any parser goes."""
    text = json.dumps(value)
    if json.dumps(DEEP) in text:
        depth = rng.choice((60, 200, 990, 5000, 50_000))
        deep = "[" * depth + "]" * depth if rng.random() < 0.5 else '{"type":' * depth + "1" + "}" * depth
        text = text.replace(json.dumps(DEEP), deep)
    return text.encode()


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _walk(value: Any, places: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in items:
        places.append((value, key))
        _walk(held, places)
