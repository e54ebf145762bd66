"""The catalogue of metrics as plain rows, read by :mod:`dstl.metrics.registry`.

A row is: name as recorded (Flink's where Flink has it), name for Prometheus (without prefix and unit), kind, unit as
recorded, label, meaning, what to do when it is high.
"""

from __future__ import annotations

_Row = tuple[str, str, str, str, str, str, str]
_C, _G, _H = "counter", "gauge", "histogram"
_FINE = "Nothing: it tells how much is done."

# fmt: off
_LOG: tuple[_Row, ...] = (
    ("uploadBatchSizes", "upload_batch_change_sets", _H, "", "", "Change sets in one sealed segment.", _FINE),
    ("segmentsInFlight", "segments_in_flight", _G, "", "", "Segments sealed and not yet durable.",
     "The store is slower than the log grows: more TaskManagers, or a faster store."),
    ("changelogBytesHeld", "changelog_held", _G, "B", "", "Bytes buffered, queued and in flight.",
     "Near `batching.byte_budget` tasks begin to wait: raise it, or upload earlier."),
    ("segmentsInlined", "segments_inlined", _C, "", "", "Segments that were written inside a manifest.", _FINE),
    ("seals", "seals", _C, "", "reason", "Sealed segments, by the rule that sealed them.",
     "Mostly `memory`: changes outgrow the budget before their batch ends; raise `batching.byte_budget`."),
    ("backpressuredAppends", "backpressured_appends", _C, "", "", "Writes of tasks that had to wait for room.",
     "Tasks wait for uploads: see `dstl_backpressure_seconds_total`."),
    ("backpressureSeconds", "backpressure", _C, "s", "", "Seconds that tasks have waited for room.",
     "Raise `batching.byte_budget`, add TaskManagers, or look why the store is slow."),
    ("segmentsDeleted", "segments_deleted", _C, "", "", "Segments deleted by the TaskManager that wrote them.", _FINE),
    ("segmentsLeftToCleaner", "segments_left_to_cleaner", _C, "", "", "Segments that could not be deleted.",
     "The store refuses deletions: check the rights. The cleaner tries again."),
)

_UPLOAD: tuple[_Row, ...] = (
    ("numberOfUploadRequests", "upload_requests", _C, "", "", "Uploads that have ended, well or not.", _FINE),
    ("numberOfUploadFailures", "upload_failures", _C, "", "", "Uploads that have failed for good.",
     "Each one fails a checkpoint: read the TaskManager's log, check store, network and rights."),
    ("uploadSizes", "upload_size", _H, "B", "", "Bytes of an uploaded object.", _FINE),
    ("uploadLatenciesNanos", "upload_latency", _H, "ns", "", "From the first attempt to the winner's answer.",
     "p99 far above p50 with few hedges sent: see `dstl_hedges_denied_total` for what holds them back."),
    ("attemptsPerUpload", "upload_attempts", _H, "", "", "Attempts of an upload, hedges left out.",
     "Above 1: the store answers with errors; see `dstl_slow_downs_total`."),
    ("totalAttemptsPerUpload", "upload_attempts_with_hedges", _H, "", "", "Attempts of an upload, hedges included.",
     "More requests are paid for than objects stored: lower `hedging.budget`."),
    ("hedgesSent", "hedges_sent", _C, "", "", "Second requests for late uploads.",
     "Above a few per cent of uploads the store is slow as a whole, and hedging does not help."),
    ("hedgesWon", "hedges_won", _C, "", "", "Uploads whose hedge answered first.",
     "It is good when most hedges win; when few do, the delay is too short."),
    ("hedgesDenied", "hedges_denied", _C, "", "reason", "Hedges that were wanted and not sent, by reason.",
     "`throttled` and `breaker`: the store is overloaded. `budget`, `bytes`: raise the limits of `hedging`."),
    ("hedgeBytes", "hedged", _C, "B", "", "Bytes sent by hedges.", "Traffic that stores nothing new: as above."),
    ("slowDowns", "slow_downs", _C, "", "", "Answers by which the store asks for less (503 SlowDown).",
     "Spread over more prefixes or buckets (several locations joined by commas), or write less."),
    ("loopLagSeconds", "loop_lag", _C, "s", "", "Seconds by which timers of uploads came too late.",
     "The process is starved: give it processor, or take other work off the host."),
    ("losersDeleted", "hedge_losers_deleted", _C, "", "", "Objects of losing attempts that were deleted.", _FINE),
    ("losersLeftToCleaner", "hedge_losers_left_to_cleaner", _C, "", "", "Objects of losers left to the cleaner.",
     "They are paid for until the cleaner comes: check the right to delete."),
)

