"""What users may import: flat, sorted, and nothing that was not meant."""

import importlib
import subprocess
import sys
from typing import get_args

import pytest


@pytest.mark.parametrize("name", ["dstl", "dstl.spark", "dstl.testing"])
def test_everything_public_exists_and_is_sorted(name: str) -> None:
    module = importlib.import_module(name)
    exported = list(module.__all__)
    assert exported == sorted(exported)
    assert all(hasattr(module, each) for each in exported)


@pytest.mark.parametrize("name", ["dstl", "dstl.spark"])
def test_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    for each in module.__all__:
        assert (getattr(module, each).__doc__ or "").strip(), f"{name}.{each} has no docstring"


def test_a_worker_never_imports_a_storage_sdk() -> None:
    # It would cost every Python worker a second and 49 MB.
    code = (
        "import sys; import dstl.spark.task, dstl.state.processor_runner; "
        "from dstl.spark.operators import aggregation, deduplication, map_states, processor; "
        "unwanted = ('boto3', 'botocore', 'aioboto3', 'aiobotocore', 'pydantic', 'typer', 'rich'); "
        "print([name for name in unwanted if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["pyarrow", "pyspark"])
def test_a_missing_package_is_named_in_one_sentence(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None\nfrom dstl.spark import StateBackend"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = f"dstl.errors.Invalid: dstl.spark needs {name}: pip install 'dstl-pyspark[spark]'"
    assert done.stderr.strip().splitlines()[-1] == last


def test_a_type_checker_knows_every_mode_and_no_misspelt_one() -> None:
    from dstl.spark import migrate_state
    from dstl.spark.operators.grouped_stream import GroupedStream
    from dstl.state.handle import TimeMode
    from dstl.testing.processor_tester import ProcessorTester

    outputs, times = {"append", "update", "complete"}, {"none", "processingtime", "eventtime"}
    assert times == {*TimeMode}
    for function, names in (
        (GroupedStream.transformWithState, ("outputMode", "timeMode")),
        (GroupedStream._aggregated, ("outputMode",)),
        (ProcessorTester.__init__, ("time_mode",)),
        (migrate_state, ("output_mode",)),
    ):
        for name in names:
            known = get_args(eval(function.__annotations__[name], function.__globals__))
            assert {each.lower() for each in known} == (times if "ime" in name else outputs), function


def test_every_error_crosses_a_socket_as_itself() -> None:
    from dstl import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type):
            rebuilt = errors.error_from_wire(*errors.error_to_wire(kind("what happened")))
            assert type(rebuilt) is kind
            assert str(rebuilt) == "what happened"
