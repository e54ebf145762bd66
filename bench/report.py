"""``report``: one page of plots from the result files that ``--out`` of the other benchmarks has written.

``python -m bench report results/*.json --html report.html`` writes one self-contained HTML page: each plot with the
command, the machine and an address of its own. ``--svg DIRECTORY`` writes the plots one by one as well, for a README.
Only what was measured is drawn: a benchmark without a result file has no plot.
"""

import argparse
import html
import json
import sys
from pathlib import Path
from typing import Any

from bench._plots import Plot, plots_of, svg
from bench._stamp import machine_text

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
       background: #ffffff; color: #1f2328; }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3; } }
figure { margin: 0 0 3rem; } svg { max-width: 100%; height: auto; }
code { font-size: .85em; overflow-wrap: anywhere; }
small { opacity: .75; } h2 a { text-decoration: none; color: inherit; }
"""


def page(plots: list[Plot], drawings: list[str]) -> str:
    """Return the page. Pure."""
    parts = [_figure(plot, drawing) for plot, drawing in zip(plots, drawings, strict=True)]
    links = "".join(f'<li><a href="#{plot.anchor}">{html.escape(plot.title)}</a></li>' for plot in plots)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>DSTL: benchmarks</title>'
        f"<style>{_STYLE}</style></head><body><h1>DSTL: benchmarks</h1><ul>{links}</ul>{''.join(parts)}</body></html>\n"
    )


def _figure(plot: Plot, drawing: str) -> str:
    sources = "".join(
        f"<p><code>{html.escape(each['command'])}</code><br><small>{html.escape(machine_text(each))}</small></p>"
        for each in plot.results
    )
    title = f'<h2 id="{plot.anchor}"><a href="#{plot.anchor}">{html.escape(plot.title)}</a></h2>'
    return f"<figure>{title}{drawing}<figcaption><p>{html.escape(plot.note)}</p>{sources}</figcaption></figure>"


def read(path: Path) -> dict[str, Any]:
    """Return a result.

    Raises:
        SystemExit: The file is no result of ``--out``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not {"bench", "command", "machine", "figures"} <= found.keys():
            raise ValueError("parts are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{path} is no result: {error}; make one with python -m bench NAME --out {path}") from None
    return dict(found)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="files that --out has written")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    parser.add_argument("--svg", type=Path, metavar="DIRECTORY", help="each plot as a file of its own as well")
    args = parser.parse_args(argv)
    plots = plots_of(read(path) for path in args.results)
    if not plots:
        raise SystemExit("nothing to draw: give results of hedging, checkpoint, requests, spark or recovery")
    try:
        drawings = [svg(plot) for plot in plots]
    except ModuleNotFoundError as error:
        raise SystemExit(f"plots need {error.name}: pip install 'dstl-pyspark[bench]'") from None
    args.html.write_text(page(plots, drawings), encoding="utf-8")
    print(f"{args.html}: {', '.join(plot.anchor for plot in plots)}", file=sys.stderr)
    if args.svg is not None:
        args.svg.mkdir(parents=True, exist_ok=True)
        for plot, drawing in zip(plots, drawings, strict=True):
            (args.svg / f"{plot.anchor}.svg").write_text(drawing, encoding="utf-8")
    return 0
