"""Options of a checkpoint directory in a log: ``spark.dstl.commit``, ``spark.dstl.durability`` and more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import ValidationError, field_validator

from dstl.errors import Invalid
from dstl.files.namespace import SCHEME, plain_location_of
from dstl.options.section import OptionSection

_SPARK = "spark.dstl."


class FileOptions(OptionSection, frozen=True):
    """Durability of the files of a checkpoint directory."""

    commit: Literal["now", "with-next"] = "now"
    """Time at which the commit of a batch becomes durable. ``now``: before the batch ends, which waits for a request
    (two where its changes are large). ``with-next``: with the offsets of the next batch, in one record, or 50 ms later
    in its own where no batch begins before: a batch waits for one request only, and costs one where batches follow each
    other. The same is promised: sources are told that a batch is done behind its record, and a query that dies before
    it runs the batch again from the same offsets, so that an idempotent sink gets it a second time a little more often.
    Spark's progress of a batch comes before its commit is durable; readers of the location see a batch when its record
    is written. For a ``StateBackend`` the same, and its checkpoints are reported then."""

    sources: Literal["forget", "keep"] = "forget"
    """Rows of which the sources of a query are told that they are done. ``forget``: they may delete them (files with
    ``cleanSource``, queues), so with ``commit=with-next`` a batch begins when the record of its offsets and of the
    commit before is durable. ``keep``: they are there for a later read (Kafka, Delta, files that stay), so a batch of a
    query with state begins at once, and its tasks end behind the record: a batch waits for nothing. A ``foreachBatch``
    function then must write nothing outside before it has run its frame, and rows that pass no stateful operator must
    not go to a sink whose tasks commit by themselves (``foreach``). Tasks of a ``StateBackend`` begin behind the
    record: what Spark does before them takes about as long."""

    durability: Literal["commit", "task"] = "commit"
    """Time at which the files of a task are durable. ``commit``: with the commit, in at most one request of each host;
    where a host's service is lost before it, the query fails and its next run runs the batch again. ``task``: before
    the task ends, which waits for the store, in a request for the files that are closed together; a host that is lost
    afterwards costs nothing. Of the driver's own host nothing is stored earlier, for the query ends with it. It is of
    Spark's own operators: a ``StateBackend`` refuses it where the application has not the plugin for those."""

    also: tuple[str, ...] = ()
    """Checkpoint directories elsewhere (``dstl://...``, joined by commas) whose objects a fork of them may use. Those
    of the same bucket or parent directory need not be named. More: who can write the records of a directory can have
    this process read checkpoints there; none: a fork of a directory elsewhere cannot be read."""

    @field_validator("also", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [each for each in re.split(rf",(?={SCHEME}:)", value) if each] if isinstance(value, str) else value

    @field_validator("also")
    @classmethod
    def _are_roots(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            plain_location_of(each)
        return value

    @staticmethod
    def of(spark_conf: Mapping[str, str]) -> FileOptions:
        """Return what Spark's configuration says.

        Raises:
            Invalid: A value is not one of the option's.
        """
        names = {name: spark_conf.get(_SPARK + name) for name in FileOptions.model_fields}
        try:
            return FileOptions.model_validate({name: value for name, value in names.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0])
            raise Invalid(f"{_SPARK}{option}={names.get(option)!r}: {first['msg']}") from None
