"""The log: change sets, ownership, batching, hedged uploads, segments."""
