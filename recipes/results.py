"""Kept results: ``results.py keep RUN DATA/MODEL`` keeps a run, ``results.py check [DATA/MODEL ...]`` redoes them.

``results.py redo DATA/MODEL`` trains one again and says whether it agrees, ``results.py page FILE`` writes the table of
all into a page, ``results.py compare RUN RUN ...`` shows runs beside each other, with curves, in one HTML file.

A kept run is a folder ``recipes/results/DATA/MODEL`` with ``config.yaml`` (the command's overrides and the resolved
configuration) and, for each seed, ``seed-N.json`` (metrics, epochs, versions) and ``seed-N.csv`` (the log).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe_tools.command import command

RECIPES = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        command("results"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=RECIPES / "results", help="the folder of kept runs")
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="keep a completed run")
    keeping.add_argument("run", type=Path, help="its folder: logs/train/<time>")
    keeping.add_argument("name", help="DATA/MODEL")
    checking = commands.add_parser("check", help="train kept runs again and compare")
    checking.add_argument("names", nargs="*", help="DATA/MODEL; all if none")
    checking.add_argument("--tolerance", type=float, default=0.002, help="of each metric; seeds differ by as much")
    checking.add_argument("--seed", type=int, action="append", default=[], help="only this one; may be repeated")
    redoing = commands.add_parser("redo", help="train one kept run again, and say whether it agrees")
    redoing.add_argument("name", help="DATA/MODEL")
    redoing.add_argument("--seed", type=int, help="which of the kept seeds; the first if absent")
    paging = commands.add_parser("page", help="write the table of all kept runs between the marks of a page")
    paging.add_argument("page", type=Path, help="docs/records.md")
    comparing = commands.add_parser("compare", help="show runs beside each other, with curves, in one HTML file")
    comparing.add_argument("runs", nargs="+", help="the folder of a run or of a sweep, or DATA/MODEL")
    comparing.add_argument("--out", type=Path, default=Path("comparison.html"), help="the file (default: %(default)s)")
    arguments = parser.parse_args()
    # Once there is something to do: torch and Lightning take seconds.
    from recipe_tools.comparison_page import comparison_page, find_runs
    from recipe_tools.jobs.kept_runs import by_name, check, keep, kept_runs
    from recipe_tools.records import records_table, redo, write_page
    from recipe_tools.report import console

    try:
        if arguments.command == "compare":
            runs = [run for name in arguments.runs for run in find_runs(name, arguments.root)]
            arguments.out.write_text(comparison_page(runs), encoding="utf-8")
            console().print(f"{len(runs)} runs in {arguments.out}: open it in a browser.", markup=False, soft_wrap=True)
            return
        if arguments.command == "keep":
            console().print(str(keep(arguments.run, arguments.name, arguments.root)))
            return
        if arguments.command == "page":
            write_page(arguments.page, records_table(by_name([], arguments.root), arguments.root))
            return
        if arguments.command == "redo":
            (overrides, *_) = [overrides for _, _, overrides, _ in kept_runs([arguments.name], arguments.root)]
            kept = by_name([arguments.name], arguments.root)[arguments.name]
            if not redo(arguments.name, kept, overrides, seed=arguments.seed):
                raise SystemExit(1)
            return
        options = {"tolerance": arguments.tolerance, "seeds": arguments.seed}
        if not check(arguments.names, arguments.root, **options):
            raise SystemExit(1)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
