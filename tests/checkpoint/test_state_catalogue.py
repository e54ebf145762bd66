"""What a run may not change about the operators of the checkpoint that it starts from."""

import pytest

from dstl.checkpoint.state_catalogue import StateCatalogue
from dstl.errors import Invalid
from worlds.manifest_samples import checkpoint


def test_an_operator_that_groups_by_other_types_than_its_checkpoint_is_refused_with_both_named() -> None:
    catalogue = StateCatalogue(lambda known, reported: {**known, **reported})
    catalogue.expect("op", 4, "string,bigint")
    with pytest.raises(Invalid, match=r"operator 'op' groups by \(string,bigint\), but its checkpoint by \(string\)"):
        catalogue.open(checkpoint(1, 0))
    catalogue.expect("op", 2, "string")
    catalogue.open(checkpoint(1, 0))
