"""The configuration of processes that have files: of TaskManagers, and of their coordinator."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from dstl.files.options import FileOptions
from dstl.option_sources import SECTIONS, check_option_names, resolve
from dstl.options import CheckpointOptions
from dstl.taskmanager.config import TaskManagerConfig

_SECTIONS = ("batching", "upload", "hedging", "checkpoints", "s3", "sealing")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FileConfig(TaskManagerConfig):
    """Configures the TaskManagers of one application, those that have files of checkpoint directories among them.

    Attributes:
        checkpoints: How long a commit may take.
        files: When files become durable.
    """

    checkpoints: CheckpointOptions = CheckpointOptions()
    files: FileOptions = FileOptions()

    @staticmethod
    def of(options: Mapping[str, str], environment: Mapping[str, str]) -> FileConfig:
        """Return that of TaskManagers without tables.

        Args:
            options: Spark's.
            environment: The process's.

        Raises:
            Invalid: A value is wrong, or an option is unknown.
        """
        check_option_names(environment, options)
        sections = {name: resolve(name, SECTIONS[name], None, environment, options) for name in _SECTIONS}
        return FileConfig("", files=FileOptions.of(options), **sections)  # type: ignore[arg-type]
