"""The benchmark's table: right columns, ratios within a repetition, kept bytes as promised, bad options named."""

import csv
from pathlib import Path

import pytest
import torch

from rmm_linear import RMMConfig


@pytest.fixture
def layer(benchmark_script, monkeypatch: pytest.MonkeyPatch):
    module = benchmark_script("layer")
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
        assert float(row["limit"]) == round(1 - (1 - config.ratio) / 3, 4)
        # Goals are a GPU's, and so is the allocator that is asked for its peak.
        assert row["goal"] == row["transient_bytes"] == ""
    assert str(path) in capsys.readouterr().out


def test_what_was_measured_before_an_end_is_in_the_file(layer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(layer, "SHAPES", ((256, 16, 24), (0, 0, 0)))
    real = layer.benchmark

    def ended(shape, *args, **kwargs):
        if shape[0] == 0:
            raise KeyboardInterrupt
        return real(shape, *args, **kwargs)

    monkeypatch.setattr(layer, "benchmark", ended)
    with pytest.raises(KeyboardInterrupt):
        layer.main(["--device", "cpu", "--repeats", "1", "--results", str(tmp_path)])
    with next(tmp_path.glob("layer-*.csv")).open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(layer.VARIANTS) * len(layer.RATIOS)


@pytest.mark.slow
def test_all_sketches_can_be_timed(layer, tmp_path: Path) -> None:
    assert layer.main(["--device", "cpu", "--repeats", "1", "--all-sketches", "--results", str(tmp_path)]) == 0
    with next(tmp_path.glob("*.csv")).open(newline="") as file:
        assert {row["sketch"] for row in csv.DictReader(file)} == set(layer.available_sketches())


@pytest.mark.slow
def test_launches_of_a_tiny_step_have_a_file_of_their_own(layer, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(layer, "RATIOS", (0.5,))
    command = ["--device", "cpu", "--repeats", "1", "--results", str(tmp_path), "--launches", "eager"]
    assert layer.main(command) == 0
    (path,) = tmp_path.glob("launches-*-float32.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], row["layers"], row["center"], row["error"]) for row in rows] == [
        ("eager", layers, center, "") for layers in ("1", "8") for center in ("False", "True")
    ]
    assert all(float(row["sketched_us"]) > 0 and float(row["linear_us"]) > 0 for row in rows)
    # A way that does not work here is named in the file and in the exit status, and the others are timed.
    real = layer._launching

    def broken(mode, *arguments):
        if mode == "compiled":
            raise RuntimeError("no compiler\nanywhere")
        return real(mode, *arguments)

    monkeypatch.setattr(layer, "_launching", broken)
    assert layer.main([*command[:-1], "compiled,eager"]) == 1
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["error"] for row in rows] == ["RuntimeError: no compiler"] * 2 + [""] * 4
    assert [row["sketched_us"] == "" for row in rows] == [True] * 2 + [False] * 4
    assert "no compiler" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_gpu_s_file_has_goals_and_transient_bytes(layer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(layer, "GOALS", {(1024, 64, 128): {0.5: 0.9}})
    monkeypatch.setattr(layer, "RATIOS", (0.5,))
    command = ["--device", "cuda", "--repeats", "2", "--results", str(tmp_path), "--launches", "eager,graph"]
    assert layer.main(command) == 0
    with next(tmp_path.glob("layer-*-bfloat16.csv")).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(layer.GPU_VARIANTS)
    for row in rows:
        assert row["goal"] == ("" if row["storage"] else "0.9")
        assert int(row["linear_transient_bytes"]) >= 0
        # At least the kept sketch is there for a while.
        assert int(row["kept_bytes"]) <= int(row["transient_bytes"])


@pytest.mark.parametrize(
    "options",
    [
        ["--repeats", "0"],
        ["--dtype", "int8"],
        ["--device", "foo"],
        ["--results", "/dev/null/x"],
        ["--launches", "eager,fast"],
        ["--launches", "graph"],
    ],
    ids=str,
)
def test_bad_options_are_named(layer, options: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        layer.main(["--device", "cpu", *options])
    assert options[0] in capsys.readouterr().err
