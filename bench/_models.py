"""The latency models of ``models.json``."""

import json
from pathlib import Path
from typing import Any


def models() -> dict[str, dict[str, Any]]:
    """Return each set by its name, as ``LatencyParameters.of`` takes it; the caller's to change."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    return found
