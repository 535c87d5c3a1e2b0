"""Variance against bytes: cells within their budgets, the closed form against real sketches, tables, and mistakes."""

import csv
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from experiments.glue import allocated, sketch_noise
from experiments.glue.errors import HarnessError
from experiments.glue.sketch_noise import (
    ALL_ROWS,
    ALLOWANCE,
    GRID_FILE,
    HEADLINE_FILE,
    REAL_ROWS,
    TO_LONGEST,
    TO_OWN,
    Subject,
    noise_of,
    read_records,
)
from experiments.glue.variance import main
from experiments.glue.variance_report import write_report
from rmm_linear import RMMConfig
from rmm_linear.variance import gradient_noise

WIDTHS = [384, 384, 1536]
DEMO = ["--model", "demo", "--data", "demo", "--batch-size", "8"]


def _layers(layers: int = 3, rows: int = 256) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"layer.{number}": (
            torch.randn(rows, 24, generator=generator) + 1,
            torch.randn(rows, 12, generator=generator) * torch.rand(rows, 1, generator=generator),
        )
        for number in range(layers)
    }


@pytest.mark.montecarlo
@pytest.mark.parametrize("storage", [None, "int2"])
def test_real_sketches_have_the_closed_forms_variance(storage: str | None) -> None:
    # two-sided false-alarm rate of 7e-6 each
    layers, config = _layers(), RMMConfig(ratio=0.5, storage=storage)
    found = noise_of(layers, dict.fromkeys(layers, config), draws=500)
    assert found["draws"] == 501
    assert abs(found["z"]) < 4.5
    assert found["standard_error"] < 0.02 * found["measured"]


@pytest.mark.usefixtures("tiny_demo")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid, its best cells measured on the same weights, and the report of both."""
    monkeypatch.setattr(sketch_noise, "_GRID_DRAWS", 1)
    monkeypatch.setattr(sketch_noise, "_MEASURED_DRAWS", 8)
    output = tmp_path / "variance"
    assert main(["against-bytes", *DEMO, "--tasks", "demo", "--steps", "2", "--output", str(output)]) == 0
    records = read_records(output / GRID_FILE)
    assert {(row["step"], row["padding"], row["rows"]) for row in records} == {
        (step, padding, rows) for step in (0, 2) for padding in (TO_LONGEST, TO_OWN) for rows in (ALL_ROWS, REAL_ROWS)
    }
    assert all(row["bytes"] <= ALLOWANCE * row["budget"] for row in records)
    assert len({row["weights"] for row in records}) == 2

    # a row again, from the library alone
    subject = Subject("demo", Namespace(model="demo", data="demo", batch_size=8))
    subject.train(2)
    captured = subject.capture(TO_OWN)
    row = next(
        row
        for row in records
        if (row["step"], row["padding"], row["rows"]) == (2, TO_OWN, REAL_ROWS)
        and (row["sketch"], row["storage"], row["budget"]) == ("gaussian", None, 0.5)
    )
    config = RMMConfig(ratio=row["ratio"], sketch="gaussian", center=False, min_rows=1)
    layers = captured.chosen(REAL_ROWS)
    expected = [gradient_noise(x, g, config).relative_variance for x, g in layers.values()]
    assert row["relative_variance"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert (row["layers"], row["sketched_rows"]) == (len(layers), int(captured.real.sum()))

    assert main(["headline", *DEMO, "--tasks", "demo", "--draws", "60", "--output", str(output)]) == 0
    measured = read_records(output / HEADLINE_FILE)
    assert {row["weights"] for row in measured} == {row["weights"] for row in records if row["step"] == 2}
    assert all(row["draws"] >= 60 and abs(row["z"]) < 4.5 for row in measured)
    assert {row["which"] for row in measured} == {"gaussian", "best"}
    assert "; measured " in (output / "report.md").read_text(encoding="utf-8")
    assert (output / "against_bytes.png").stat().st_size > 10_000
    assert "report: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["against-bytes", "--data", "demo"], "the following arguments are required: --model"),
        (["against-words", *DEMO], "invalid choice: 'against-words'"),
        (["against-bytes", *DEMO, "--tasks", "mrpc"], "does not fit --data demo"),
        (["headline", *DEMO, "--draws", "1"], "--draws 1 is below 2"),
        (["headline", *DEMO, "--tasks", "demo"], "against_bytes.csv can't be read"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_noise_over_training_and_at_equal_bytes_end_in_one_report(
    tmp_path: Path, tiny_demo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*DEMO, "--tasks", "demo", "--output", str(tmp_path)]
    assert main(["over-training", *arguments, "--steps", "3", "--every", "2"]) == 0
    assert main(["equal-bytes", *arguments, "--steps", "1", "--batches", "1"]) == 0
    with (tmp_path / "over_training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} == {"0", "2"}
    assert {row["layer"] for row in rows if row["step"] == "0"} == {row["layer"] for row in rows if row["step"] == "2"}
    for row in rows:
        assert 0 < float(row["hadamard 0.1 centered"]) < float(row["gaussian 0.1"])
        assert 0 < float(row["alpha"]) < 1
        assert float(row["paper_bound"]) == pytest.approx((float(row["alpha"]) + 1) / float(row["alpha"]), rel=1e-4)
    with (tmp_path / "equal_bytes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3 * 2
    for row in rows:
        assert float(row["chosen_by_allocated_bytes"]) <= float(row["chosen_by_uniform_bytes"])
        key = "total" if row["objective"] == "total" else "mean"
        assert float(row[f"chosen_by_allocated_{key}"]) <= float(row[f"chosen_by_uniform_{key}"]) * (1 + 1e-5)
    report = (tmp_path / "report.md").read_text()
    assert "# Noise while the model trains" in report
    assert "# A ratio for every layer, at equal bytes" in report
    assert (tmp_path / "over_training.png").stat().st_size > 10_000
    assert "report: " in capsys.readouterr().out


@pytest.mark.slow
def test_every_lever_together(tmp_path: Path, tiny_demo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocated, "RATIOS", (0.1, 0.3, 0.6, 1.0))
    monkeypatch.setattr(allocated, "STORAGES", (None, "int4", "int2"))
    monkeypatch.setattr(allocated, "HEADLINE_BUDGETS", (0.25,))
    arguments = ["allocated", *DEMO, "--tasks", "demo", "--steps", "1", "--batches", "1", "--draws", "500"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    rows = read_records(tmp_path / allocated.FILE)
    cells = {(row["padding"], row["rows"], row["budget"]) for row in rows}
    assert cells == {
        (padding, treatment, 0.25) for padding in (TO_LONGEST, TO_OWN) for treatment in (ALL_ROWS, REAL_ROWS)
    }
    for row in rows:
        assert row["bytes"] <= ALLOWANCE * row["budget"]
        assert ("first token" in row["configs"]) <= ("first token" in row["way"])
        if row["way"] == allocated.BEST_WAY:
            assert abs(row["z"]) < 5
            assert row["draws"] >= 500
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "# Every lever together" in report
    assert "; measured " in report


def test_what_is_no_file_of_numbers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "over_training.csv"
    path.write_text("task,step,commit,alpha\nmrpc,zero,abc,1\n")
    with pytest.raises(HarnessError, match="is no results file of this experiment"):
        write_report(tmp_path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(HarnessError, match="make it anew"):
        write_report(tmp_path)
