"""The state of an operator in memory, for its runners: a heap table, read as a TaskManager's are."""

from collections import Counter

from dstl.rpc.state_client import StateClient
from dstl.taskmanager.reads import LocalTransport, TableSource
from handles.key_group import MAX_MAX_PARALLELISM, KeyGroupRange
from materializer.tables import HeapStateTable


class MemorySource(StateClient):
    """A source of state that takes the changes of a finished run: the next run then sees them.

    ``calls`` counts the requests, so that a test can tell bulk from one by one.
    """

    def __init__(self):
        self.held = TableSource(HeapStateTable())
        self.calls = Counter()
        super().__init__([(KeyGroupRange.all(MAX_MAX_PARALLELISM), _Counting(self.held, self.calls))], "op", 0)

    def apply(self, changes):
        """Apply a batch of changes."""
        self.held.apply(changes)

    def content(self, state):
        """Return everything that a state holds, by (key, user key)."""
        groups = self.held.table.key_groups()
        entries = (entry for group in groups for entry in self.held.table.scan(state, group, limit=1 << 30))
        return {(entry.key, entry.user_key): entry.value for entry in entries}


class _Counting(LocalTransport):
    def __init__(self, source, calls):
        super().__init__(source)
        object.__setattr__(self, "calls", calls)

    def send(self, message):
        self.calls[message.name] += 1
        return super().send(message)
