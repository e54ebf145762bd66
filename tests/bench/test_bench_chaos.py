"""The chaos job's own judge, and the job in a short form."""

from pathlib import Path
from typing import Any

import pytest

from bench._state_machine import INITIAL, Machines, following


def replay(machines: Machines, count: int) -> tuple[list[tuple[str, int, str, str]], dict[str, str]]:
    """A job's right answers, computed by the rules alone."""
    states: dict[str, str] = {}
    alerts = []
    for address, number, event in machines.make(count):
        state = states.get(address, INITIAL)
        found = following(state, event)
        if found is None:
            alerts.append((address, number, state, event))
        states[address] = found or INITIAL
    return alerts, states


def test_the_judge_sees_what_is_false_missed_or_different(seed: int) -> None:
    machines = Machines(50, 0.05, seed)
    alerts, states = replay(machines, 2000)
    right = machines.compare(alerts, states)
    assert right.pop("planted") == len(alerts) > 20
    assert set(right.values()) == {0}
    assert machines.compare(alerts[1:], states)["missed_alerts"] == 1
    assert machines.compare([*alerts, alerts[0]], states)["false_alerts"] == 1
    assert machines.compare([*alerts, ("10.0.0.1", 10**9, "w", "a")], states)["false_alerts"] == 1
    assert machines.compare(alerts, states | {"10.0.0.1": "nowhere"})["state_differences"] == 1
    del states[next(iter(states))]
    assert machines.compare(alerts, states)["state_differences"] == 1


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_job_under_kills_and_a_failing_store_says_what_is_right(tmp_path: Path, seed: int, run_bench: Any) -> None:
    found = run_bench("chaos", "--minutes", 1, "--kill-every", 8, "--seed", seed, "--work", tmp_path)
    assert (found["false_alerts"], found["missed_alerts"], found["state_differences"]) == (0, 0, 0)
    assert found["planted"] > 50
    assert sum(found["kills"].values()) >= 3
    assert sum(found["store_faults"].values()) > 10
