"""A small Llama from scratch on packed text: the loss of a language model over the noise in its gradient.

The text is the standard library of the Python that runs this, byte by byte: no data is needed. All methods of a seed
have the same initial weights and the same batches. Each finished run is a line of `results/language_model.jsonl`, and
is not run again, unless `--results` names another folder. The learning rate was chosen for exact layers (`--methods
exact --seeds 0 --rates 5e-4 1e-3 2e-3`).
"""

import argparse
import hashlib
import itertools
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from experiments import provenance
from experiments.blocks import quantiles, table
from experiments.checkpointing.instruments import interleaved
from experiments.command_line import HarnessError, Parser
from experiments.glue.comparison import Quantiles
from experiments.glue.evidence import mean_cell
from experiments.glue.settings import BITS
from experiments.provenance import origin
from experiments.rows import append_json_line, read_json_lines, read_rows, write_rows
from rmm_linear import RMMConfig, convert_linears
from rmm_linear.compiler import plans
from rmm_linear.memory import SavedTensors
from rmm_linear.variance import measure_step_noise

RESULTS = Path(__file__).parent / "results"
ROWS, TIMES, FIGURE = "language_model.jsonl", "language_model_times.csv", "language_model.png"
SEEDS, STEPS, SEQUENCES, LENGTH = 3, 1000, 16, 128
_LEARNING_RATE = 1e-3
_WARM_UP, _EVERY, _VALIDATED, _NOISE_BATCHES = 50, 100, 16, 8
_TIMED_ROUNDS = 21

_SKETCHES: dict[str, RMMConfig] = {
    "gaussian at 0.1, the paper's": RMMConfig(ratio=0.1, sketch="gaussian", center=False),
    "hadamard at 0.1": RMMConfig(ratio=0.1),
    "hadamard at 0.5": RMMConfig(ratio=0.5),
    "hadamard at 0.8 in int2": RMMConfig(ratio=0.8, storage="int2"),
    "int4": RMMConfig(ratio=1.0, storage="int4"),
}
_EXACT = "exact"
# Options of the backend of torch.compile.
_COMPILED: dict[str, dict[str, Any]] = {"exact, compiled": {"budget": "100%"}} | {
    f"{name} bits": {"bits": bits} for name, bits in BITS.items()
}
METHODS = (_EXACT, *_SKETCHES, *_COMPILED)
Rows = Sequence[dict[str, Any]]


