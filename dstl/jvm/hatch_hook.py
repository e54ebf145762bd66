"""The build hook of the wheel: it builds the jar, where it can."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["JarBuildHook"]


class JarBuildHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is not among what is checked
    """Builds ``dstl/jvm/dstl-jvm.jar`` before a wheel or an sdist is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the jar; without a compiler or PySpark, take the one that is there, or none, and say so."""
        sys.path.insert(0, str(Path(self.root)))
        try:
            from dstl.jvm.build import JarNotBuilt, build_jar, is_stale

            if is_stale():
                try:
                    build_jar()
                except JarNotBuilt as error:
                    self.app.display_warning(f"without the jar of dstl://: {error}")
        finally:
            sys.path.pop(0)
