"""Estimators of other projects beside ours, on the same inputs and gradients: bias, variance and kept bytes.

    git clone https://github.com/skolai/fewbit FEWBIT; git clone https://github.com/zirui-ray-liu/WTACRS WTACRS
    python -m experiments.peers --fewbit FEWBIT --wtacrs WTACRS

Their code is loaded from these folders, and is no part of this project. x and g come from a layer of a
small Llama after some steps on text (`experiments.language_model`). The slope of an estimate is its product with the
exact gradient over that gradient's square: its mean is 1 for an unbiased estimate.
"""

import argparse
import functools
import importlib.util
import itertools
import math
import statistics
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import provenance
from experiments.blocks import table
from experiments.command_line import Parser
from experiments.language_model import batches, new_model, read_text
from experiments.rows import read_rows, write_rows
from rmm_linear import RMMConfig
from rmm_linear.functional import linear
from rmm_linear.memory import SavedTensors

FILE = Path(__file__).parent / "results" / "peers.csv"
RATIO = 0.1
_DRAWS, _STEPS = 2000, 200
_LAYERS = ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj")
# Called with x (sequences, length, in), a weight (out, in) and a bias or None; returns the layer's output.
Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def inputs_and_gradients() -> dict[str, tuple[Tensor, Tensor]]:
    """Train a small Llama for some steps, and return x and g of some layers in the step after them."""
    model = new_model(seed=0)
    stream = batches(read_text(), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        model(**next(stream)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, list[Tensor]] = {}
    for name in _LAYERS:
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, args, out, name=name: found.update({name: [args[0].detach(), out]}))
    loss = model(**next(stream)).loss
    gradients = torch.autograd.grad(loss, [found[name][1] for name in _LAYERS])
    return {name: (found[name][0], g) for name, g in zip(_LAYERS, gradients, strict=True)}


def ours() -> Iterator[tuple[str, Layer]]:
    for name, config in (
        ("gaussian", RMMConfig(ratio=RATIO, sketch="gaussian", center=False)),
        ("hadamard, centered", RMMConfig(ratio=RATIO)),
        ("wta_crs without gradient norms", RMMConfig(ratio=RATIO, sketch="wta_crs", center=False)),
        ("int4 at ratio 0.4", RMMConfig(ratio=0.4, storage="int4")),
    ):
        yield f"rmm_linear: {name}", functools.partial(linear, config=config)


def fewbit(folder: Path) -> Iterator[tuple[str, Layer]]:
    """Yield the linear layers of fewbit: its file alone, for the package needs a native build."""
    for package in ("fewbit", "fewbit.functional"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    _loaded("fewbit.fft", folder / "fewbit/fft.py")
    module = _loaded("fewbit.functional.linear", folder / "fewbit/functional/linear.py")
    for kind in ("gaussian", "rademacher", "dct", "dft"):

        def layer(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str = kind) -> Any:
            return module.linear_grp(x, weight, bias, RATIO, None, None, None, kind, None)

        yield f"fewbit {commit_of(folder)}: {kind}", layer


def wtacrs(folder: Path, g: Tensor) -> Iterator[tuple[str, Layer]]:
    """Yield the sampler of WTA-CRS, with exact gradient norms and, as in the first epoch, with none."""
    module = _loaded("wtacrs_functional", folder / "seq2seq/approxlinear/functional.py")
    norms_of = {"exact norms": g.norm(dim=2), "first epoch": torch.zeros(g.shape[:2])}
    for (name, norms), is_mixed in itertools.product(norms_of.items(), (True, False)):
        scheme = types.SimpleNamespace(
            sample_ratio=RATIO,
            deter_ratio=0,
            deter_adaptive=True,
            minimal_k=10,
            sample_replacement=True,
            mix_replacement=is_mixed,
            get_scale=lambda norms=norms: norms,
            set_scale=lambda _: None,
        )

        def layer(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: Any = scheme) -> Any:
            return module.approxlinear_only_bw.apply(x, weight, bias, scheme)

        yield f"WTA-CRS {commit_of(folder)}: {name}, {'its scripts' if is_mixed else 'its defaults'}", layer


def _loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def commit_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def first_line(error: Exception) -> str:
    """Return an error in a line, as the end of a traceback has it."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def measure(layer: Layer, x: Tensor, g: Tensor) -> dict[str, Any]:
    """Draw estimates of the weight gradient.

    Returns:
        Slope and its standard error; squared error over the squared gradient; kept bytes over the input's; or an error.
    """
    exact = (g.flatten(0, 1).double().t() @ x.flatten(0, 1).double()).float()
    square = float(exact.double().square().sum())
    weight = torch.zeros(g.shape[-1], x.shape[-1], requires_grad=True)
    slopes, errors = [], []
    kept_bytes = 0
    for draw in range(_DRAWS):
        torch.manual_seed(draw)
        try:
            with SavedTensors(weight) as kept:
                output = layer(x, weight, None)
            kept_bytes = int(kept.bytes)
            (found,) = torch.autograd.grad(output, weight, g)
        except (RuntimeError, TypeError) as error:
            return {"error": first_line(error)}
        slopes.append(float((found.double() * exact).sum()) / square)
        errors.append(float((found.double() - exact).square().sum()) / square)
    return {
        "slope": statistics.fmean(slopes),
        "slope_error": statistics.stdev(slopes) / math.sqrt(_DRAWS),
        "squared_error": statistics.fmean(errors),
        "kept": kept_bytes / (x.numel() * x.element_size()),
    }


def peers_table() -> str:
    rows = read_rows(FILE)
    lines = []
    for name in dict.fromkeys(row["estimator"] for row in rows):
        cells = [name]
        for row in (row for row in rows if row["estimator"] == name):
            if row["error"]:
                cells += [row["error"].partition(":")[0], "", ""]
                continue
            slope = row["slope"]
            digits = f"{slope:.3f} ± {2 * row['slope_error']:.3f}" if abs(slope) < 100 else f"{slope:.3g}"
            cells += [digits, f"{row['squared_error']:.2g}", f"{100 * row['kept']:.0f} %" if row["kept"] else "-"]
        lines.append(cells)
    header = ["estimator"]
    for name in dict.fromkeys(row["layer"] for row in rows):
        header += [f"{name}: slope", "squared error", "keeps"]
    return (
        f"{table(header, lines)}\n\nAt ratio {RATIO:g} where no other is named, {_DRAWS} draws on x and g of a small"
        f" Llama's layers, batch 16 x 128. Slope: of the mean estimate on the exact gradient, ± two standard errors;"
        " squared error: its mean over the squared gradient; keeps: of the input, counted by autograd. Commit"
        f" {rows[0]['commit'][:7]}, torch {rows[0]['torch']}."
    )


def _work(options: argparse.Namespace) -> None:
    rows = []
    made_by = {"commit": provenance.commit()["commit"], "torch": torch.__version__}
    for place, (x, g) in inputs_and_gradients().items():
        for name, layer in (*ours(), *fewbit(options.fewbit), *wtacrs(options.wtacrs, g)):
            found = dict.fromkeys(("slope", "slope_error", "squared_error", "kept", "error")) | measure(layer, x, g)
            rows.append({"estimator": name, "layer": place.rpartition(".")[2], **found, **made_by})
            print(rows[-1], flush=True)
    write_rows(FILE, rows)
    print(peers_table())


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--fewbit", type=Path, required=True, help="checkout of fewbit")
    parser.add_argument("--wtacrs", type=Path, required=True, help="checkout of WTA-CRS")
    sys.exit(parser.run(_work))
