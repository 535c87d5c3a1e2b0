"""Compile what ships for every GPU, and keep a table of registers, spills, shared memory and instructions.

    python kernels/benchmarks/resources.py            compile what has changed, print, and write results/resources.csv
    python kernels/benchmarks/resources.py --all      compile everything anew
    python kernels/benchmarks/resources.py --check    compile everything, and fail where the committed table was better

No GPU is needed. A build fails at once if it spills, if it lacks the matrix instructions it is meant to have, or if it
cannot be launched. Beyond that it is compared with the committed table, if that was made by the same version of triton.
It takes about a second a build and target. Each line bears a fingerprint of what was compiled, so that a test can tell
without compiling whether the table is that of the kernels as they are.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
from result_files import RESULTS, check_results_folder, read_csv, write_csv

from rmm_linear_kernels.ahead_of_time import (
    SUPPORTED,
    TARGETS,
    Resources,
    all_builds,
    compiling,
    fingerprint,
    problems,
    regressions,
    ships,
    unlisted_kernels,
)
from rmm_linear_kernels.builds import Build

TABLE = RESULTS / "resources.csv"


def read_table(path: Path) -> dict[tuple[str, str], Resources]:
    """Read a table of resources.

    Returns:
        (build, target) -> its line; nothing if there is no file.
    """
    if not path.exists():
        return {}
    kinds = {field.name: field.type for field in dataclasses.fields(Resources)}
    lines = []
    for row in read_csv(path):
        cells: dict[str, Any] = {name: int(text) if kinds[name] is int else text for name, text in row.items()}
        lines.append(Resources(**cells))
    return {(line.name, line.target): line for line in lines}


def compare(found: Iterable[Resources], table: Mapping[tuple[str, str], Resources]) -> list[str]:
    """Say what is worse than in a table.

    Args:
        found: What was compiled.
        table: What `read_table` returned.

    Returns:
        One sentence a loss; nothing about what is not in the table, or there of another version of triton.
    """
    said = []
    for line in found:
        former = table.get((line.name, line.target))
        if former is not None and former.triton == line.triton:
            said += regressions(line, former)
    return said


def out_of_date(builds: Iterable[Build], table: Mapping[tuple[str, str], Resources]) -> list[str]:
    """Say where a table is not of these builds; nothing is compiled for it.

    Args:
        builds: All that ship.
        table: What `read_table` returned.
    """
    wanted = {(build.name, target): build for build in builds for target in TARGETS if ships(build, target)}
    said = [f"{name} for {target}: in the table, but ships no more" for name, target in sorted(table.keys() - wanted)]
    for (name, target), build in wanted.items():
        if (name, target) not in table:
            # What is not supported need not compile.
            if target not in SUPPORTED:
                continue
            said.append(f"{name} for {target}: not in the table")
        elif table[name, target].fingerprint != fingerprint(build):
            said.append(f"{name} for {target}: changed since the table was made")
    return said


def unchanged(build: Build, table: Mapping[tuple[str, str], Resources]) -> list[Resources]:
    """Return the lines of a build that need not be made again.

    Args:
        build: A build.
        table: What `read_table` returned.

    Returns:
        Its lines for all targets, if they are of this build and of this version of triton; none otherwise.
    """
    lines = [table[build.name, target] for target in TARGETS if ships(build, target) and (build.name, target) in table]
    is_whole = {line.target for line in lines} >= set(SUPPORTED)
    now = fingerprint(build) if is_whole else ""
    is_same = all(line.fingerprint == now and line.triton == triton.__version__ for line in lines)
    return lines if is_whole and is_same else []


def formatted(lines: Sequence[Resources]) -> str:
    """Return a table for people."""
    width = max([len(line.name) for line in lines], default=0) + 2
    heads = (
        "target",
        "registers",
        "spilled",
        "stack",
        "shared",
        "warps",
        "resident",
        "code",
        "matrix",
        "wide/loads",
        "local",
    )
    text = [f"{'build':{width}}" + "".join(f"{head:>11}" for head in heads)]
    for line in lines:
        cells = (
            line.target,
            line.registers,
            line.spill_stores,
            line.stack,
            line.shared,
            line.warps,
            line.resident_warps,
            line.instructions,
            line.matrix_instructions,
            f"{line.wide_loads}/{line.global_loads}",
            line.local_stores,
        )
        text.append(f"{line.name:{width}}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    """Compile everything; write the table, or compare with it.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 1 where something is wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the table was better")
    parser.add_argument("--all", action="store_true", help="compile also what has not changed since the table was made")
    parser.add_argument("--only", default="", metavar="TEXT", help="only builds with this in their names; not written")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--results", type=Path, default=TABLE.parent, help="folder of resources.csv")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: at least one is needed")
    if not options.check:
        check_results_folder(parser, options.results)
    path = options.results / TABLE.name
    builds = {build.name: build for build in all_builds() if options.only in build.name}
    if options.only and not builds:
        parser.error(f"--only {options.only}: no build has that in its name")
    known = {} if options.check or options.all else read_table(path)
    lines = [line for build in builds.values() for line in unchanged(build, known)]
    fresh = {line.name for line in lines}
    if fresh:
        print(f"{len(fresh)} of {len(builds)} builds have not changed since the table was made")
    wrong, notes = [f"{kernel}: in no build" for kernel in unlisted_kernels()], []
    changed = [build for build in builds.values() if build.name not in fresh]
    with compiling(changed, list(TARGETS), processes=options.processes) as futures:
        for (name, target), future in futures.items():
            try:
                lines.append(future.result())
            except Exception as error:
                # The last line tells; the others are the source.
                said = (str(error).strip() or repr(error)).splitlines()[-1]
                said = f"{name} for {target}: does not compile: {said}"
                (wrong if target in SUPPORTED else notes).append(said)
    order = {name: place for place, name in enumerate(builds)}
    targets = {name: place for place, name in enumerate(TARGETS)}
    lines.sort(key=lambda line: (order[line.name], targets[line.target]))
    for line in lines:
        wrong += problems(builds[line.name], line)
    print(formatted(lines))
    table = {key: line for key, line in read_table(path).items() if options.only in key[0]}
    losses = compare(lines, table)
    if any(line.triton != triton.__version__ for line in table.values()):
        print(f"{path} is of another version of triton than {triton.__version__}: its figures are not compared")
    if options.check:
        wrong += losses + out_of_date(builds.values(), table)
    else:
        # These may have good reasons: the table that is committed with them shows them.
        for line in losses:
            print(f"worse than before: {line}")
        if lines and not options.only and not any("does not compile" in line for line in wrong):
            write_csv(path, [dataclasses.asdict(line) for line in lines])
            print(f"written to {path}")
    for line in notes:
        print(f"not supported: {line}")
    unfit = sum(not line.resident_warps for line in lines if line.target not in SUPPORTED)
    if unfit:
        print(f"{unfit} builds are too large for targets other than {', '.join(SUPPORTED)}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