_MATERIALIZATION: tuple[_Row, ...] = (
    ("startedMaterialization", "materializations_started", _C, "", "", "Materializations begun.", _FINE),
    ("completedMaterialization", "materializations_completed", _C, "", "", "Materializations that ended well.", _FINE),
    ("failedMaterialization", "materializations_failed", _C, "", "", "Materializations that failed.",
     "The log cannot be truncated and restores get longer: read the TaskManager's log."),
    ("materializationsDropped", "materializations_dropped", _C, "", "", "Those lost as tables were replaced.",
     "Bases are written for nothing: runs fail, or key groups move, more often than bases are made."),
    ("materializedBytes", "materialized", _C, "B", "", "Bytes of bases that were written.",
     "Far above the bytes of changes: raise `materialization.interval_s`, or use `table='rocksdb'`."),
    ("lastDurationOfMaterialization", "last_materialization_duration", _G, "ms", "", "How long the last one took.",
     "Near `materialization.interval_s` there is no pause between two: more TaskManagers."),
    ("materializationSyncSeconds", "materialization_sync", _H, "s", "", "The part of one that holds up batches.",
     "Above 0.05 s it is to be seen in batch times: smaller tables, more TaskManagers."),
    ("oldestUnmaterializedSeconds", "oldest_unmaterialized", _G, "s", "", "Age of the oldest change without a base.",
     "Above `materialization.overdue_s` materializations fail or do not come: see their failures."),
    ("estimatedReplaySeconds", "estimated_replay", _G, "s", "", "How long replaying the present log would take.",
     "Restores take at least as long: materialize earlier (`materialization.replay_s`)."),
    ("expiredEntriesDropped", "expired_entries_dropped", _C, "", "", "Entries dropped as their time to live passed.",
     _FINE),
    ("basesDiscarded", "bases_discarded", _C, "", "", "Objects of unfinished bases that were deleted.",
     "Materializations fail: see their failures."),
    ("basesLeftToCleaner", "bases_left_to_cleaner", _C, "", "", "Objects of unfinished bases left to the cleaner.",
     "Check the right to delete."),
)

_RESTORE: tuple[_Row, ...] = (
    ("baseCacheHits", "base_cache_hits", _C, "", "", "Bases that a restore found on its host.", _FINE),
    ("baseCacheMisses", "base_cache_misses", _C, "", "", "Bases that a restore had to fetch.",
     "After a restart on the same hosts: raise `materialization.cache_bytes`."),
    ("baseCacheDamaged", "base_cache_damaged", _C, "", "", "Cached bases that were damaged, and fetched again.",
     "The host's disk is failing: look at it."),
    ("restoredBytes", "restored", _G, "B", "", "Bytes that the current or last restore has applied.", _FINE),
    ("bytesToRestore", "to_restore", _G, "B", "", "Bytes that the current or last restore has to read.",
     "Restores take long: materialize more often, or share the key groups among more TaskManagers."),
    ("restoreBytesPerSecond", "restore_rate_bytes_per_second", _G, "", "", "Rate of the current or last restore.",
     "Low is bad: the store or the processor is the limit."),
    ("restoreEtaSeconds", "restore_eta", _G, "s", "", "Seconds to go of a restore; -1 while unknown.",
     "Wait, or see the rate."),
)

_PROCESS: tuple[_Row, ...] = (
    ("stateEntries", "state_entries", _G, "", "operator", "Entries of an operator's tables.",
     "It grows for ever: state without a time to live, or keys that never end."),
    ("stateBytes", "state", _G, "B", "operator", "Bytes of an operator's tables.",
     "Near the host's memory: `table='rocksdb'`, more TaskManagers, or a time to live."),
    ("ownedKeyGroups", "owned_key_groups", _G, "", "", "Key groups that the TaskManager owns.",
     "Much more than another's: they are shared evenly only where their number allows it."),
    ("residentBytes", "resident_memory", _G, "B", "", "Resident memory of the TaskManager's process.",
     "Near the container's limit it is killed: more memory overhead, `table='rocksdb'`, more TaskManagers."),
    ("processCpuSeconds", "process_cpu", _C, "s", "", "Processor time of the TaskManager's process.",
     "A rate near 1: one loop serves all of it; add TaskManagers."),
)

_STORE: tuple[_Row, ...] = (
    ("storeRequests", "store_requests", _C, "", "verb", "Requests to the object store.",
     "They are what S3 bills: put and list cost about 12 times a get."),
    ("storeRequestNanos", "store_request_latency", _H, "ns", "verb", "How long a request took.",
     "The store or the network is slow: compare with the store's own figures."),
    ("storeRequestBytes", "store_request_size", _H, "B", "verb", "Bytes of a request; of list and delete, names.",
     _FINE),
    ("storeRequestFailures", "store_request_failures", _C, "", "verb", "Requests that failed or were cancelled.",
     "A few losers of hedges are normal; else read the log."),
)

