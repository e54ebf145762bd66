"""Events of many state machines, in an order that most of them keep, and what a job must say of them.

An address is in one of several states, as in Flink's state machine example. An event leads to the next, and one that
the state does not know is invalid: it is an alert, and the address begins anew. Invalid events are planted, so a job
that says nothing is not right.
"""

import random
from collections.abc import Iterable

INITIAL = "initial"
TRANSITIONS = {
    INITIAL: {"a": "w", "b": "x"},
    "w": {"b": "y"},
    "x": {"b": "x", "c": "z", "d": "y"},
    "y": {"e": "w", "f": "w"},
    "z": {"g": INITIAL},
}
EVENTS = "abcdefg"

Alert = tuple[str, int, str, str]
"""Address, the event's number, the state, and the event that it does not know."""


def following(state: str, event: str) -> str | None:
    """Return the next state; None where the event is invalid."""
    return TRANSITIONS[state].get(event)


class Machines:
    """Makes events, and knows what a job has to say.

    Args:
        addresses: Number of state machines.
        error_rate: Share of events that are planted invalid ones.
        seed: Decides everything.
    """

    def __init__(self, addresses: int, error_rate: float, seed: int) -> None:
        self.states: dict[str, str] = {}
        """Of every address that has had an event."""
        self.alerts: set[Alert] = set()
        """All that must be raised, once each."""
        self.events = 0
        self._addresses = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(addresses)]
        self._error_rate = error_rate
        self._rng = random.Random(seed)

    def make(self, count: int) -> list[tuple[str, int, str]]:
        """Return the next events: address, number, event."""
        rng, made = self._rng, []
        for _ in range(count):
            address = rng.choice(self._addresses)
            state = self.states.get(address, INITIAL)
            valid = TRANSITIONS[state]
            if rng.random() < self._error_rate:
                event = rng.choice([each for each in EVENTS if each not in valid])
                self.alerts.add((address, self.events, state, event))
                self.states[address] = INITIAL
            else:
                event = rng.choice(list(valid))
                self.states[address] = valid[event]
            made.append((address, self.events, event))
            self.events += 1
        return made

    def compare(self, alerts: Iterable[Alert], states: dict[str, str]) -> dict[str, int]:
        """Return how a job's alerts and last states differ; an alert that came twice is a false one."""
        said: set[Alert] = set()
        false = 0
        for alert in alerts:
            false += alert in said or alert not in self.alerts
            said.add(alert)
        keys = states.keys() | self.states.keys()
        return {
            "planted": len(self.alerts),
            "false_alerts": false,
            "missed_alerts": len(self.alerts - said),
            "state_differences": sum(states.get(key) != self.states.get(key) for key in keys),
        }
