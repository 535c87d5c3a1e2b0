"""Fine-tune with the code of other projects in the study's harness, on a CPU: score, kept bytes and time of each.

README.md has the commands. FEWBIT, WTACRS and GACT are checkouts (`experiments.peers` has two of the addresses; the
third is https://github.com/LiuXiaoxuanPKU/GACT-ICML). Their code is loaded from these folders, and nothing of it is
part of this project. fewbit's activation functions need its native library beside its `__init__.py`:

    cmake -S FEWBIT -B BUILD -DCMAKE_PREFIX_PATH="$(python -c 'import torch.utils as u; print(u.cmake_prefix_path)')"
    cmake --build BUILD && cp BUILD/fewbit/libfewbit.so FEWBIT/fewbit/

A run takes learning rate, epochs, batches and their order from the study, and replaces the linear layers that
`convert_linears` would convert. A run that is finished, or that has failed, is a row at once, and is not run again.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.blocks import percent, quantiles, table
from experiments.command_line import HarnessError, Parser
from experiments.peers import RATIO, commit_of, first_line
from experiments.provenance import origin
from experiments.rows import read_rows, write_rows
from rmm_linear import RMMConfig, convert_linears

from .comparison import Quantiles
from .evidence import RESULTS as STUDY
from .evidence import difference_cell, evidence_of, read_study
from .settings import EXACT, RunSettings, load_named_config, stay_offline

if TYPE_CHECKING:
    from .peer_runs import Peer, PeerRun

RESULTS = Path(__file__).parent / "results"
FILE, TIMES = "peers.csv", "peers_time.csv"
# methods of the study, by their names there -> their layers' configuration, None where there are none to time
_OURS = {
    "gaussian at 0.1": RMMConfig(ratio=RATIO, sketch="gaussian", center=False),
    "centered hadamard at 0.1": RMMConfig(ratio=RATIO),
    "centered hadamard at 1 in int4": RMMConfig(ratio=1.0, storage="int4"),
    "8-bit codes": None,
}
_ROUNDS = 7


def _outcome(peer: Peer, settings: RunSettings) -> dict[str, Any]:
    """Fine-tune with a peer: score, kept bytes over exact's, and the error of a run that fails."""
    from .peer_runs import PeerRun
    from .training import not_finite

    found: dict[str, Any] = {"score": None, "kept": None, "error": None}
    try:
        with tempfile.TemporaryDirectory() as checkpoints:
            trained = PeerRun(peer, settings).train(Path(checkpoints))
    except HarnessError:
        raise
    # any error is the result
    except Exception as error:
        traceback.print_exc()
        return {**found, "error": first_line(error)}
    kept, lost = trained["kept_bytes"], not_finite(trained)
    diverged = lost and f"diverged: {lost} is not finite at the end"
    return {"score": trained["final"]["score"], "kept": kept["model"] / kept["exact_model"], "error": diverged}


def _settings(options: argparse.Namespace, task: str, seed: int, pad_multiple: int) -> RunSettings:
    model = {"model": options.model, "data": options.data, "pad_multiple": pad_multiple}
    return load_named_config("study").run(task=task, seed=seed, method=EXACT, **model)


def run_all(options: argparse.Namespace) -> None:
    """Do the runs that have no row, seed by seed."""
    from .peer_runs import peers

    # asked for before the runs, for later the files may differ from the code that runs
    path, made_by = options.results / FILE, origin()
    chosen = [peer for peer in peers(options) if options.peer in (None, peer.name)]
    if not chosen:
        names = ", ".join(peer.name for peer in peers(options))
        raise HarnessError(f"--peer {options.peer!r} is none of {names}")
    for seed in options.seeds:
        for task in options.tasks:
            for peer in chosen:
                rows = read_rows(path) if path.exists() else []
                done = [row for row in rows if row["peer"] == peer.name]
                # a peer that ends with an error and no score has one row
                if any((row["task"], row["seed"]) == (task, seed) or row["score"] is None for row in done):
                    continue
                if done and peer.is_run_once:
                    continue
                row = {"peer": peer.name, "peer_commit": peer.checkout and commit_of(peer.checkout)}
                row |= {"task": task, "seed": seed, **_outcome(peer, _settings(options, task, seed, peer.pad_multiple))}
                rows = read_rows(path) if path.exists() else []
                write_rows(path, [*rows, row | made_by])
                print(row, flush=True)


def _convert(run: PeerRun, config: RMMConfig) -> None:
    convert_linears(run.model, config=config)