_DRIVER: tuple[_Row, ...] = (
    ("numberOfCompletedCheckpoints", "checkpoints_completed", _C, "", "", "Checkpoints that completed.",
     "Low is bad: no batches, or checkpoints fail."),
    ("numberOfFailedCheckpoints", "checkpoints_failed", _C, "", "", "Checkpoints that failed; their batches run again.",
     "Read the driver's log, or the page: it has each one's error."),
    ("checkpointSeconds", "checkpoint_duration", _H, "s", "", "What a batch waited for its checkpoint.",
     "See `dstl_checkpoint_part_seconds`: which part of it takes the time."),
    ("checkpointPartSeconds", "checkpoint_part", _H, "s", "part",
     "Parts of that: persist (uploads), assemble, commit (the manifest), notify.",
     "persist, commit: the store. assemble: many segments; materialize earlier. notify: TaskManagers are busy."),
    ("checkpointRequests", "checkpoint_requests", _H, "", "", "Requests to the store for one checkpoint.",
     "It grows with TaskManagers and with uploads ahead of the checkpoint, never with partitions."),
    ("lastCompletedCheckpointId", "last_checkpoint_id", _G, "", "", "Number of the last completed checkpoint.", _FINE),
    ("lastIncSizeOfNonMaterialization", "last_checkpoint_new", _G, "B", "", "Bytes of changes in the last one.", _FINE),
    ("lastCheckpointFullSize", "last_checkpoint_full", _G, "B", "", "Bytes of everything it refers to.",
     "Far above the state's size: the log is long; materialize more often."),
    ("lastCheckpointAt", "last_checkpoint_timestamp", _G, "s", "", "When it completed, Unix seconds.",
     "`time() -` this above a few trigger intervals: the query stands still or checkpoints fail."),
    ("estimatedRecoverySeconds", "estimated_recovery", _G, "s", "", "How long restoring the last one would take.",
     "Longer than the job may be down: materialize more often, or add TaskManagers."),
    ("numLateRecordsDropped", "late_rows_dropped", _C, "", "operator", "Rows dropped as they came too late.",
     "A longer delay in `withWatermark()` takes later rows."),
    ("currentInputWatermark", "current_input_watermark", _G, "ms", "", "Lowest watermark, Unix time.",
     "Low is bad: one that stands still holds timers and windows back; look for a source without rows."),
    ("numRestores", "restores", _C, "", "", "Starts of the query.", "It restarts again and again: read its log."),
    ("restoreSeconds", "restore_duration", _H, "s", "", "From a start's first task until it could work.",
     "Materialize more often; see the TaskManagers' restore rates."),
    ("lastRestoredBytes", "last_restored", _G, "B", "", "Bytes that the last start read.", "As above."),
    ("taskManagers", "task_managers", _G, "", "", "TaskManagers that are registered.",
     "Low is bad: below `dstl_task_managers_wanted` batches wait or fail."),
    ("taskManagersWanted", "task_managers_wanted", _G, "", "", "TaskManagers that share the key groups.", _FINE),
    ("taskManagerUp", "task_manager_up", _G, "", "task_manager", "1 where it answered the last poll, else 0.",
     "0: hung, cut off or starved; its other series stand still meanwhile."),
    ("subsumedDeleted", "subsumed_objects_deleted", _C, "", "", "Objects of subsumed checkpoints deleted.", _FINE),
    ("subsumedLeftToCleaner", "subsumed_objects_left_to_cleaner", _C, "", "", "Such objects left to the cleaner.",
     "Check the right to delete."),
    ("basesUnpublished", "bases_unpublished", _C, "", "", "Materializations that the end of a run has cut off.",
     "Bases are uploaded for nothing, and the log grows: raise `materialization.publish_within_s`."),
    ("driverStoreRequests", "driver_store_requests", _C, "", "verb", "The driver's requests to the object store.",
     "About one put for each checkpoint is normal."),
    ("driverStoreRequestNanos", "driver_store_request_latency", _H, "ns", "verb", "How long such a request took.",
     "The store or the network is slow."),
    ("driverStoreRequestBytes", "driver_store_request_size", _H, "B", "verb", "Bytes of such a request.",
     "Manifests of many segments: materialize earlier."),
    ("driverStoreRequestFailures", "driver_store_request_failures", _C, "", "verb", "Such requests that failed.",
     "Read the driver's log."),
)
# fmt: on

ROWS: dict[str, tuple[_Row, ...]] = {
    "taskmanager": (*_LOG, *_UPLOAD, *_MATERIALIZATION, *_RESTORE, *_PROCESS, *_STORE),
    "driver": _DRIVER,
}
"""The rows, by the process that records them."""
