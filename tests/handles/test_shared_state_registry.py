"""Reference counts against a model that asks every checkpoint anew."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dstl.checkpoint.retained_objects import SharedStateRegistry

NAMES = [f"object-{n}" for n in range(12)]


class RegistryMachine(RuleBasedStateMachine):
    """Invariants 1 and 2 of the registry, over any history."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = SharedStateRegistry()
        self.model: dict[int, set[str]] = {}
        self.order: list[str] = []
        self.next_id = 0

    @rule(objects=st.lists(st.sampled_from(NAMES), max_size=8))
    def register(self, objects: list[str]) -> None:
        self.registry.register(self.next_id, objects)
        for name in dict.fromkeys(objects):
            if not any(name in held for held in self.model.values()):
                self.order.append(name)
        self.model[self.next_id] = set(objects)
        self.next_id += 1

    @rule(data=st.data())
    def register_again(self, data: st.DataObject) -> None:
        if self.model:
            known = data.draw(st.sampled_from(sorted(self.model)))
            self.registry.register(known, sorted(self.model[known]))
            with pytest.raises(ValueError, match="other objects"):
                self.registry.register(known, [*self.model[known], "another"])

    @rule(checkpoint=st.integers(0, 30))
    def unregister(self, checkpoint: int) -> None:
        freed = self.registry.unregister(checkpoint)
        gone = self.model.pop(checkpoint, set())
        wanted = {name for name in gone if not any(name in held for held in self.model.values())}
        # Newest first: the reverse of the order in which they became known.
        assert freed == [name for name in reversed(self.order) if name in wanted]
        self.order = [name for name in self.order if name not in wanted]

    @invariant()
    def knows_exactly_what_is_held(self) -> None:
        held = set().union(*self.model.values()) if self.model else set()
        assert {name for name in [*NAMES, "another"] if name in self.registry} == held


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_a_checkpoints_own_manifest_is_freed_before_its_segments() -> None:
    """Deletion is the reverse of creation: a crash between two deletions leaves no manifest that dangles."""
    registry = SharedStateRegistry()
    registry.register(5, ["old-segment", "new-segment", "manifest-5"])
    registry.register(6, ["old-segment", "newer-segment", "manifest-6"])
    assert registry.unregister(5) == ["manifest-5", "new-segment"]
    assert registry.unregister(5) == []
    assert registry.unregister(6) == ["manifest-6", "newer-segment", "old-segment"]


def test_a_manifest_that_holds_inlined_segments_outlives_its_checkpoint() -> None:
    registry = SharedStateRegistry()
    registry.register(5, ["manifest-5"])
    registry.register(6, ["manifest-5", "manifest-6"])
    assert registry.unregister(5) == []
    assert registry.unregister(6) == ["manifest-6", "manifest-5"]
