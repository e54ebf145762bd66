"""Sizes, times and durations as people write them, on a terminal or a page."""

from __future__ import annotations

from datetime import UTC, datetime


def size_text(count: float) -> str:
    """Return a number of bytes as people write it: ``512 B``, ``3.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def age_text(seconds: float) -> str:
    """Return a duration as people write it: ``41 s``, ``3 h 20 min``, ``12 d``."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d"


def time_text(unix_seconds: float) -> str:
    """Return a moment in UTC, to the second; one that no calendar has (a watermark may be any) as its number."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:.0f} s"


def seconds_text(seconds: float | None) -> str:
    """Return a short duration as people write it: ``8.1 ms``, ``240 ms``, ``1.25 s``, ``3 min``; ``-`` for None."""
    if seconds is None:
        return "-"
    if seconds >= 120:
        return age_text(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    millis = seconds * 1000
    return f"{millis:.0f} ms" if millis >= 10 or not millis else f"{millis:.1f} ms"
