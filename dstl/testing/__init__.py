"""Shipped to users: store contract kit, faulty store, latency store, manual clock, simulation."""

from dstl.testing.faulty_store import Fault, FaultRule, FaultyStore
from dstl.testing.latency import LatencyStore
from dstl.testing.manual_clock import ManualClock

__all__ = ["Fault", "FaultRule", "FaultyStore", "LatencyStore", "ManualClock"]
