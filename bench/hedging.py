"""The worth of hedging: the tail of PUT latency with and without it, in virtual time over a latency model.

Both arms use the project's real uploader, with the same connections, timeouts and retries; PUTs start on schedule and
are measured from their intended start, in ms, until they are stored, however often they had to be begun again. Requests
and bytes of cancelled attempts count; what the baseline needed beyond one request per PUT (retries) is not blamed on
hedging. ``--json`` prints one object on the last line of stdout.

The sets ``odd-...`` of ``models.json`` are unlike the public ones, each in one way. Measured, one seed, the public ones
with 1,000,000 PUTs (``turbopuffer`` 400,000), the odd ones with 120,000 (``odd-throttled`` 333,000: finding the limit
is paid once; ``odd-refusals`` 250,000):

=======================  ==================  ==============  ==============  ==============
set                      p99 hedged/none     p999            503, points     extra requests
=======================  ==================  ==============  ==============  ==============
flip158-5mb              0.80                0.50            0               3.7 %
s3-standard-small        0.78                0.24            0               3.7 %
s3-express               0.80                0.27            0               3.6 %
brownout                 0.95                0.59 (1)        0               3.1 %
turbopuffer              1.00                0.92            0               3.6 %
odd-throttled            0.95                1.07            +0.05           0.5 %
odd-throttled-bursts     0.91                0.76            +0.06           1.4 %
odd-throttled-brownout   0.95                0.67            0               2.8 %
odd-queue                0.98                0.55            0               0.7 %
odd-queue-brownout       1.06                0.69            0               2.8 %
odd-flapping             1.00                0.56            0               1.6 %
odd-heavy-tail           0.33                0.04            0               3.6 %
odd-no-tail              1.01                1.00            0               3.0 %
odd-bimodal              0.98                0.68            0               3.1 %
odd-slow-connections     0.80                0.61            0               3.7 %
odd-hot-prefixes         0.83                0.25            0               3.5 %
odd-refusals             0.97                0.99            -0.02           0.0 %
=======================  ==================  ==============  ==============  ==============

(1) Outside of slow periods 0.30, with 240,000 PUTs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench._figures import add_json, number, print_table
from bench._hedging_run import ROUND_S, Arm, Workload, run_arm
from bench._models import models
from dstl.changelog.upload.hedge_limits import Ticket
from dstl.changelog.upload.hedging import HedgePolicy
from dstl.options import HedgingOptions
from tests.simulation.latency import LatencyParameters

CHECKPOINT = 500
WINDOW_S = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    args = _parser().parse_args(argv)
    if args.plot is not None:
        _pyplot()  # missing is better said now than after minutes
    name, parameters = _parameters(args)
    rounds = max(1, round(args.puts / args.seeds / args.writers))
    workload = Workload(parameters, args.writers, rounds, args.per_process, args.criticality)
    began = time.monotonic()
    arms: dict[str, list[Arm]] = {"none": [], "hedged": []}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for arm, found in arms.items():
            found.append(run_arm(workload, seed, hedge=arm == "hedged"))
            print(f"{name} seed {seed} {arm}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    result = {"model": name, "puts": workload.puts * args.seeds, "seeds": args.seeds}
    result |= report(arms["none"], arms["hedged"])
    if args.compare:
        delay = float(np.quantile(_pooled(arms["none"]), 0.95)) / 1e3
        static = [
            run_arm(workload, seed, hedge=True, policy=lambda: _StaticPolicy(delay))
            for seed in range(args.first_seed, args.first_seed + args.seeds)
        ]
        arms["static"] = static
        result["static"] = report(arms["none"], static)["hedged"] | {"delay": delay * 1e3}
    result["tail"] = tail(arms)
    result["wall_s"] = round(time.monotonic() - began, 1)
    if args.plot is not None:
        _plot(args.plot, name, arms)
    if args.json:
        print(json.dumps(result))
    else:
        _table(result)
    return 0


class _StaticPolicy(HedgePolicy):
    """Hedges once after a fixed delay, whatever happens: what the literature compares with."""

    def __init__(self, delay: float) -> None:
        super().__init__(HedgingOptions(max_hedges=1, budget=1.0, budget_burst=1e9))
        self._fixed = delay
        self.budget.earn(1 << 40)

    def delay(self, size: int, critical: bool = True) -> float:
        return self._fixed

    def outlived(self, ticket: Ticket) -> None:
        """It never minds."""

    def throttled(self, now: float) -> None:
        """It never minds."""


def report(none: Sequence[Arm], hedged: Sequence[Arm]) -> dict[str, dict[str, object]]:
    """Return the figures of both arms; element i of each was run with the same seed."""
    puts = sum(arm.latency.size for arm in none)
    extra = sum(arm.requests for arm in hedged) - sum(arm.requests for arm in none)
    extra_bytes = sum(arm.bytes_sent for arm in hedged) - sum(arm.bytes_sent for arm in none)
    on_puts = sum(int(arm.slow.sum()) for arm in none)
    on_extra = sum(arm.extra_slow for arm in hedged) - sum(arm.extra_slow for arm in none)
    sent = sum(arm.counters["hedgesSent"] for arm in hedged)
    denied: dict[str, int] = {}
    for arm in hedged:
        for name, count in arm.counters.items():
            if name.startswith("hedgesDenied."):
                reason = name.partition(".")[2]
                denied[reason] = denied.get(reason, 0) + int(count)
    return {
        "none": _figures(none),
        "hedged": {
            **_figures(hedged),
            "extra_requests": _rounded(extra / puts),
            "extra_bytes": _rounded(extra_bytes / sum(arm.bytes_sent for arm in none)),
            "on_extra_requests": _rounded(on_extra / on_puts) if on_puts else None,
            "worst60_extra": _rounded(max(_worst_window(*pair) for pair in zip(none, hedged, strict=True))),
            "won": _rounded(sum(arm.counters["hedgesWon"] for arm in hedged) / sent) if sent else 0.0,
            "hedges": _rounded(sent / puts),
            "denied": denied,
        },
    }


def _figures(arms: Sequence[Arm]) -> dict[str, object]:
    latency = _pooled(arms)
    worst = np.concatenate([_checkpoints(arm) for arm in arms])
    on = np.concatenate([arm.latency[arm.slow & arm.critical] for arm in arms])
    off = np.concatenate([arm.latency[~arm.slow & arm.critical] for arm in arms])
    return {
        "p50": _ms(latency, 0.50),
        "p99": _ms(latency, 0.99),
        "p999": _ms(latency, 0.999),
        "p9999": _ms(latency, 0.9999),
        "max500_p50": _ms(worst, 0.50),
        "max500_p99": _ms(worst, 0.99),
        "rate_503": _rounded(sum(arm.rejected for arm in arms) / sum(arm.requests for arm in arms)),
        "on_p99": _ms(on, 0.99) if on.size else None,
        "off_p999": _ms(off, 0.999) if on.size else None,
        "failed": sum(arm.failed for arm in arms),
    }


def _pooled(arms: Sequence[Arm]) -> NDArray[np.float64]:
    return np.concatenate([arm.latency[arm.critical] for arm in arms])


def _checkpoints(arm: Arm) -> NDArray[np.float64]:
    """Slowest of each 500 PUTs of a round that a checkpoint waits for; of all of them when there are fewer writers."""
    waited = np.where(arm.critical, arm.latency, 0.0)
    columns = range(0, max(1, waited.shape[1] - CHECKPOINT + 1), CHECKPOINT)
    return np.concatenate([waited[:, first : first + CHECKPOINT].max(axis=1) for first in columns])


def _worst_window(none: Arm, hedged: Arm) -> float:
    """Largest share of extra requests in any 60 s, moved by 1 s."""
    rounds, writers = hedged.latency.shape
    seconds = int(max([rounds * ROUND_S, *hedged.extra_at, *none.extra_at])) + 1
    by_second = np.zeros(seconds + 1)
    np.add.at(by_second, np.array(hedged.extra_at, dtype=int), 1.0)
    np.add.at(by_second, np.array(none.extra_at, dtype=int), -1.0)
    width = min(WINDOW_S, rounds)
    sums = np.convolve(by_second[: int(rounds * ROUND_S)], np.ones(width), mode="valid")
    return _rounded(sums.max() / (width / ROUND_S * writers))


def _ms(values: NDArray[np.float64], q: float) -> float:
    return round(float(np.quantile(values, q)), 2)


def _rounded(value: float) -> float:
    return round(float(value), 5)


def _parameters(args: argparse.Namespace) -> tuple[str, LatencyParameters]:
    if args.params is not None:
        values = json.loads(Path(args.params).read_text(encoding="utf-8"))
        name = Path(args.params).stem
    else:
        values = models()
        name = args.model
    if "sizes" not in values:  # a file of several named sets
        name = args.model if args.model in values else next(iter(values))
        values = values[name]
    return name, LatencyParameters.of(values)


def _plot(path: str, name: str, arms: dict[str, list[Arm]]) -> None:
    from matplotlib import ticker

    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for arm, found in arms.items():
        latency = np.sort(_pooled(found))
        beyond = 1.0 - np.arange(latency.size) / latency.size
        axes.loglog(latency, beyond, label=f"{arm} (n = {latency.size:,})")
    for share, mark in ((1e-2, "p99"), (1e-3, "p99.9")):
        axes.axhline(share, color="grey", linewidth=0.6, linestyle="--")
        axes.annotate(mark, (1.0, share), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set(
        xlabel="ms from the intended start until a PUT is stored",
        ylabel="share of PUTs that take longer",
        title=f"PUT latency, model {name}",
    )
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}", file=sys.stderr)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'dstl-pyspark[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


_ROWS = (
    ("p50", "median", "ms"),
    ("p99", "99 % are done after", "ms"),
    ("p999", "99.9 %", "ms"),
    ("p9999", "99.99 %", "ms"),
    ("max500_p50", "slowest of 500, median", "ms"),
    ("max500_p99", "slowest of 500, 99 %", "ms"),
    ("on_p99", "in slow periods, 99 %", "ms"),
    ("off_p999", "outside of them, 99.9 %", "ms"),
    ("rate_503", "answers 503", "%"),
    ("failed", "failed", "PUTs"),
    ("extra_requests", "requests more", "%"),
    ("extra_bytes", "bytes more", "%"),
    ("on_extra_requests", "requests more in slow periods", "%"),
    ("worst60_extra", "requests more in the worst minute", "%"),
    ("hedges", "PUTs that were hedged", "%"),
    ("won", "hedges that won", "%"),
)
_FEW = 100
"""A quantile behind which fewer PUTs lie says little."""


def _table(result: dict[str, Any]) -> None:
    none, hedged = result["none"], result["hedged"]
    rows = []
    for key, name, unit in _ROWS:
        before, after = none.get(key), hedged.get(key)
        if after is None:
            continue  # the set has no slow periods
        scale = 100 if unit == "%" else 1
        change = f"{after / before - 1:+.0%}" if unit == "ms" and before else ""
        rows.append((name, "" if before is None else number(scale * before), number(scale * after), unit, change))
    print_table(
        f"{result['model']}: {result['puts']:,} PUTs, {result['seeds']} seeds",
        ("of a PUT", "none", "hedged", "unit", "change"),
        rows,
    )
    denied = ", ".join(f"{count:,} by {reason}" for reason, count in hedged["denied"].items())
    print(f"Hedges denied: {denied or 'none'}.")
    print(verdict(none, hedged))
    for key, share in (("p999", 1e-3), ("p9999", 1e-4)):
        if result["puts"] * share < _FEW:
            print(
                f"{key} is that of the {result['puts'] * share:.1g} slowest PUTs: run with --puts {_FEW / share:,.0f}."
            )


def verdict(none: dict[str, Any], hedged: dict[str, Any]) -> str:
    """Return one sentence: what hedging brings here and what it costs."""
    change = hedged["p999"] / none["p999"] - 1
    effect = "does not change" if abs(change) < 0.03 else "shortens" if change < 0 else "LENGTHENS"
    by = "" if abs(change) < 0.03 else f" by {abs(change):.0%}"
    return (
        f"Hedging {effect} p99.9{by} ({number(none['p999'])} to {number(hedged['p999'])} ms) for "
        f"{hedged['extra_requests']:.1%} more requests."
    )


def tail(arms: dict[str, list[Arm]]) -> dict[str, list[float]]:
    """Return the curves of a plot, for each arm: how many ms it takes until but this share of PUTs is stored."""
    count = min(_pooled(found).size for found in arms.values())
    beyond = np.geomspace(1.0, max(10 / count, 1e-5), 60)
    return {
        "beyond": [float(f"{share:.4g}") for share in beyond],
        **{name: [_ms(_pooled(found), 1 - share) for share in beyond] for name, found in arms.items()},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench hedging",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", choices=sorted(models()), default="flip158-5mb", help="a set of bench/models.json")
    source.add_argument("--params", metavar="FILE", help="a set of one's own, in the same form")
    parser.add_argument("--puts", type=int, default=1_000_000, help="PUTs of one arm, all seeds together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--writers", type=int, default=500, help="one PUT each per round of 1 s")
    parser.add_argument("--per-process", type=int, default=25, help="writers that share one uploader and policy")
    parser.add_argument(
        "--criticality",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of PUTs that a checkpoint waits for (the rest are pre-emptive uploads); all latencies are then of "
        "these alone, in both arms, all costs of all; default 1: a checkpoint waits for every PUT",
    )
    parser.add_argument("--compare", action="store_true", help="also a static delay at p95, tuned in hindsight")
    parser.add_argument("--plot", metavar="FILE", help="draw how many PUTs take longer, for both arms")
    add_json(parser)
    return parser
