"""Nonsense is refused at the call, in our words, by a typed error that names it: not late, not raw, not in a task."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from home import Home
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from typer.testing import CliRunner

from dstl.cli.checkpoints import app as checkpoints_cli
from dstl.errors import Closed, Invalid, UserCodeError
from dstl.options import BatchingOptions, CheckpointOptions, RocksDBOptions
from dstl.spark import StateBackend

OUTPUT = "k string, n long"
CONNECTED = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
"""In the place of one of Spark Connect, whose classes need a package that the tests do not install."""


class Counts(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update({"n": n})
        yield Row(k=key[0], n=n)


class Locked(Counts):
    """Cannot be copied nor pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Copied(Locked):
    """Can be copied, so that its init runs on the driver, and cannot be pickled."""

    def __deepcopy__(self, memo: Any) -> "Copied":
        return Copied()


class BadDeclaration(Counts):
    def __init__(self, schema: Any, ttl_ms: int | None = None) -> None:
        self.schema, self.ttl_ms = schema, ttl_ms

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", self.schema, self.ttl_ms)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"location": None}, "a location is a text or a path object, not NoneType"),
        ({"location": 5}, "a location is a text or a path object, not int"),
        ({"location": ""}, "none was given"),
        ({"location": "dbfs:/x"}, "no store for dbfs: locations"),
        ({"location": "MEMORY://x"}, "memory:// is this process's own memory"),
        ({"location": "/x,Memory://x"}, "memory:// is this process's own memory"),
        ({"location": "/proc/nowhere/state"}, "cannot use /proc/nowhere/state: .*choose another location"),
        ({"parallelism": 0}, r"parallelism=0 is not in \[1, 128\], the maximum parallelism"),
        ({"parallelism": 129}, r"parallelism=129 is not in \[1, 128\]"),
        ({"parallelism": True}, "parallelism=True is not a whole number but bool"),
        ({"max_parallelism": "128"}, "max_parallelism='128' is not a whole number"),
        ({"max_parallelism": 0}, "max_parallelism=0 is not in"),
        ({"max_parallelism": None}, "max_parallelism=None is not a whole number"),
        ({"task_managers": 0}, r"task_managers=0 is not in \[1, 128\]"),
        ({"task_managers": "2"}, "task_managers='2' is not a whole number"),
        ({"task_managers": True}, "task_managers=True is not a whole number"),
        ({"table": "rocks"}, "table='rocks' is not one of 'heap', 'rocksdb'; did you mean 'rocksdb'"),
        ({"table": None}, "table=None is not one of 'heap', 'rocksdb'"),
        ({"rocksdb": RocksDBOptions()}, "rocksdb= has no effect with table='heap': give table='rocksdb' too"),
        ({"batching": {}}, r"batching= is dict: give BatchingOptions\(\.\.\.\)"),
        ({"s3": BatchingOptions()}, r"s3= is BatchingOptions: give S3Options\(\.\.\.\)"),
        ({"cluster": "driver:7078"}, r"cluster= is str: give ClusterOptions\(\.\.\.\)"),
        (
            {"checkpoints": CheckpointOptions(clean_grace_s=60)},
            r"clean_grace_s=60 is not above checkpoints\.timeout_s=600",
        ),
        ({"restore": "newest"}, "restore='newest' is not one of 'latest', 'previous'"),
        ({"restore_mode": "noclaim"}, "restore_mode='noclaim' is not one of .*did you mean 'no_claim'"),
        ({"restore_from": "foo"}, "not a savepoint: 'foo'; write LOCATION/savepoints/NAME"),
        ({"restore_from": 5}, "not a savepoint: int"),
        ({"allow_non_restored_state": "no"}, "allow_non_restored_state='no' is neither True nor False"),
        ({"spark": "local"}, "spark='local' is str, not a SparkSession"),
        ({"spark": CONNECTED}, "a session of Spark Connect has no driver in this process.*run the program there"),
    ],
    ids=lambda one: repr(one).partition(" object at ")[0] if isinstance(one, dict) else "",
)
def test_the_constructor_refuses(
    home: Home, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(home.path)
    given = {"location": str(home.path / "state"), "spark": home.spark} | arguments
    with pytest.raises(Invalid, match=message):
        StateBackend(given.pop("location"), **given)
    assert os.listdir(home.path) == [], "nothing was made for it"


@pytest.fixture
def set_application_conf(spark: SparkSession) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Sets options as if the application had started with them."""
    spark.conf.get("spark.sql.shuffle.partitions")  # the session takes the application's when it is first asked
    conf = spark.sparkContext._conf
    earlier: dict[str, str | None] = {}

    def set_all(values: Mapping[str, str]) -> None:
        for name, value in values.items():
            earlier[name] = conf.get(name, None)
            conf.set(name, value)

    yield set_all
    for name, value in earlier.items():
        if value is None:
            conf._jconf.remove(name)
        else:
            conf.set(name, value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("spark.dstl.batchng.byte_budget", "batching"),
        ("spark.dstl.Batching.byte_budget", "batching"),
        ("spark.dstl.byte_budget", ""),
        ("spark.dstl.s3", None),
        ("DSTL_BATCHNG_BYTE_BUDGET", "batching"),
        ("DSTL_CHECKPOINT_TIMEOUT_S", "checkpoints"),
        ("DSTL_X_CLEAN_GRACE_S", ""),
    ],
)
def test_options_of_a_section_that_there_is_not_are_refused(
    home: Home, set_application_conf: Any, monkeypatch: pytest.MonkeyPatch, name: str, nearest: str | None
) -> None:
    if name.startswith("DSTL"):
        monkeypatch.setenv(name, "1")
    else:
        set_application_conf({name: "1"})
    with pytest.raises(Invalid, match=name.replace(".", r"\.")) as caught:
        home.backend()
    end = {None: "write spark.dstl.s3.OPTION", "": "there are batching, upload, hedging, checkpoints, "}
    assert end.get(nearest, f"did you mean {nearest}?") in str(caught.value)
    assert not (home.path / "state").exists()


@pytest.mark.parametrize(
    ("option", "value", "plugins", "refused"),
    [
        ("durability", "task", "", True),
        ("also", "dstl:///tmp/elsewhere", "org.example.Other", True),
        ("durability", "task", "org.example.Other, dstl.spark.DstlPlugin", False),
        ("durability", "commit", "", False),
    ],
)
def test_an_option_of_sparks_own_operators_is_refused_where_there_are_none(
    home: Home, set_application_conf: Any, caplog: Any, option: str, value: str, plugins: Any, refused: bool
) -> None:
    """Also: where there may be some, the log says that it is not for this backend; a default changes nothing."""
    set_application_conf({f"spark.dstl.{option}": value, "spark.plugins": plugins})
    said = f"spark.dstl.{option}={value} changes nothing for a StateBackend"
    if refused:
        with pytest.raises(Invalid, match=re.escape(said) + r".*spark\.plugins=dstl\.spark\.DstlPlugin.*leave it out"):
            home.backend()
        assert not (home.path / "state").exists()
    else:
        home.backend().close()
        assert (said in caplog.text) == (value == "task")


@pytest.mark.parametrize(
    ("name", "has_argument"),
    [("spark.dstl.commit", False), ("spark.dstl.sources", False), ("spark.dstl.batching.byte_budget", True)],
)
def test_a_late_setting_is_refused_with_what_helps(home: Home, set_conf: Any, name: str, has_argument: bool) -> None:
    set_conf({name: "1"})
    with pytest.raises(Invalid, match=rf"{re.escape(name)}=1 .*before the application starts") as caught:
        home.backend()
    assert ("give batching= to the StateBackend" in str(caught.value)) == has_argument
    assert ("to the StateBackend" in str(caught.value)) == has_argument


def test_a_path_object_and_whole_numbers_of_numpy_are_taken(home: Home) -> None:
    import numpy as np

    with home.backend(parallelism=np.int64(2)) as backend:
        assert backend.location == str(home.path / "state")
        assert (home.path / "state").is_dir()


def test_every_operator_refuses_what_it_cannot_take(home: Home) -> None:
    """Also: each refusal names the operator, and none leaves an operator behind."""
    df = home.stream("k string, v long").read()

    def nothing(rows: Any, keys: Any, states: Any) -> tuple[Any, Any]:
        return None, None

    rows = F.count("*").alias("n")
    with home.backend(parallelism=2) as backend:

        def tws(df: Any = df, by: Any = "k", **given: Any) -> Any:
            taken = {"statefulProcessor": Counts(), "outputStructType": OUTPUT, "outputMode": "append"}
            taken |= {"timeMode": "none", "name": "op"} | given
            return backend.groupBy(df, by).transformWithState(**taken)

        def aggregate(df: Any = df, by: Any = "k", n: Any = rows, **given: Any) -> Any:
            return backend.groupBy(df, by).agg(n, **({"name": "op"} | given))

        def mapped(df: Any = df, by: Any = "k", **given: Any) -> Any:
            taken = {"name": "op", "stateStructType": "n long", "outputStructType": "n long", "func": nothing} | given
            return backend.groupBy(df, by).mapStates(**taken)

        locks = threading.Lock()
        dotted, ticked = df.withColumn("a.b", F.col("v")), df.withColumn("a`b", F.col("v"))
        cased = df.select("k", "v", F.col("v").alias("V"))
        every: list[tuple[dict[str, Any], str]] = [
            ({"by": []}, r"groupBy\(\) names no column; there is no state without a key"),
            ({"parallelism": 0}, r"parallelism=0 is not in \[1, 128\]"),
            ({"parallelism": True}, "parallelism=True is not a whole number"),
            ({"parallelism": "4"}, "parallelism='4' is not a whole number"),
            ({"parallelism": 2.5}, r"parallelism=2\.5 is not a whole number"),
        ]
        whole: list[tuple[dict[str, Any], str]] = [
            ({"df": dotted}, r"column 'a\.b' has a dot or a backtick"),
            ({"df": ticked}, "column 'a`b' has a dot or a backtick"),
            ({"df": cased}, "columns 'v' and 'V', which Spark takes for one"),
            ({"by": "zz"}, "no column 'zz' to group by; there are k, v"),
        ]
        cases: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
            *((call, *one) for call in (tws, mapped) for one in (*every, *whole)),
            *((aggregate, *one) for one in every),
            (aggregate, {"by": "zz"}, "Spark does not take this aggregation.*zz"),
            (aggregate, {"df": cased, "n": F.count("v")}, "Spark does not take this aggregation.*AMBIGUOUS"),
            (aggregate, {"df": home.spark.range(1).withColumn("k", F.lit("a"))}, "the DataFrame is not streaming"),
            (mapped, {"df": home.spark.range(1)}, "the DataFrame is not streaming"),
            (
                tws,
                {"statefulProcessor": Counts},
                r"the processor is the class Counts; pass an object of it: Counts\(\)",
            ),
            (tws, {"statefulProcessor": 5}, "the processor is int, not a StatefulProcessor"),
            (tws, {"statefulProcessor": Locked()}, r"the processor cannot be sent to the workers.*make in init\(\)"),
            (tws, {"statefulProcessor": Copied()}, r"the processor cannot be sent to the workers.*make in init\(\)"),
            (
                tws,
                {"statefulProcessor": BadDeclaration(5)},
                "the schema of state 'n' cannot be used: it is int, not a StructType",
            ),
            (
                tws,
                {"statefulProcessor": BadDeclaration("n nosuchtype")},
                "the schema of state 'n' cannot be used: .*NOSUCHTYPE",
            ),
            (tws, {"statefulProcessor": BadDeclaration("n long", 1000)}, "needs time mode processingTime"),
            (tws, {"timeMode": "eventTime"}, "withWatermark"),
            (tws, {"outputStructType": "page strng"}, "output schema cannot be used: .*'page strng'.*STRNG"),
            (tws, {"outputStructType": 5}, "output schema cannot be used"),
            (tws, {"outputStructType": None}, "output schema cannot be used"),
            (tws, {"outputMode": None}, "output mode None is not one of append, update"),
            (tws, {"outputMode": "complete"}, "output mode 'complete' is not one of"),
            (tws, {"outputMode": 5}, "output mode 5 is not one of"),
            (tws, {"timeMode": None}, "time mode None is not one of"),
            (tws, {"timeMode": "processing"}, "time mode 'processing' is not one of"),
            (tws, {"tick": 5, "timeMode": "processingTime"}, "tick=5 is not a time between batches"),
            (tws, {"tick": "soon", "timeMode": "processingTime"}, "tick='soon' is not a time between batches"),
            (tws, {"initialState": 5}, "initial_state is a int"),
            (aggregate, {"ttlDurationMs": "5"}, "ttlDurationMs='5' is not a number"),
            (aggregate, {"ttlDurationMs": True}, "ttlDurationMs=True is not a number"),
            (aggregate, {"ttlDurationMs": 5, "outputMode": "complete"}, "ttlDurationMs=5 is for groups without"),
            (aggregate, {"ttlDurationMs": 0}, "ttlDurationMs=0 is not a number of milliseconds above 0"),
            (aggregate, {"n": F.first("nothing")}, "Spark does not take this aggregation.*nothing"),
            (aggregate, {"n": F.max(F.array("v"))}, "a type with an order, not array<bigint>"),
            (aggregate, {"n": F.approx_count_distinct("v", rsd=0.001)}, "rsd=0.001 is not in"),
            (mapped, {"ttlDurationMs": "1 hour"}, "ttlDurationMs='1 hour' is not a number of milliseconds"),
            (mapped, {"func": 5}, "function is int"),
            (mapped, {"func": lambda rows: None}, r"called as function\(rows, keys, states\)"),
            (mapped, {"stateStructType": "__exists boolean"}, "__exists is reserved by DSTL"),
            (mapped, {"func": lambda rows, keys, states: locks}, "the function cannot be sent to the workers"),
            (mapped, {"stateStructType": 5}, "the state schema cannot be used"),
        ]
        for call, given, why in cases:
            with pytest.raises((Invalid, UserCodeError), match=r"(?s)operator 'op'.*" + why):
                call(**given)
        for wrong_function, cols in (("sum", [5]), ("max", [F.col("v")])):
            with pytest.raises(Invalid, match=rf"{wrong_function}\(.*give names of columns"):
                getattr(backend.groupBy(df, "k"), wrong_function)(*cols)
        with pytest.raises(Invalid, match="there is nothing to aggregate"):
            backend.groupBy(df.select("k"), "k").sum()
        with pytest.raises(Invalid, match="not a numeric column"):
            backend.groupBy(df, "k").sum("k")
        with pytest.raises(Invalid, match="names no aggregate"):
            backend.groupBy(df, "k").agg()
        for wrong in (5, "my op", "", "../x", "x" * 200, b"op"):
            with pytest.raises(Invalid, match="operator"):
                tws(name=wrong)
        assert "operators=[]" in repr(backend)
        aggregate(df=dotted, name="free")  # a name that does not travel is nobody's business
        with pytest.raises(Invalid, match="two operators are called 'free'"):
            aggregate(name="free")


def test_a_grouped_stream_says_what_takes_the_place_of_sparks_other_methods(home: Home) -> None:
    with home.backend(parallelism=2) as backend:
        grouped = backend.groupBy(home.stream().read(), "k")
        for name in ("pivot", "applyInPandas", "applyInArrow"):
            with pytest.raises(Invalid, match=rf"groupBy\(\.\.\.\)\.{name} .*; available are agg, count, .*mapStates"):
                getattr(grouped, name)
        with pytest.raises(AttributeError, match="no attribute 'cuont'"):
            _ = grouped.cuont
        for wrong in (5, None, "clicks"):
            with pytest.raises(Invalid, match=f"the input is {type(wrong).__name__}, not a DataFrame"):
                backend.groupBy(wrong, "k")  # type: ignore[arg-type]


def test_a_closed_backend_stays_closed(home: Home) -> None:
    df = home.stream().read()
    backend = home.backend(parallelism=2)
    grouped = backend.groupBy(df, "k")
    backend.close()
    calls: list[Callable[[], Any]] = [
        lambda: backend.groupBy(df, "k").transformWithState(Counts(), OUTPUT, "append", "none"),
        lambda: backend.groupBy(df, "k").transformWithStateInPandas(Counts(), OUTPUT, "append", "none"),
        lambda: backend.groupBy(df, "k").agg(F.count("*").alias("n")),
        lambda: backend.groupBy(df, "k").mapStates(lambda a, b, c: (None, None), "n long", "n long"),
        lambda: backend.groupBy(df, "k"),
        lambda: grouped.transformWithState(Counts(), OUTPUT, "update", "none"),
        lambda: backend.read_state(home.spark, "n"),
        lambda: backend.savepoint("s"),
        lambda: backend.add_listener(print),
        lambda: backend.add_progress_listener(print),
        backend.__enter__,
    ]
    for call in calls:
        with pytest.raises(Closed, match="was closed: make a new one"):
            call()
    backend.close()


def test_a_comma_in_a_directorys_name_does_not_split_the_state(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver, TaskManager and command line take the location apart in one way."""
    monkeypatch.setenv("DSTL_BATCHING_INLINE_THRESHOLD", "0")
    for number, location in enumerate((f"{home.path}/my,state", f"{home.path}/d1/s,{home.path}/d2/s")):
        source = home.stream()
        source.add([{"k": f"k{i}", "v": i} for i in range(50)])
        with StateBackend(location, parallelism=2, spark=home.spark) as backend:
            grouped = backend.groupBy(source.read(), "k")
            source.drain(grouped.transformWithState(Counts(), OUTPUT, "append", "none", name=f"op{number}"), backend)
        done = CliRunner().invoke(checkpoints_cli, ["verify", location])
        assert done.exit_code == 0, done.output
    # Which of two directories a name goes to is its hash: few names may all go to one.
    made = set(os.listdir(home.path))
    assert made & {"d1", "d2"}
    assert [name for name in made if "," in name] == ["my,state"]


def test_windows_and_duplicates_that_cannot_be_are_refused(home: Home) -> None:
    plain = home.stream("k string, t timestamp, v long, g string, m map<string,int>").read()
    df = plain.withWatermark("t", "1 minute")
    window, session = F.window("t", "5 minutes"), plain.withColumn("s", F.session_window("t", "5 minutes"))
    n = F.count("*").alias("n")
    with home.backend(parallelism=2) as backend:

        def agg(*exprs: Any, by: Any = (window, "k"), on: Any = df, mode: Any = "append", **given: Any) -> Any:
            return backend.groupBy(on, *by).agg(*(exprs or (n,)), outputMode=mode, **{"name": "op", **given})

        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: agg(on=plain), r"append .* no grouping column has one: call df\.withWatermark\(column, delay\)"),
            (lambda: agg(by=("k",)), "append .* no grouping column has one"),
            (lambda: agg(mode="replace"), "output mode 'replace' is not one of append, update, complete"),
            (lambda: agg(mode=None), "output mode None is not one of"),
            (lambda: agg(by=(F.window("v", "5 minutes"), "k")), "Spark does not take this aggregation"),
            (lambda: agg(by=(F.window("t", "soon"), "k")), "Spark does not take this aggregation"),
            (lambda: agg(by=(F.window("t", "1 minute", "5 minutes"), "k")), "Spark does not take this aggregation"),
            (lambda: agg(by=("nowhere",)), "Spark does not take this aggregation.*nowhere"),
            (lambda: agg(by=(window, "t")), "'window' and 't' both have the watermark"),
            (lambda: agg(by=(window, "m")), "Spark does not take this aggregation|has no hash of maps"),
            (lambda: agg(F.skewness("v")), r"the aggregate skewness\(\) of column 'skewness\(v\)' is not kept here"),
            (lambda: agg(F.percentile("v", 0.5)), r"percentile\(\)"),
            (lambda: agg(F.sum_distinct("v")), r"has DISTINCT, which count\(\) alone may have"),
            (lambda: agg(F.sum("v") / F.count("v")), "not an aggregate but an expression: aggregate under a name"),
            (lambda: agg(F.expr("sum(v) filter (where v > 1)")), r"has a FILTER: aggregate when\(condition"),
            (lambda: agg(F.expr("count(v, k)")), "counts rows by several columns"),
            (lambda: agg(F.upper("k")), r"'upper\(k\)' is not an aggregate but an expression"),
            (lambda: agg("v"), r"agg\('v'\): give aggregate columns such as F\.sum"),
            (lambda: agg(n, F.sum("v").alias("n")), "the result has two columns 'n': rename one with alias"),
            (lambda: agg(n, F.sum("v").alias("window_start")), "'window_start' is reserved by DSTL"),
            (lambda: agg(by=(F.session_window("t", "5 minutes"), "k"), mode="update"), "update .* as in Spark"),
            (lambda: agg(by=(F.session_window("t", "5 minutes"),)), "session_window alone is no key"),
            (lambda: agg(on=session, by=("s",), mode="update"), "'s' is a session window"),
            (lambda: agg(on=home.spark.range(2).withColumn("t", F.now()), by=(window, "id")), "is not streaming"),
            (lambda: agg(ttlDurationMs=5), "ttlDurationMs=5 is for groups without a watermark"),
            (lambda: agg(5), r"agg\(5\): give aggregate columns"),
            (lambda: backend.dropDuplicates(df, ["x"]), "there is no column 'x'"),
            (lambda: backend.dropDuplicates(df, "k"), "'k' is not a list of columns"),
            (lambda: backend.dropDuplicates(df, ["m"]), "Spark has no hash of maps"),
            (lambda: backend.dropDuplicates(home.spark.range(2)), "is not streaming"),
            (lambda: backend.dropDuplicatesWithinWatermark(plain, ["k"]), "needs a timestamp column with a watermark"),
        ]
        wrong = []
        for attempt, message in cases:
            with pytest.raises(Invalid) as raised:
                attempt()
            if not re.search(message, str(raised.value)):
                wrong.append((message, str(raised.value)))
        assert wrong == []
        assert backend.operators == ()
        # A watermark's column is a timestamp: Spark's own word.
        with pytest.raises(AnalysisException, match=r"(?i)event time"):
            plain.withWatermark("v", "1 minute")
        named = backend.groupBy(df, window, "k").agg({"v": "max", "*": "count"})
        assert named.columns == ["window", "k", "max(v)", "count(1)"]
        # Without a watermark Spark keeps every window, too.
        assert agg(on=plain, mode="update", name="windows").isStreaming


