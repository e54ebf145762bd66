"""What the ways to define an operator share: the hooks through which a backend takes and places it."""

from __future__ import annotations

from abc import abstractmethod

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dstl.spark.task_definition import TaskDefinition

__all__ = ["Operators", "observed"]


class Operators:
    """The part of a backend that its ways to define operators stand on; the backend is the only concrete one.

    Attributes:
        max_parallelism: Number of key groups.
    """

    max_parallelism: int

    @abstractmethod
    def _check_open(self) -> None:
        """Refuse a call to a backend that was closed."""

    @abstractmethod
    def _next_operator(self, name: str | None, parallelism: int | None) -> tuple[str, int]:
        """Return the name and the parallelism of the operator that is being defined, checked."""

    @abstractmethod
    def _add(self, definition: TaskDefinition) -> None:
        """Expect the operator's tasks."""

    @abstractmethod
    def _placed(self, keyed: DataFrame, definition: TaskDefinition) -> DataFrame:
        """Bring the rows to their partitions and run the operator's tasks there."""


def observed(df: DataFrame, uid: str) -> DataFrame:
    """Return the DataFrame with its rows counted, for the query's progress.

    That also keeps a source without new data from being planned away, and an operator's tasks with it: then its
    acknowledgements would be missing.
    """
    return df.observe(f"dstl_{uid}", F.count(F.lit(1)).alias("rows"))
