"""Time and memory of backpropagation through time by schedules: `python -m experiments.checkpointing.bptt`.

An LSTM cell is trained for a step on a long sequence, in a plain loop and with `bptt_checkpoint` at several memories.
Beside what is measured stands what operation counts say: C forward steps instead of t, and a backward step that takes
as long as two forward ones, (2 t + C) / 3 t of the time. Plain and checkpointed runs take turns; a ratio is of
neighbours. Memory is measured by weak references to all that steps return or autograd keeps.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import rmm_linear
from experiments import provenance
from experiments.command_line import Parser, exit_status
from experiments.rows import replace_file
from rmm_linear.checkpointing.bptt import bptt_checkpoint, plan, step_bytes

RESULTS = Path(__file__).parent / "results"
FILE = "bptt.csv"
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    # the paper's headline, as it counts: 50 internal states for 1000 steps
    {"strategy": "ism", "slots": 50},
    {"strategy": "hsm", "memory": 0.05},
    {"strategy": "ism", "memory": 0.05},
    {"strategy": "msm", "memory": 0.05},
    {"strategy": "msm", "memory": 0.02},
    {"strategy": "msm", "memory": 0.1},
    {"strategy": "msm", "memory": 0.25},
)


class Watched:
    """A cell that notes the most bytes that steps have left behind, after any of its steps.

    Args:
        cell: The cell.
        *outside: Tensors that do not count.
    """

    def __init__(self, cell: nn.Module, *outside: Tensor) -> None:
        self.cell, self.most = cell, 0
        self._outside = {t.untyped_storage().data_ptr() for t in (*outside, *cell.parameters())}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __call__(self, x: Tensor, state: Any) -> Any:
        """Run a step."""
        state = self.cell(x, state)
        for tensor in state:
            self._note(tensor)
        self.most = max(self.most, self.held())
        return state

    def watching(self) -> AbstractContextManager[Any]:
        """Note what autograd keeps while this context is active."""
        return saved_tensors_hooks(self._note, lambda tensor: tensor)

    def held(self) -> int:
        """Return the bytes that are there."""
        self._seen = {key: pair for key, pair in self._seen.items() if not pair[0].expired()}
        return sum(size for _, size in self._seen.values())

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._outside:
            self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return tensor.detach()


def plain_loop(cell: Callable[..., Any], inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
    outputs = []
    for x in inputs.unbind(0):
        state = cell(x, state)
        outputs.append(state[0])
    return torch.stack(outputs), state


def rows(
    *,
    steps: int = 1000,
    batch: int = 16,
    features: int = 256,
    hidden: int = 256,
    repeats: int = 5,
    device: str = "cpu",
    configurations: Sequence[dict[str, Any]] = CONFIGURATIONS,
) -> Iterator[dict[str, Any]]:
    """Measure each configuration.

    Args:
        steps: Length of the sequence.
        batch: Sequences of a batch.
        features: Features of an input.
        hidden: Features of a state.
        repeats: Pairs of a plain and a checkpointed run.
        device: Where to run.
        configurations: Keywords of `bptt_checkpoint`.
    """
    torch.manual_seed(0)
    cell = nn.LSTMCell(features, hidden).to(device)
    inputs = torch.randn(steps, batch, features, device=device)
    state = torch.zeros(batch, hidden, device=device), torch.zeros(batch, hidden, device=device)
    sizes = step_bytes(cell, inputs[0], state)
    origin = _origin(device)

    def train(run: Callable[..., Any], using: Callable[..., Any], **keywords: Any) -> tuple[float, float]:
        cell.zero_grad()
        _synchronize(device)
        start = time.perf_counter()
        outputs, _ = run(using, inputs, state, **keywords)
        loss = outputs.square().mean()
        _synchronize(device)
        middle = time.perf_counter()
        loss.backward()
        _synchronize(device)
        return 1000 * (middle - start), 1000 * (time.perf_counter() - start)

    # warm: allocator, kernels, and the planner's tables
    train(plain_loop, cell)
    expected = [parameter.grad.clone() for parameter in cell.parameters() if parameter.grad is not None]
    for keywords in configurations:
        planned = plan(steps, sizes, **keywords)
        train(bptt_checkpoint, cell, **keywords)
        found = [parameter.grad for parameter in cell.parameters() if parameter.grad is not None]
        identical = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        pairs = [(train(plain_loop, cell), train(bptt_checkpoint, cell, **keywords)) for _ in range(repeats)]
        ratios = sorted(ours[1] / plain[1] for plain, ours in pairs)
        watched = Watched(cell, inputs, *state)
        with watched.watching():
            outputs, final = bptt_checkpoint(watched, inputs, state, parameters=tuple(cell.parameters()), **keywords)
            in_forward, watched.most = watched.most - sizes.state_bytes, 0
            outputs.mean().backward()
        # the final state is the caller's, and is there from the first step on that follows
        measured = max(in_forward, watched.most - sizes.state_bytes)
        del outputs, final
        yield {
            "cell": "LSTMCell",
            "steps": steps,
            "batch": batch,
            "features": features,
            "hidden": hidden,
            "dtype": "float32",
            "strategy": keywords["strategy"],
            "memory": keywords.get("memory"),
            "slots": planned.slots,
            "forward_steps": planned.forward_steps,
            "counted_time_ratio": round((2 * steps + planned.forward_steps) / (3 * steps), 4),
            "time_ratio": round(statistics.median(ratios), 4),
            "time_ratio_q20": round(ratios[len(ratios) // 5], 4),
            "time_ratio_q80": round(ratios[-1 - len(ratios) // 5], 4),
            "repeats": repeats,
            "plain_ms": round(statistics.median(plain[1] for plain, _ in pairs), 1),
            "plain_forward_ms": round(statistics.median(plain[0] for plain, _ in pairs), 1),
            "plain_bytes": planned.plain_bytes,
            "promised_bytes": planned.peak_bytes,
            "measured_bytes": measured,
            "of_plain": round(measured / planned.plain_bytes, 4),
            "gradients_identical": identical,
        } | origin


def write_rows(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """Write a results file."""

    def write(to: Path) -> None:
        with to.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)

    replace_file(path, write)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _origin(device: str) -> dict[str, Any]:
    commit, hardware = provenance.commit(), provenance.hardware(torch.device(device))
    return {
        "rmm_linear": rmm_linear.__version__,
        "commit": (commit["commit"] or "none")[:7] + ("+" if commit["modified"] else ""),
        "torch": torch.__version__,
        "hardware": hardware["gpu"] or f"{hardware['cpu']}, {hardware['cpu_cores']} cores",
        "threads": hardware["torch_threads"],
    }


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m experiments.checkpointing.bptt", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="length of the sequence (default: 1000)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument("--output", type=Path, default=RESULTS / FILE, help="results file (default: the committed one)")
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(exist_ok=True)
    found: list[dict[str, Any]] = []
    for row in rows(steps=options.steps, repeats=options.repeats, device=options.device):
        found.append(row)
        print(
            f"{row['strategy']} {row['memory'] or ''} slots {row['slots']}: {row['forward_steps']} forward steps,"
            f" time {row['time_ratio']:.3f} ({row['counted_time_ratio']:.3f} by count),"
            f" {row['measured_bytes']} bytes of {row['promised_bytes']} promised, {row['of_plain']:.4f} of plain,"
            f" gradients {'identical' if row['gradients_identical'] else 'DIFFERENT'}",
            flush=True,
        )
        # after each row: an interrupted run keeps what it has
        write_rows(options.output, found)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment."""
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
