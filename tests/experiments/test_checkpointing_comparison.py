"""The comparisons of checkpointing: models of published sizes, exact instruments, and reports that the results make."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments import results_by_model
from experiments.blocks import filled
from experiments.checkpointing import (
    baselines,
    bptt,
    compiled,
    compiled_models,
    compiled_report,
    instruments,
    models,
    report,
    run,
)
from experiments.command_line import HarnessError

# two blocks of a tiny ResNet: batch norm, residuals, strides
TINY = replace(
    models.WORKLOADS[0],
    build=lambda **options: models.ResNet((1, 1), **options),
    small=models.Shape({"width": 0.125}, 4, 32),
    wide=models.Shape({"width": 0.25}, 2, 32),
    full=models.Shape({}, 8, 64),
)


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (lambda: models.ResNet((3, 4, 6, 3)), 25_557_032),
        (lambda: models.ResNet((3, 8, 36, 3)), 60_192_808),
        (models.VGG19, 143_667_240),
        (models.DenseNet161, 28_681_000),
        (lambda: models.GoogLeNet(auxiliary=False), 6_624_904),
        (models.GoogLeNet, 13_004_888),
        (models.UNet, 31_030_658),
    ],
)
def test_models_have_the_published_number_of_parameters(build: Any, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build().parameters()) == parameters


def test_storages_are_counted_from_the_op_that_makes_them_until_they_are_gone() -> None:
    outside = torch.zeros(100)
    with instruments.StorageLifetimes([outside]) as lifetimes:
        a = torch.zeros(10)
        view = a[2:]
        outside.add_(1)
        del a
        assert lifetimes.bytes == 40
        b = view + 1
        assert lifetimes.bytes == 40 + 32
        del view
        assert lifetimes.bytes == 32
        del b
        assert lifetimes.bytes == 0
    assert lifetimes.peak_bytes == 72


def test_attention_of_a_cpu_counts_as_that_of_a_gpu() -> None:
    query, key = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)

    def step() -> None:
        F.scaled_dot_product_attention(query, key, key).sum().backward()

    # two products forward, five backward
    assert instruments.peak_and_flops(step, [])[1] == 7 * 2 * (2 * 4 * 16 * 24 * 8)


def test_a_measurement_tells_wrong_gradients_and_checkpointed_blocks_from_the_plain_step() -> None:
    measuring = run.Measuring(TINY, TINY.small, repeats=0)
    plain = measuring.row("eager", "", measuring.plain)
    assert plain["same_gradients"]
    wrong = measuring.row("wrong", "", lambda: 1.5 * measuring.plain())
    assert (wrong["same_gradients"], wrong["gradient_difference"]) == (False, 0.5)
    with baselines.checkpointed_blocks(measuring.model, r"stages\.\d+") as count:
        row = measuring.row("blocks", "", measuring.plain)
    assert count == 2
    assert row["peak_bytes"] < plain["peak_bytes"]
    assert 0.1 < row["extra_flops"] < 1 / 3
    assert row["same_gradients"]
    # batch norms update their statistics a second time
    assert not row["same_buffers"]


@pytest.mark.slow
def test_a_tiny_comparison_runs_from_end_to_end(tmp_path: Path) -> None:
    # a few: every strategy has tests of its own
    names = [name for name in run.available_strategies() if name != "auto"][:3]
    simulated, measured = run.run_workload(TINY, names=names, repeats=1, budgets=(0.3,))
    assert {row["method"] for row in measured} == {"eager", "torch checkpoint", "torch budget", "planned"}
    planned = [row for row in measured if row["method"] == "planned"]
    for row in planned:
        # a plan also counts the workspaces of convolutions, which some processors have and this instrument does not see
        assert row["peak_bytes"] <= row["simulated_peak_bytes"]
        assert row["same_gradients"]
        assert row["same_buffers"]
    # it really was the partitioner's program that ran
    assert next(row for row in measured if row["method"] == "torch budget")["peak_bytes"] != measured[0]["peak_bytes"]
    run.write_rows(tmp_path / report.FRONTIERS_FILE, simulated)
    run.write_rows(tmp_path / report.MEASURED_FILE, measured)
    assert f"{len(planned)} schedules of" in report.write_report(tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 0


@pytest.mark.slow
def test_compiled_steps_are_compared_from_end_to_end(tmp_path: Path) -> None:
    tiny = models.Shape({"width": 16}, 512, 16)

    class Chain(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            layers = (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            self.blocks = nn.Sequential(*(nn.Sequential(*layers) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x).square().mean()

    chain = models.Workload(
        "chain",
        Chain,
        lambda model, batch, size: (torch.randn(batch, size),),
        lambda model, x: model(x),
        tiny,
        tiny,
        blocks={"each block": r"blocks\.\d+"},
    )
    extent = compiled_models.Extent(
        (0.5,), rivals=None, spread=3, rounds=2, backend="aot_eager", executors=(compiled_report.EXACT,)
    )
    rows = compiled.compare(compiled_models.Case("chain", chain, tiny, tiny, blocks=4), extent)
    plans = [row for row in rows if row["method"] == compiled_report.EXACT and row["peak_bytes"] is not None]
    assert plans
    for row in plans:
        assert row["simulated_peak_bytes"] == row["tensors_peak_bytes"] == row["peak_bytes"] <= row["budget_bytes"]
        assert row["same_gradients"]
    # the tables are about plans that Inductor compiled
    others = [row | {"method": compiled_report.INDUCTOR} for row in rows if row["method"] == compiled_report.EXACT]
    results_by_model.write_rows(tmp_path / compiled_report.ROWS_FILE, [*rows, *others], old=[], names=["chain"])
    assert "in 3 of 3 budgets that lie evenly" in compiled_report.write_compiled_report(tmp_path)


def test_bptt_takes_the_bytes_that_are_promised() -> None:
    configurations = [{"strategy": "ism", "slots": 4}, {"strategy": "msm", "memory": 0.3}]
    for row in bptt.rows(steps=24, batch=2, features=4, hidden=8, repeats=1, configurations=configurations):
        assert row["gradients_identical"]
        assert row["measured_bytes"] == row["promised_bytes"] <= row["plain_bytes"]


def test_the_committed_reports_are_what_the_results_say(tmp_path: Path) -> None:
    for name in (report.FRONTIERS_FILE, report.MEASURED_FILE):
        shutil.copy(run.RESULTS / name, tmp_path)
    report.write_report(tmp_path)
    assert (tmp_path / "report.md").read_text() == (run.RESULTS / "report.md").read_text()
    text = report.README.read_text()
    made = report.blocks(run.RESULTS) | {"compiled": lambda: compiled_report.compiled_block(run.RESULTS)}
    assert filled(text, made) == text
    summary = compiled_report.compiled_summary(
        compiled_report.read_compiled_rows(run.RESULTS / compiled_report.ROWS_FILE)
    )
    assert (run.RESULTS / "compiled.md").read_text() == f"# Compiled steps as they ran\n\n{summary}\n"


def test_every_committed_schedule_took_the_simulated_bytes_and_left_the_same_gradients() -> None:
    rows = report.read_rows(run.RESULTS / report.MEASURED_FILE)
    shapes = {(each.name, shape) for each in models.WORKLOADS for shape in ("small", "wide") if getattr(each, shape)}
    for method in ("planned", baselines.BUDGET):
        assert {(row["model"], row["shape"]) for row in rows if row["method"] == method} == shapes
    for row in rows:
        if row["method"] == "planned":
            assert row["simulated_peak_bytes"] == row["peak_bytes"], row
            assert row["same_gradients"], row
            assert row["same_buffers"], row
    with (bptt.RESULTS / bptt.FILE).open(newline="") as file:
        found = list(csv.DictReader(file))
    assert all(row["gradients_identical"] == "True" for row in found)
    assert all(row["measured_bytes"] == row["promised_bytes"] for row in found)
    headline = next(row for row in found if row["strategy"] == "ism" and row["slots"] == "50")
    assert (headline["steps"], headline["forward_steps"]) == ("1000", "1950")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HarnessError, match="no model 'bert'; choose among resnet-50"):
        results_by_model.chosen(models.WORKLOADS, ["bert"])
    for main in (run.main, compiled.main):
        for arguments in (["--models", "bert"], ["--quick", "--output", str(tmp_path)]):
            assert main(arguments) == 2
            assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / report.FRONTIERS_FILE).write_text("a,b\n1,2\n")
    assert report.main([str(tmp_path)]) == 2
    assert "make it anew" in capsys.readouterr().err
