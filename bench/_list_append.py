"""A list-append workload and its checker, by Elle's method (Kingsbury and Alvaro, VLDB 2020).

Every element is appended once, so a list that is read tells which appends were before it, and in which order. Elements
of one input file are in one batch: they are a transaction. From the lists follows which transaction must have been
before which, and from clocks which reading ended before another began. A history in which exactly-once holds has an
order of all of them; where there is none, a cycle shows two that cannot both be true.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

Row = tuple[str, int, str]
"""Key, element, and nothing: the columns of the chaos job's events."""

Output = tuple[str, int, Sequence[int]]
"""What a batch says of a key that it appended to: key, length before, elements appended."""

_LIVE = 64
_LENGTH = 100  # each lookup reads a whole list


@dataclass(frozen=True, slots=True)
class Lookup:
    """A list as it was read from the running query.

    Attributes:
        began: Seconds of the machine's monotonic clock, as all processes read it.
        ended: The same.
        key: The list's.
        elements: In their order.
    """

    began: float
    ended: float
    key: str
    elements: tuple[int, ...]


class Lists:
    """Makes appends, a transaction at a time, and judges what a job has made of them.

    Args:
        seed: Decides the keys.

    Attributes:
        events: Number of elements so far.
    """

    def __init__(self, seed: int) -> None:
        self.events = 0
        self._rng = random.Random(seed)
        self._lengths: Counter[int] = Counter()
        self._appended: dict[str, list[int]] = defaultdict(list)
        self._transaction_of: dict[int, int] = {}
        self._files = 0

    def make(self, count: int) -> list[Row]:
        """Return the rows of the next transaction."""
        rows = []
        for _ in range(count):
            slot = self._rng.randrange(_LIVE)
            key = f"{slot}-{self._lengths[slot] // _LENGTH}"
            self._lengths[slot] += 1
            self._appended[key].append(self.events)
            self._transaction_of[self.events] = self._files
            rows.append((key, self.events, ""))
            self.events += 1
        self._files += 1
        return rows

    def compare(
        self, outputs: Iterable[Output], lists: Mapping[str, Sequence[int]], lookups: Iterable[Lookup]
    ) -> dict[str, int]:
        """Return how many things of each kind cannot be.

        Args:
            outputs: All that came out, in any order.
            lists: All lists at the end.
            lookups: Those that were made while the job ran.
        """
        lookups = list(lookups)
        at_the_end = {key: list(elements) for key, elements in lists.items()}
        keys = at_the_end.keys() | self._appended.keys()
        return {
            # Rows of a key come in the order of their numbers, so there is one right list.
            "wrong_lists": sum(at_the_end.get(key, []) != self._appended.get(key, []) for key in keys),
            "wrong_outputs": self._wrong_outputs(outputs),
            "wrong_lookups": sum(not self._is_prefix(lookup) for lookup in lookups),
            "cycles": int(bool(self.cycle(lookups))),
            "lookups": len(lookups),
        }

    def _is_prefix(self, lookup: Lookup) -> bool:
        return list(lookup.elements) == self._appended.get(lookup.key, [])[: len(lookup.elements)]

    def _wrong_outputs(self, outputs: Iterable[Output]) -> int:
        """Return how many keys have outputs that do not say each append once."""
        by_key: dict[str, list[tuple[int, list[int]]]] = defaultdict(list)
        for key, before, elements in outputs:
            by_key[key].append((before, list(elements)))
        wrong = 0
        for key in by_key.keys() | self._appended.keys():
            said: list[int] = []
            in_place = True
            for before, elements in sorted(by_key.get(key, [])):
                in_place = in_place and before == len(said) and bool(elements)
                said += elements
            wrong += not in_place or said != self._appended.get(key, [])
        return wrong

    def cycle(self, lookups: Iterable[Lookup]) -> list[str]:
        """Return transactions and lookups each of which must have been before the next, the first again at the end.

        Empty where there are none. Lookups that are no prefix of their list say nothing and are left out.
        """
        graph: TopologicalSorter[str] = TopologicalSorter()
        for before, after in self._must(sorted(filter(self._is_prefix, lookups), key=lambda each: each.ended)):
            if before != after:
                graph.add(after, before)
        try:
            graph.prepare()
        except CycleError as found:
            return list(found.args[1])
        return []

    def _must(self, lookups: Sequence[Lookup]) -> Iterator[tuple[str, str]]:
        for elements in self._appended.values():
            for one, other in pairwise(elements):
                yield self._name(one), self._name(other)
        ends = []
        for number, lookup in enumerate(lookups):
            known, name = self._appended.get(lookup.key, []), f"lookup {number}"
            if lookup.elements:
                yield self._name(lookup.elements[-1]), name
            if len(lookup.elements) < len(known):
                yield name, self._name(known[len(lookup.elements)])
            yield name, f"end {number}"
            ends.append(lookup.ended)
        # What has ended stands in a row, so that each lookup needs one edge from all that ended before it began.
        for number in range(1, len(ends)):
            yield f"end {number - 1}", f"end {number}"
        begun = sorted(range(len(lookups)), key=lambda number: lookups[number].began)
        ended = 0
        for number in begun:
            while ended < len(ends) and ends[ended] < lookups[number].began:
                ended += 1
            if ended:
                yield f"end {ended - 1}", f"lookup {number}"

    def _name(self, element: int) -> str:
        return f"file {self._transaction_of[element]}"