def test_what_brings_a_source_is_refused_where_spark_wants_each_named(home: Home, set_conf: Any) -> None:
    """Spark refused the query at its start, with advice that nobody can follow: to name a source of ours."""
    df = home.stream("k string, v long, ts timestamp").read().withWatermark("ts", "1 second")
    first = home.spark.createDataFrame([("a", 1)], "k string, n long")
    setting = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
    set_conf({setting: "true"})
    with home.backend(parallelism=1) as backend:

        def run(time_mode: Any = "none", **given: Any) -> Any:
            return backend.groupBy(df, "k").transformWithState(Counts(), OUTPUT, "append", time_mode, **given)

        for define in (
            lambda: backend.dropDuplicatesWithinWatermark(df, ["k"]),
            lambda: run("processingTime", tick="1 second"),
            lambda: run(initialState=first),
        ):
            with pytest.raises(Invalid, match=f"{setting}=true: .* set it to false"):
                define()


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_an_aggregate_of_groups_that_come_again_is_refused(mode: Any, home: Home) -> None:
    """Before, each change of a group counted, without a word."""
    df = home.stream("k string, t timestamp, v long").read().withWatermark("t", "1 minute")
    with home.backend(parallelism=1) as backend:

        def sums(mode: Any, name: str) -> Any:
            of = backend.groupBy(df, F.window("t", "5 minutes"), "k")
            return of.agg(F.sum("v").alias("s"), outputMode=mode, name=name).where("s > 0")

        repeated = sums(mode, "sums")
        with pytest.raises(Invalid, match=r"'all': its rows are results of operator 'sums', .* outputMode='append'"):
            backend.groupBy(repeated, "k").agg(F.sum("s").alias("all"), name="all")
        distinct = backend.dropDuplicates(repeated, ["k"], name="distinct")
        backend.groupBy(distinct, "k").agg(F.count("*").alias("n"), name="counts")
        backend.groupBy(sums("append", "once"), "k").agg(F.sum("s").alias("all"), name="all")


def test_state_of_another_mode_is_refused_when_the_query_starts(home: Home) -> None:
    source = home.stream("k string, v long")
    source.add([{"k": "a", "v": 1}])
    for mode in ("update", "complete"):
        with home.backend(parallelism=1) as backend:
            df = backend.groupBy(source.read(), "k").agg(F.sum("v").alias("s"), outputMode=mode, name="sums")
            if mode == "update":
                source.drain(df, backend)
                continue
            source.add([{"k": "b", "v": 1}])
            with pytest.raises(StreamingQueryException, match=r"kept for the mode update.*another name"):
                source.drain(df, backend)


def test_an_operator_behind_one_of_its_own_name_is_refused_in_our_words(home: Home) -> None:
    """Spark's words are of a metric's name, and of none that the user has chosen."""
    rows = home.stream().read()
    with home.backend() as backend, home.backend("other") as other:
        counts = backend.groupBy(rows, "k").agg(F.count("*").alias("v"), outputMode="update", name="counts")
        between = backend.dropDuplicates(counts, ["k"], name="once")
        for whose in (backend, other):
            with pytest.raises(Invalid, match=r"'counts': its rows come from an operator that is called so too: give"):
                whose.dropDuplicates(between, ["k"], name="counts")
