"""Options come from arguments, the environment and Spark's configuration, in this order, and are checked wherever."""

import math
import re

import pytest

from dstl.errors import Invalid
from dstl.option_sources import SECTIONS, check_option_names, resolve
from dstl.options import BatchingOptions, HedgingOptions


def test_an_argument_beats_the_environment_which_beats_spark() -> None:
    environment = {"DSTL_BATCHING_INLINE_THRESHOLD": "7", "UNRELATED": "x"}
    conf = {"spark.dstl.batching.inline_threshold": "5", "spark.dstl.batching.segment_size": "9"}
    given = BatchingOptions(inline_threshold=1)
    assert resolve("batching", BatchingOptions, given, environment, conf) is given
    found = resolve("batching", BatchingOptions, None, environment, conf)
    assert (found.inline_threshold, found.segment_size) == (7, 9)
    assert resolve("batching", BatchingOptions, None, {}, {}) == BatchingOptions()


def test_switches_are_understood() -> None:
    assert resolve("hedging", HedgingOptions, None, {"DSTL_HEDGING_ENABLED": "false"}, {}).enabled is False


def test_a_misspelt_name_and_a_bad_value_say_where_they_were_set() -> None:
    with pytest.raises(Invalid, match=r"spark\.dstl\.batching\.inline_treshold.*inline_threshold"):
        resolve("batching", BatchingOptions, None, {}, {"spark.dstl.batching.inline_treshold": "1"})
    with pytest.raises(Invalid, match="DSTL_BATCHING_BYTE_BUDGET"):
        resolve("batching", BatchingOptions, None, {"DSTL_BATCHING_BYTE_BUDGET": "none"}, {})


def test_variables_that_are_not_ours_are_left_alone() -> None:
    """Kubernetes puts some into every container, for each service: here for dstl-master, dstl-driver and dstl."""
    others = ["MASTER_SERVICE_HOST", "DRIVER_PORT_7078_TCP_ADDR", "SERVICE_PORT", "SECRET", "LOG_LEVEL", "TEST_SEED"]
    environment = [*(f"DSTL_{name}" for name in others), "PATH", "dstl_batchng_x"]
    check_option_names(environment, ["spark.master", "spark.dstlx.y", "spark.dstl.commit", "spark.dstl.s3.region"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("spark.dstl.durabilty", "durability"),
        ("spark.dstl.Commit", "commit"),
        ("spark.dstl.commit.mode", ""),
        ("spark.dstl.batchng.byte_budget", "batching"),
        ("spark.dstl.batching.byte_buget", "spark.dstl.batching.byte_budget"),
        ("spark.dstl.cluster.prot", "spark.dstl.cluster.port"),
    ],
)
def test_a_name_that_is_no_option_is_refused_with_the_one_that_was_perhaps_meant(name: str, meant: str) -> None:
    with pytest.raises(Invalid, match=f"{re.escape(name)} is not an option") as caught:
        check_option_names([], [name])
    assert not meant or str(caught.value).endswith(f"did you mean {meant}?")


def test_an_argument_of_another_class_is_refused() -> None:
    for wrong in ({"byte_budget": 1}, HedgingOptions(), "batching", 0):
        with pytest.raises(Invalid, match=r"batching= is \w+: give BatchingOptions"):
            resolve("batching", BatchingOptions, wrong, {}, {})  # type: ignore[arg-type]


def test_a_number_that_is_not_finite_is_refused_by_the_name_of_its_option() -> None:
    """A TaskManager refused to be told of it, and the query waited for one without a word."""
    numbers = [
        (kind, name)
        for kind in SECTIONS.values()
        for name, field in kind.model_fields.items()
        if field.annotation in (float, float | None)
    ]
    assert len(numbers) > 30
    for kind, name in numbers:
        with pytest.raises(ValueError, match=rf"{name}\n  Input should be a finite number"):
            kind(**{name: math.inf})


def test_more_seconds_than_a_clock_has_room_for_are_refused_by_the_name_of_their_option() -> None:
    """Such a number was taken, and a bare OverflowError of the loop or of a message ended the query."""
    seconds = [(section, name) for section, kind in SECTIONS.items() for name in kind.model_fields if name[-2:] == "_s"]
    assert len(seconds) > 25
    for section, name in seconds:
        told = {f"spark.dstl.{section}.{name}": "1e308"}
        with pytest.raises(Invalid, match=rf"{section}\.{name}: input should be at most 1000000000 seconds"):
            resolve(section, SECTIONS[section], None, {}, told)
        SECTIONS[section](**{name: 1e9})