def read_text() -> Tensor:
    """Return the bytes of the standard library's modules, uint8, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    parts = [(root / path).read_bytes() for path in files if left_out.isdisjoint(path.parts)]
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def batches(text: Tensor, seed: int) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES,), generator=random)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).long()
        yield {"input_ids": tokens, "labels": tokens}


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _prepare(model: nn.Module, method: str) -> None:
    if method in _SKETCHES:
        convert_linears(model, config=_SKETCHES[method])
    elif method in _COMPILED:
        model.compile(backend="rmm_linear", options=_COMPILED[method])


def _rate_at(step: int, learning_rate: float) -> float:
    if step < _WARM_UP:
        return learning_rate * (step + 1) / _WARM_UP
    return learning_rate * 0.5 * (1 + math.cos(math.pi * (step - _WARM_UP) / (STEPS - _WARM_UP)))


def train(method: str, seed: int, learning_rate: float = _LEARNING_RATE) -> dict[str, Any]:
    """Train one model; return its row: losses, noise, bytes and times, and where it ran."""
    text = read_text()
    border = len(text) * 19 // 20
    training = batches(text[:border], seed)
    held_out = batches(text[border:], seed=0)
    validation = [next(held_out) for _ in range(_VALIDATED)]
    model = new_model(seed)
    _prepare(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses, seconds = list[float](), list[float]()
    curve, noise = list[tuple[int, float]](), list[dict[str, float]]()
    with SavedTensors(model) as kept:
        # autograd frees what it keeps when the loss goes
        loss = model(**validation[0]).loss
    del loss
    kept_bytes = plans(model)[0].planned.forward_bytes if method in _COMPILED else int(kept.bytes)
    for step in range(STEPS):
        if step in (STEPS // 4, STEPS // 2, STEPS * 3 // 4):
            stream = batches(text[:border], seed=-step)
            found = measure_step_noise(model, [next(stream) for _ in range(_NOISE_BATCHES)])
            ratios = {"ratio": found.noise_ratio, "relative_variance": found.relative_variance}
            noise.append({"step": step} | ratios)
        for group in optimizer.param_groups:
            group["lr"] = _rate_at(step, learning_rate)
        began = time.perf_counter()
        loss = model(**next(training)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
        if (step + 1) % _EVERY == 0:
            curve.append((step + 1, _validate(model, validation)))
    return {
        "method": method,
        "seed": seed,
        "learning_rate": learning_rate,
        "steps": STEPS,
        "text_sha256": hashlib.sha256(text.numpy().tobytes()).hexdigest(),
        "losses": [round(statistics.fmean(losses[at : at + 20]), 4) for at in range(0, STEPS, 20)],
        "validation": curve,
        "noise": noise,
        "kept_bytes": kept_bytes,
        "step_seconds": statistics.median(seconds),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(torch.device("cpu")),
        **provenance.commit(),
    }


def time_all(folder: Path) -> None:
    """Time training steps of all methods by turns, in one thread."""
    batch = next(batches(read_text(), seed=0))
    steps = {}
    for method in METHODS:
        torch._dynamo.reset()
        model = new_model(0)
        _prepare(model, method)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        # the first step compiles
        step()
        steps[method] = step
    seconds = dict(zip(steps, interleaved(list(steps.values()), _TIMED_ROUNDS), strict=True))
    rows = []
    for method, times in seconds.items():
        found = Quantiles.of([time / exact for time, exact in zip(times, seconds[_EXACT], strict=True)])
        rows.append({"method": method} | found.columns() | origin())
    write_rows(folder / TIMES, rows)


@torch.no_grad()
def _validate(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
    model.eval()
    loss = statistics.fmean(model(**batch).loss.item() for batch in batches)
    model.train()
    return loss


def _run_missing(options: argparse.Namespace) -> None:
    path = options.results / ROWS
    for seed, method, rate in itertools.product(options.seeds, options.methods, options.rates):
        done = [(row["method"], row["seed"], row["learning_rate"]) for row in read_json_lines(path)]
        if (method, seed, rate) not in done:
            torch._dynamo.reset()
            row = train(method, seed, rate)
            append_json_line(path, row)
            print(f"{method}, seed {seed}, rate {rate:g}: {_last_loss(row):.4f}", flush=True)


def _of_method(rows: Rows, method: str) -> dict[int, dict[str, Any]]:
    """The last run of each seed."""
    return {row["seed"]: row for row in rows if row["method"] == method and row["learning_rate"] == _LEARNING_RATE}


def _differences(rows: Rows, method: str) -> list[float]:
    exact, own = _of_method(rows, _EXACT), _of_method(rows, method)
    return [_last_loss(own[seed]) - _last_loss(exact[seed]) for seed in sorted(own.keys() & exact.keys())]


def _last_loss(row: dict[str, Any]) -> float:
    return float(row["validation"][-1][1])


def _noise(row: dict[str, Any]) -> float:
    return statistics.fmean(each["ratio"] for each in row["noise"])


def language_model_table(folder: Path = RESULTS) -> str:
    """Return the table of validation losses."""
    rows, times = read_json_lines(folder / ROWS), read_rows(folder / TIMES) if (folder / TIMES).exists() else []
    exact = _of_method(rows, _EXACT)
    if not exact:
        raise HarnessError("there is no run of exact layers; run python -m experiments.language_model --methods exact")
    if len({row["text_sha256"] for row in rows}) > 1:
        raise HarnessError(
            "the runs had different texts, as two versions of Python have different standard libraries: keep their rows"
            " in separate files"
        )
    lines = []
    time_of = {row["method"]: quantiles(row, "time") for row in times}
    first = next(iter(exact.values()))
    for method, own in ((method, _of_method(rows, method)) for method in METHODS):
        if not own:
            continue
        kept = next(iter(own.values()))["kept_bytes"] / first["kept_bytes"]
        noise, differences = "0", list[float]()
        if method != _EXACT:
            noise, differences = f"{statistics.fmean(map(_noise, own.values())):.2g}", _differences(rows, method)
        losses = ", ".join(f"{_last_loss(own[seed]):.4f}" for seed in sorted(own))
        cells = [method, f"{100 * kept:.0f} %", time_of.get(method, "-"), noise, losses]
        lines.append([*cells, mean_cell(differences, 4) if differences else ""])
    where = f", on {times[0]['hardware']}" if times else ""
    shown = [row for method in METHODS for row in _of_method(rows, method).values()]
    cpus = sorted({row["hardware"]["cpu"] for row in shown})
    return (
        table(["method", "keeps", "time of a step", "noise", "validation loss of each seed", "minus exact"], lines)
        + f"\n\nAfter {STEPS} steps of {SEQUENCES} x {LENGTH} bytes: a Llama of 4 layers of 128, nats a byte; the last"
        " column is the mean difference between runs of the same seed ± half of its 95 % interval. For"
        " codes, the plan counts the kept bytes at the end of the forward pass. Noise: the variance that the method"
        " adds to the whole gradient over the minibatch's own, mean of three times in the training."
        f" {' and '.join(cpus)}, torch {first['versions']['torch']}; {len(shown)} runs of"
        f" {len({row['commit'] for row in shown})} commits, {sum(row['modified'] for row in shown)} of them with"
        " changes. Times are medians and 20-80 % quantiles of steps by turns in one thread, over exact's"
        f"{where}."
    )


def draw(rows: Rows, path: Path) -> None:
    """Draw the training losses, and the differences in validation loss over the noise."""
    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (method, own) in enumerate((method, _of_method(rows, method)) for method in METHODS):
        if not own:
            continue
        colour = "black" if method == _EXACT else f"C{place - 1}"
        if 0 in own:
            # other curves lie on exact's
            style: dict[str, Any] = {"linestyle": ":", "zorder": 3} if method == _EXACT else {}
            left.plot(range(20, STEPS + 1, 20), own[0]["losses"], color=colour, label=method, **style)
        if method != _EXACT:
            noises = [_noise(own[seed]) for seed in sorted(own.keys() & _of_method(rows, _EXACT).keys())]
            right.plot(noises, _differences(rows, method), "o", color=colour, alpha=0.8)
    left.set(yscale="log", xlabel="step", ylabel="training loss of seed 0, nats a byte")
    left.legend(fontsize=8, frameon=False)
    right.axhline(0, color="0.3", linewidth=1)
    right.set(xscale="log", xlabel="noise: variance added over the minibatch's own")
    right.set_ylabel("validation loss minus exact's of the same seed")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.times:
        time_all(options.results)
    elif not options.report:
        _run_missing(options)
    rows = read_json_lines(options.results / ROWS)
    if _of_method(rows, _EXACT) or options.report:
        print(language_model_table(options.results))
        draw(rows, options.results / FIGURE)


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(SEEDS))
    parser.add_argument("--rates", nargs="+", type=float, default=[_LEARNING_RATE], help="learning rates")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows and the figure")
    parser.add_argument("--times", action="store_true", help="time steps, and train nothing")
    parser.add_argument("--report", action="store_true", help="run nothing")
    sys.exit(parser.run(_work))