def time_all(options: argparse.Namespace) -> None:
    """Measure steps of exact layers, our sketches and all peers in turn, in CPU seconds of one thread."""
    from .peer_runs import Peer, PeerRun, peers

    torch.set_num_threads(1)
    ours = [Peer(name, functools.partial(_convert, config=config)) for name, config in _OURS.items() if config]
    steps: dict[str, Callable[[], float]] = {}
    for peer in (Peer(EXACT, lambda run: None), *ours, *peers(options)):
        run = PeerRun(peer, _settings(options, options.tasks[0], 0, 128))
        try:
            step = run.timed_step()
            step()
            steps[peer.name] = step
        # the row of the run has the error
        except Exception:
            traceback.print_exc()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(1 + _ROUNDS)]
    ratios = {name: [seconds[name] / seconds[EXACT] for seconds in rounds[1:]] for name in steps}
    rows = [{"name": name} | Quantiles.of(values).columns() | origin() for name, values in ratios.items()]
    write_rows(options.results / TIMES, rows)


def peers_table(folder: Path = RESULTS, study: Path = STUDY) -> str:
    """Return the table of the committed rows beside the study's of the same tasks and seeds."""
    rows = read_rows(folder / FILE)
    every = read_rows(folder / TIMES) if (folder / TIMES).exists() else []
    times = {row["name"]: quantiles(row, "time") for row in every}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    seeds = {row["seed"] for row in rows}
    results = [
        each
        for each in read_study(study)
        if each["config"]["task"] in tasks
        and each["config"]["seed"] in seeds
        # runs of one seed on two kinds of devices differ as much as methods do
        and each["hardware"]["device"] == "cpu"
    ]
    runs = [(each["config"], each["final"]["score"]) for each in results]
    exact = {(run["task"], run["seed"]): score for run, score in runs if run["method"] == EXACT}
    # of one task, for the share depends on the lengths of its texts, and some peers have runs of one task
    kept_by_ours = {
        each.name: each.kept for each in evidence_of([each for each in results if each["config"]["task"] == tasks[0]])
    }
    lines = []
    for found in evidence_of(results):
        if found.name in _OURS:
            cells = [difference_cell(found.differences.get(task, ())) for task in tasks]
            kept_share = percent(kept_by_ours.get(found.name))
            lines.append([f"rmm_linear: {found.name}", *cells, kept_share, times.get(found.name, "-"), ""])
    commits = {row["peer"]: row["peer_commit"] for row in rows}
    for name in dict.fromkeys([*commits, *(name for name in times if name not in (EXACT, *_OURS))]):
        own = [row for row in rows if row["peer"] == name]
        scored = [row for row in own if row["score"] is not None and (row["task"], row["seed"]) in exact]
        differences = {
            task: [100 * (row["score"] - exact[task, row["seed"]]) for row in scored if row["task"] == task]
            for task in tasks
        }
        kept = [row["kept"] for row in own if row["kept"] is not None and row["task"] == tasks[0]]
        error = next((row["error"] for row in own if row["error"]), "")
        cells = [difference_cell(differences[task]) for task in tasks]
        cells += [percent(statistics.fmean(kept) if kept else None), times.get(name, "-"), error]
        lines.append([f"{name} ({commits[name]})" if commits.get(name) else name, *cells])
    header = ["method", *tasks, f"keeps ({tasks[0]})", "time of a step", "error"]
    made_by = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return (
        f"{table(header, lines)}\n\nA task's column has the points by which a method scores more than exact layers of"
        " the same seed: the mean over the seeds ± half of the 95 % interval (number of seeds). So few seeds rank no"
        ' method. "keeps" divides the bytes that a method keeps for the backward pass by the bytes that exact layers'
        ' keep on the same batch, which is padded as the method needs it. "time of a step" divides the CPU seconds of a'
        " step by an eager exact step's, in one thread on one batch of 32 x 128: median and 20-80 % quantiles of"
        f" {_ROUNDS} rounds. The rows were made at commit {made_by} with torch {rows[0]['torch']}; rows of rmm_linear"
        " come from the study's runs on a CPU."
    )


def _work(options: argparse.Namespace) -> None:
    stay_offline(_settings(options, options.tasks[0], 0, 0))
    (time_all if options.time else run_all)(options)
    print(peers_table(options.results))


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--model", required=True, help="folder that from_pretrained reads, or a name on the hub")
    parser.add_argument("--data", required=True, help="folder in the official GLUE layout")
    for project in ("fewbit", "wtacrs", "gact"):
        parser.add_argument(f"--{project}", type=Path, required=True, help="checkout of the project")
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "rte"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--peer", help="run this one alone, by its name in the rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--time", action="store_true", help="measure the time of steps, and train nothing")
    sys.exit(parser.run(_work))
