"""The plots of a report: which figures of which result are drawn against what. Pure but for matplotlib in ``svg``."""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Points = tuple[Sequence[float], Sequence[float]]

INK, FIRST, SECOND, THIRD = "#010203", "#1f77b4", "#ff7f0e", "#2ca02c"
"""The ink stands for the colour of the text around a plot, light or dark; the others show on both."""


@dataclass(frozen=True)
class Plot:
    """One plot, and the results that it comes from.

    Attributes:
        anchor: Its address within the page, and the name of its file.
        title: What it shows.
        x: Label of the axis; empty for bars.
        y: Label of the other axis.
        lines: Points by the line's name; of bars one point by the bar's name.
        results: The stamped results.
        log: Axes with a logarithmic scale: some of ``xy``.
        note: What a reader must know.
    """

    anchor: str
    title: str
    x: str
    y: str
    lines: dict[str, Points]
    results: tuple[dict[str, Any], ...]
    log: str = ""
    note: str = ""
    bars: dict[str, float] = field(default_factory=dict)


def plots_of(results: Iterable[dict[str, Any]]) -> list[Plot]:
    """Return what can be drawn of these results, in the order of a report; others are left out."""
    by_bench: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_bench.setdefault(result["bench"], []).append(result)
    found = [_tail(each) for each in by_bench.get("hedging", ())]
    found += [_checkpoint(each) for each in by_bench.get("checkpoint", ())]
    found += [_requests(each) for each in by_bench.get("requests", ())]
    found += [_throughput(each) for each in by_bench.get("spark", ())]
    if by_bench.get("recovery"):
        found.append(_recovery(by_bench["recovery"]))
    # Two runs of one benchmark have two addresses.
    taken: dict[str, int] = {}
    numbered = []
    for plot in found:
        taken[plot.anchor] = nth = taken.get(plot.anchor, 0) + 1
        numbered.append(plot if nth == 1 else Plot(**{**vars(plot), "anchor": f"{plot.anchor}-{nth}"}))
    return numbered


def _tail(result: dict[str, Any]) -> Plot:
    figures = result["figures"]
    tail = figures["tail"]
    lines = {name: (tail[name], tail["beyond"]) for name in tail if name != "beyond"}
    return Plot(
        f"put-latency-{figures['model']}",
        f"PUT latency with and without hedging ({figures['model']})",
        "ms until a PUT is stored",
        "share of PUTs that take longer",
        lines,
        (result,),
        "xy",
        f"{figures['puts']:,} PUTs in virtual time over a model of S3's latency; seeds: {figures['seeds']}. Hedging "
        f"sent {figures['hedged']['extra_requests']:.1%} more requests.",
    )


def _checkpoint(result: dict[str, Any]) -> Plot:
    figures = result["figures"]
    sizes = figures["sizes"]
    states = [size["state_mb"] for size in sizes]
    lines = {name: (states, [size["checkpoint_ms"][name] for size in sizes]) for name in ("p50", "p99")}
    note = f"Table {figures['table']}, store {figures['store']}; each batch changes {sizes[0]['changed_mb']:.3g} MB."
    title = "Checkpoint time against state size"
    return Plot("checkpoint-time", title, "MB of state", "ms of a checkpoint", lines, (result,), "x", note)


def _requests(result: dict[str, Any]) -> Plot:
    rows = result["figures"]["rows"]
    partitions = [row["partitions"] for row in rows]
    lines = {
        "DSTL: requests": (partitions, [row["dstl_requests"] for row in rows]),
        "Spark's RocksDB store: files": (partitions, [row["spark_files"] for row in rows]),
    }
    note = "Of one batch. Each file of Spark's is at least one PUT."
    return Plot(
        "requests",
        "Requests of a checkpoint against partitions",
        "partitions",
        "requests, files",
        lines,
        (result,),
        "xy",
        note,
    )


def _throughput(result: dict[str, Any]) -> Plot:
    rates = {name: float(rate) for name, rate in result["figures"].items() if isinstance(rate, int | float)}
    note = "A count and a sum per key. What ends in _small has the small input, and so have spark_tws_row and _pandas."
    return Plot("throughput", "Throughput against peers", "", "events per second", {}, (result,), "x", note, rates)


def _recovery(results: Sequence[dict[str, Any]]) -> Plot:
    results = sorted(results, key=lambda each: each["figures"]["log_mb"])
    figures = [each["figures"] for each in results]
    lengths = [each["log_mb"] for each in figures]
    lines = {
        "restore": (lengths, [each["restore_s"] for each in figures]),
        "the same state without log": (lengths, [each["no_changelog_restore_s"] for each in figures]),
        "reading the bytes alone": (lengths, [each["raw_read_s"] for each in figures]),
    }
    note = f"State of {figures[0]['state_mb']:g} MB, table {figures[0]['table']}, store {figures[0]['store']}."
    title = "Restore time against log length"
    return Plot("restore-time", title, "MB of log behind the base", "s", lines, tuple(results), "", note)


def svg(plot: Plot) -> str:
    """Return a plot as SVG that takes the colour of its text from where it is: it is legible on light and dark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    style = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    extra = {"svg.fonttype": "none", "svg.hashsalt": plot.anchor, "font.family": "sans-serif", "font.size": 10}
    with pyplot.rc_context({**style, **extra}):
        height = 4.0 if plot.lines else 0.8 + 0.35 * len(plot.bars)
        figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
        for (name, (x, y)), colour in zip(plot.lines.items(), (FIRST, SECOND, THIRD) * 3, strict=False):
            axes.plot(x, y, label=name, color=colour, marker="o" if len(x) < 20 else None, linewidth=1.8)
        if plot.bars:
            names = list(plot.bars)[::-1]
            colours = [FIRST if name.startswith("dstl") else SECOND for name in names]
            drawn = axes.barh(names, [plot.bars[name] for name in names], color=colours)
            axes.bar_label(drawn, [f"{plot.bars[name]:,.0f}" for name in names], padding=3)
        for axis, name in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            if name in plot.log:
                getattr(axes, f"set_{name}scale")("log")
                axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if name == "x" else (1.0,)))
                axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
                axis.set_minor_formatter(ticker.NullFormatter())
            elif plot.lines:
                getattr(axes, f"set_{name}lim")(bottom=0) if name == "y" else None
        few = next(iter(plot.lines.values()), ((), ()))[0]
        if "x" in plot.log and 0 < len(few) < 20:
            axes.set_xticks(list(few))
        axes.set_xlabel(plot.x if plot.lines else plot.y)
        axes.set_ylabel(plot.y if plot.lines else "")
        axes.grid(True, alpha=0.25, color=INK)
        if plot.lines:
            axes.legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return adapted(drawing.getvalue())


def adapted(drawing: str) -> str:
    """Return a drawing of matplotlib's without its prologue, whose ink is the text's colour."""
    found = drawing[drawing.index("<svg") :].replace(INK, "currentColor")
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    scheme = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
    start = found.index(">") + 1
    return found[:start] + scheme + found[start:]
