"""Tables of the comparisons of memory and checkpointing: they say what the committed results say."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

for package in ("transformers", "datasets", "matplotlib"):
    pytest.importorskip(package)

from experiments.blocks import filled
from experiments.checkpointing import instruments, plans, report
from experiments.command_line import HarnessError
from experiments.memory import report as memory_report
from experiments.rows import read_rows, write_rows


def test_attention_of_a_cpu_counts_as_that_of_a_gpu() -> None:
    query, key = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)
    # two products forward, five backward
    flops = instruments.flops_of(lambda: F.scaled_dot_product_attention(query, key, key).sum().backward())
    assert flops == 7 * 2 * (2 * 4 * 16 * 24 * 8)


def test_a_gpus_table_tells_the_time_in_kernels_and_what_has_no_plan(tmp_path: Path) -> None:
    config = json.dumps({"num_hidden_layers": 2, "hidden_size": 64})
    eager = {"model": "roberta", "method": "eager", "batch": 8, "size": 64, "config": config, "precision": "float32"}
    eager |= {"hardware": "a GPU", "torch": "2.11", "saved_bytes": 100, "peak_bytes": 120, "activation_peak_bytes": 90}
    eager |= {"step_s": 2.0, "eager_step_s": 2.0, "kernels_s": 1.0, "error": 0.0, "mean_error": 0.0, "draws": 1}
    eager |= {"eager_kernels_s": 1.0}
    planned = eager | {"method": "budget 60%", "step_s": 3.0, "kernels_s": 0.9, "activation_peak_bytes": 45}
    nothing = dict.fromkeys(("peak_bytes", "activation_peak_bytes", "saved_bytes", "step_s", "kernels_s"))
    write_rows(tmp_path / "codes-cuda.csv", [eager, planned, eager | nothing | {"method": "budget 9%"}])
    assert "| budget 9% | no plan |  |  |  |  |" in report.codes_table(tmp_path)
    other = [row | {"hardware": "another GPU", "kernels_s": 0.5, "eager_kernels_s": 0.5} for row in (eager, planned)]
    for rows, line in (
        ([eager, planned], "1.50 | 0.90"),
        # step times of processes whose eager steps differ say nothing
        ([eager, planned | {"eager_step_s": 2.5}], "- | 0.90"),
        # another process ran this way, and the kernels of its eager step took longer
        ([eager, planned | {"eager_kernels_s": 2.0}], "1.50 | 0.45"),
        # rows of two GPUs stand in two tables
        ([eager, planned, *other], "1.50 | 1.00"),
    ):
        write_rows(tmp_path / "codes-cuda.csv", rows)
        assert f"| budget 60% | {line} | 100 % | 50 % |" in report.codes_table(tmp_path)


def test_plans_that_ran_are_a_line_a_strategy_and_their_peaks_are_counted(tmp_path: Path) -> None:
    row = {"model": "net", "ops": 7, "plain_peak_bytes": 100, "strategy": "chen", "budget_percent": 80}
    row |= {"planning_s": 0.5, "extra_cost": 0.1, "simulated_peak_bytes": 70, "peak_bytes": 70}
    row |= {"same_gradients": True, "proof": "its program has no plan of less cost"}
    other = row | {"budget_percent": 60, "extra_cost": 0.3, "peak_bytes": 63, "proof": None}
    refused = row | dict.fromkeys(row.keys() - {"model", "strategy", "budget_percent", "planning_s"})
    rows = [row, other, refused | {"budget_percent": 40}, refused | {"strategy": "olla"}]
    write_rows(tmp_path / "planners.csv", rows)
    block = report.planners_block(tmp_path)
    assert "| net | chen | +10.0 %, 0.5 s | +30.0 %, 0.5 s | - | its program has no plan of less cost |" in block
    assert "| net | olla | - | - | - |  |" in block
    assert "is the simulated one to the byte in 1 of 2 plans" in block


def test_the_committed_readme_is_what_the_results_say() -> None:
    text = report.README.read_text()
    assert filled(text, report.blocks(report.RESULTS)) == text


@pytest.mark.parametrize(
    ("wrong", "message"), [({"watts": None}, "watts=None; write a number above 0"), ({}, "has no column page_watts")]
)
def test_a_device_profile_with_missing_fields_is_refused(tmp_path: Path, wrong: dict[str, None], message: str) -> None:
    devices = plans.read_devices()
    if not wrong:
        del devices[0]["page_watts"]
    write_rows(tmp_path / "devices.csv", [devices[0] | wrong])
    with pytest.raises(HarnessError, match=message):
        plans.read_devices(tmp_path / "devices.csv")


def test_every_committed_plan_that_ran_exactly_left_the_same_gradients_to_rounding() -> None:
    rows = [row for row in read_rows(report.RESULTS / "compiled.csv") if row["method"] == report.EXACT]
    assert len({row["model"] for row in rows}) == 5
    assert all(row["same_gradients"] or row["error"] < 1e-5 for row in rows if row["peak_bytes"] is not None)


def test_every_committed_prediction_is_what_was_measured(tmp_path: Path) -> None:
    shutil.copy(memory_report.RESULTS / memory_report.FILE, tmp_path)
    assert memory_report.write_report(tmp_path).startswith("| of exact | roberta-base |")
    assert (tmp_path / "figure.png").stat().st_size > 0
    predicted = [
        row for row in read_rows(memory_report.RESULTS / memory_report.FILE) if row["predicted_bytes"] is not None
    ]
    assert len({row["model"] for row in predicted}) == 7
    assert [row["predicted_bytes"] for row in predicted] == [row["kept_bytes"] for row in predicted]
