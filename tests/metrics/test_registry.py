"""The registry of metrics beside the code: what is recorded is in it, and what is in it is recorded."""

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstl.metrics import Distribution, MetricSet
from dstl.metrics.registry import METRICS, Kind, find, reference

ROOT = Path(__file__).parents[2]
CALLS = {"increment": Kind.COUNTER, "observe": Kind.HISTOGRAM, "gauge": Kind.GAUGE}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for room in ("dstl", "materializer", "handles"):
        for path in (ROOT / room).rglob("*.py"):
            if path.parent.name != "metrics":
                yield path, ast.parse(path.read_text())


def literals(node: ast.expr) -> Iterator[str]:
    """Yield the names that an expression may have, of a formatted one its constant beginning."""
    match node:
        case ast.Constant(value=str(text)):
            yield text.partition(".")[0]
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text.partition(".")[0]
        case ast.IfExp(body=first, orelse=second):
            yield from literals(first)
            yield from literals(second)


def recorded() -> Iterator[tuple[str, Kind, Path]]:
    """Yield every name that a call of a recorder names."""
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                whose = ast.unparse(node.func.value)
                if node.func.attr in CALLS and "recorder" in whose:
                    for name in literals(node.args[0]):
                        yield name, CALLS[node.func.attr], path


def test_every_recorded_metric_is_in_the_registry_as_its_kind() -> None:
    found = list(recorded())
    assert len(found) > 40
    wrong = [
        f"{path.relative_to(ROOT)}: {name} as {kind.value}"
        for name, kind, path in found
        if name not in METRICS or METRICS[name].kind is not kind
    ]
    assert wrong == []


def test_every_metric_of_the_registry_is_recorded_somewhere() -> None:
    named = {
        text
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        for text in literals(node)
    }
    assert sorted(METRICS.keys() - named) == []


def test_names_are_prometheus_names_and_no_two_are_one() -> None:
    exposed = [metric.exposed for metric in METRICS.values()]
    assert len(set(exposed)) == len(exposed)
    for metric in METRICS.values():
        assert re.fullmatch(r"dstl_[a-z][a-z0-9_]*", metric.exposed)
        assert not metric.exposed.endswith(("_total", "_count", "_sum", "_bucket"))
        assert metric.unit.name in metric.exposed
        assert metric.help.endswith(".")
        assert metric.when_high.endswith((".", ". "))


def test_the_reference_has_every_metric_and_what_to_do() -> None:
    text = reference()
    for metric in METRICS.values():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{metric.series}` |")]
        assert metric.when_high in line
        assert f"`{metric.name}`" in line


def test_what_advice_names_exists() -> None:
    from dstl.option_sources import SECTIONS

    series = {metric.series for metric in METRICS.values()} | {metric.exposed for metric in METRICS.values()}
    for metric in METRICS.values():
        for name in re.findall(r"`(dstl_\w+)`", metric.when_high):
            assert name in series, f"{metric.name} names {name}"
        for section, option in re.findall(r"`(\w+)\.(\w+)`", metric.when_high):
            assert option in SECTIONS[section].model_fields, f"{metric.name} names {section}.{option}"


def test_a_set_keeps_sums_levels_and_buckets() -> None:
    metrics = MetricSet()
    metrics.increment("hedgesSent", 2)
    metrics.increment("hedgesSent")
    metrics.gauge("segmentsInFlight", 4)
    for seconds in (0.0005, 0.002, 0.002, 4000):
        metrics.observe("checkpointSeconds", seconds)
    sample = metrics.sample({"taskManagers": 2}, {"processCpuSeconds": 1.5})
    assert sample.counters == {"hedgesSent": 3, "processCpuSeconds": 1.5}
    assert sample.gauges == {"segmentsInFlight": 4, "taskManagers": 2}
    found = sample.distributions["checkpointSeconds"]
    assert (found.count, found.total) == (4, 4000.0045)
    assert (found.buckets[0], found.buckets[1], found.buckets[-1]) == (1, 2, 1)
    assert metrics.sample().counters == {"hedgesSent": 3}


def test_a_set_counts_right_from_many_threads() -> None:
    metrics = MetricSet()

    def work() -> None:
        for _ in range(2000):
            metrics.increment("hedgesSent")
            metrics.observe("uploadSizes", 1000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    sample = metrics.sample()
    assert sample.counters["hedgesSent"] == 8000
    assert sample.distributions["uploadSizes"] == Distribution((8000, *[0] * 11), 8_000_000.0)


@pytest.mark.parametrize(
    ("recorded_name", "found"),
    [("hedgesDenied.budget", ("hedgesDenied", "budget")), ("stateBytes.a.b", ("stateBytes", "a.b")), ("nothing", None)],
)
def test_a_recorded_name_is_a_metric_and_its_label(recorded_name: str, found: tuple[str, str] | None) -> None:
    known = find(recorded_name)
    assert (known and (known[0].name, known[1])) == found
