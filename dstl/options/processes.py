"""Options of the processes of an application, and of their way to the store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dstl.options.section import OptionSection


class ClusterOptions(OptionSection, frozen=True):
    """Coordinator and TaskManagers on another master than ``local[...]``."""

    host: str | None = None
    """The driver's address as executors and TaskManagers reach it. None: ``spark.driver.host``, which is right wherever
    Spark itself works; another is needed only where DSTL's port is reached by another name than Spark's."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the coordinator. 0: any free one, so that several drivers share a host. A fixed one can be opened in a
    firewall, and be told to a ``dstl taskmanager`` that is started by hand; but a second driver on the host is
    refused."""

    secret_file: str | None = None
    """File with the application's secret (at least 16 bytes of text, readable by its owner alone), shared with
    TaskManagers that are started by hand. None: a random one for each :class:`StateBackend`, which cannot leak; but
    then only the executors' own TaskManagers can register."""

    launch: bool = True
    """On: the first task on a host starts its TaskManager, which takes its memory beside the executor's
    (``spark.executor.memoryOverhead`` must allow for it where containers are limited). Off: nothing is started;
    ``task_managers`` of them have to be started by hand, and their operator replaces a lost one."""


class WorkerOptions(OptionSection, frozen=True):
    """Spark's Python workers that run the query's tasks."""

    freeze: bool = True
    """Whether a worker takes what it has imported out of the garbage collector's sight. PySpark forces a full
    collection after every task, which walks all that modules have left: 20 to 45 ms, as measured on one machine. On:
    workers freeze what lives after their first tasks, and after one that has imported something (:func:`gc.freeze`,
    after a collection); a cycle that was in use at one of these moments is never collected in that worker. Off: every
    task pays, and the collector sees everything: for processors that keep large cyclic structures from task to task,
    and drop them later."""


class MemoryOptions(OptionSection, frozen=True):
    """Memory of a TaskManager. What would outgrow it is refused (``StateTooLarge``), and the query ends with its last
    checkpoint, before the host kills the process."""

    limit_bytes: int | None = Field(default=None, gt=0)
    """Most resident memory of a TaskManager's process. Larger: more state in memory; smaller: more is left to the
    executors beside it. Leave a fifth for what comes and goes: uploads, base files, a restore. None: only
    ``reserve_bytes`` limits it."""

    reserve_bytes: int = Field(default=256 << 20, ge=0)
    """What the host, or the container, must have left (Linux only). More: whatever else runs there has more time to
    grow; less: more of the memory is of use. 0: it is not looked at."""


class MetricsOptions(OptionSection, frozen=True):
    """The driver's endpoint for metrics and its page."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of one small HTTP server in the driver: ``/metrics`` has the figures of the driver and of all TaskManagers
    for Prometheus (extra ``prometheus``), ``/`` a page for people (extra ``ui``). 0: any free one, which
    ``StateBackend.metrics_url`` tells. None: no server, and nothing is asked of TaskManagers. With it each look, by a
    scraper or an open page, costs one small message to each TaskManager."""

    host: str = "127.0.0.1"
    """Address it listens at. The loopback: it cannot be reached from outside the driver's host, which needs a scraper
    or an SSH tunnel there. Another: anyone who reaches it sees names of operators, sizes and times, though never state,
    for there is no password and no TLS."""


class S3Options(OptionSection, frozen=True):
    """Access to S3. Credentials are no option: they come from the SDK's provider chain (environment, profile,
    web identity, container or instance role), so that no secret is ever in a configuration."""

    endpoint_url: str | None = None
    """Another server that speaks S3, as ``http://host:port``. None: AWS."""

    region: str | None = None
    """None: from the SDK's configuration, else found out by one redirected request per client."""

    addressing_style: Literal["path", "virtual"] | None = None
    """Bucket in the path or in the host name. None: path for another ``endpoint_url`` (it needs no wildcard DNS),
    virtual for AWS (where path is going away)."""

    max_connections: int = Field(default=64, ge=1)
    """Connections to S3 of one store; a request beyond it waits in the client, where neither hedge nor retry helps it.
    More: sockets and TLS handshakes; fewer: PUTs of one checkpoint queue behind each other."""

    connect_timeout_s: float = Field(default=3.0, gt=0)
    """Then a connection counts as refused: certainly nothing was stored. Longer: rides out packet loss; shorter: a new
    attempt sooner."""

    read_timeout_s: float = Field(default=30.0, gt=0)
    """Silence on a connection after which the answer counts as lost, and with it what became of a PUT. It backs up
    ``UploadOptions.attempt_timeout_s``, which acts first; reads have only this."""

    multipart_threshold: int = Field(default=32 << 20, ge=5 << 20, le=5 << 30)
    """Objects of at least this many bytes go up in parts, several at once. Smaller: faster single objects, but three
    requests more each (a PUT costs $5 per million); larger: a retry repeats more bytes. Manifests and savepoints'
    descriptors are put on condition that their name is free, and go up whole whatever their size."""

    multipart_part_size: int = Field(default=16 << 20, ge=5 << 20, le=5 << 30)
    """Bytes of one part (at most 10,000 parts make an object). Smaller: more requests; larger: less at once."""

    multipart_concurrency: int = Field(default=4, ge=1)
    """Parts of one object under way at once. More: faster, and more memory for copies."""

    sse_kms_key_id: str | None = None
    """KMS key (id, ARN or alias) for all objects. None: the bucket's default encryption. With a key every PUT and GET
    needs ``kms:GenerateDataKey`` or ``kms:Decrypt``; bucket keys are asked for, which makes KMS requests (and their
    cost, $3 per million) rare."""

    expected_bucket_owner: str | None = Field(default=None, pattern=r"^[0-9]{12}$")
    """AWS account that must own the bucket; every request is refused otherwise. It protects from a bucket that was
    deleted and taken by another owner."""

    @field_validator("endpoint_url")
    @classmethod
    def _without_secret(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith(("http://", "https://")) or "@" in value):
            raise ValueError("write http://host:port or https://host:port, without user or secret")
        return value


class SealingOptions(OptionSection, frozen=True):
    """Sealing of stored objects with a key, so that who can write to the bucket cannot forge state."""

    key_file: str | None = None
    """File with the key, as text of at least 32 bytes (``openssl rand -hex 32``), which its owner alone may read; on
    every host of the cluster, and wherever the command line is used, at this path. With it, every object carries a
    HMAC of each 16 KiB, 0.1 % more bytes, and some 1 ms of processor per MB written or read. Without it, checksums find
    damage and not forgery. A location is sealed from its first object on or never, and always with the same key."""
