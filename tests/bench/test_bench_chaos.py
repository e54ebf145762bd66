"""The chaos job's own judge, and the job in a short form."""

from pathlib import Path
from typing import Any

import pytest

from bench._list_append import Lists, Lookup
from bench._state_machine import INITIAL, Machines, following
from bench.chaos import JOBS, WRONG


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


def looked_up(began: float, ended: float, key: str, *elements: int) -> Lookup:
    return Lookup(began, ended, key, elements)


def test_the_checker_of_histories_sees_what_no_order_of_batches_explains(seed: int) -> None:
    lists = Lists(seed)
    for _ in range(3):
        lists.make(200)
    right: dict[str, list[int]] = {}
    transaction: dict[int, int] = {}
    replayed = Lists(seed)
    outputs = []
    for number in range(3):
        come: dict[str, list[int]] = {}
        for key, element, _ in replayed.make(200):
            come.setdefault(key, []).append(element)
            transaction[element] = number
        for key, elements in come.items():
            outputs.append((key, len(right.get(key, [])), elements))
            right[key] = right.get(key, []) + elements
    print("keys", len(right))
    nothing = {"wrong_lists": 0, "wrong_outputs": 0, "wrong_lookups": 0, "cycles": 0}
    # Two keys that the first and the last transaction have appended to.
    one, two, *_ = [key for key, held in right.items() if {transaction[each] for each in held} == {0, 1, 2}]
    first = {key: tuple(each for each in right[key] if transaction[each] == 0) for key in (one, two)}
    seen = [looked_up(1, 2, one), looked_up(3, 4, one, *first[one]), looked_up(3, 5, two, *first[two])]
    assert lists.compare(outputs, right, seen) == nothing | {"lookups": 3}

    def wrong(name: str, outputs: Any = outputs, held: Any = right, lookups: Any = ()) -> bool:
        found = lists.compare(outputs, held, lookups)
        del found["lookups"]
        return found == nothing | {name: 1}

    assert wrong("wrong_lists", held=right | {one: right[one][1:]})
    assert wrong("wrong_lists", held=right | {one: [*right[one], right[one][0]]})
    assert wrong("wrong_outputs", outputs[1:])
    assert wrong("wrong_outputs", [*outputs, outputs[0]])
    assert wrong("wrong_lookups", lookups=[looked_up(1, 2, one, *reversed(right[one]))])
    # A batch that is there in one list, and later not yet in another.
    assert wrong("cycles", lookups=[looked_up(1, 2, one, *first[one]), looked_up(3, 4, two)])
    # At the same time it may be so.
    assert not lists.cycle([looked_up(1, 3, one, *first[one]), looked_up(2, 4, two)])
    # A list that has lost what it had.
    assert wrong("cycles", lookups=[looked_up(1, 2, one, *right[one]), looked_up(3, 4, one, *first[one])])
    # Half a batch: a part of its elements alone.
    torn = next(held for held in right.values() if len([each for each in held if transaction[each] == 0]) > 1)
    assert wrong("cycles", lookups=[looked_up(1, 2, next(k for k in right if right[k] is torn), torn[0])])


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", JOBS)
def test_a_job_under_kills_and_a_failing_store_says_what_is_right(
    tmp_path: Path, seed: int, run_bench: Any, job: str
) -> None:
    figures = ("--minutes", 1, "--kill-every", 8, "--seed", seed, "--work", tmp_path)
    found = run_bench("chaos", "--job", job, *figures)
    assert {name: found[name] for name in WRONG if found.get(name)} == {}
    assert found["lookups"] > 50 if job == "lists" else found["planted"] > 50
    assert sum(found["kills"].values()) + sum(found["pauses"].values()) >= 3
    assert sum(found["store_faults"].values()) > 10
