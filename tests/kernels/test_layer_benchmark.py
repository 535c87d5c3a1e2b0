"""The benchmark's table: right columns, ratios within a repetition, kept bytes as promised, bad options named."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from rmm_linear import RMMConfig

SCRIPT = Path(__file__).parents[2] / "kernels/benchmarks/layer.py"


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("layer_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "layer_benchmark", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHAPES", ((256, 16, 24),))
    return module


def test_the_file_holds_a_row_a_variant_with_its_origin(layer, tmp_path: Path, capsys) -> None:
    assert layer.main(["--device", "cpu", "--repeats", "2", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("layer-*-float32.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(layer.VARIANTS) * len(layer.RATIOS)
    for row in rows:
        config = RMMConfig(ratio=float(row["ratio"]), sketch=row["sketch"], center=row["center"] == "True", min_rows=1)
        # To the byte: `saved_bytes` is all-in, and the benchmark counts what autograd really keeps.
        assert (
            int(row["kept_bytes"]) == int(row["said_bytes"]) == config.sketch_object.saved_bytes(256, 16, torch.float32)
        )
        assert float(row["time_ratio_q20"]) <= float(row["time_ratio"]) <= float(row["time_ratio_q80"])
        assert row["hardware"]
        assert row["commit"]
    assert str(path) in capsys.readouterr().out


def test_all_sketches_can_be_timed(layer, tmp_path: Path) -> None:
    assert layer.main(["--device", "cpu", "--repeats", "1", "--all-sketches", "--results", str(tmp_path)]) == 0
    with next(tmp_path.glob("*.csv")).open(newline="") as file:
        assert {row["sketch"] for row in csv.DictReader(file)} == set(layer.available_sketches())


@pytest.mark.parametrize(
    "options", [["--repeats", "0"], ["--dtype", "int8"], ["--device", "foo"], ["--results", "/dev/null/x"]], ids=str
)
def test_bad_options_are_named(layer, options: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        layer.main(options)
    assert options[0] in capsys.readouterr().err
