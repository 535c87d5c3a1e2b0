"""Tables of the comparisons of memory and checkpointing: they say what the committed results say."""

import shutil

import pytest
import torch
import torch.nn.functional as F

for package in ("transformers", "datasets", "matplotlib"):
    pytest.importorskip(package)

from experiments.blocks import filled
from experiments.checkpointing import instruments, report
from experiments.memory import report as memory_report
from experiments.rows import read_rows


def test_attention_of_a_cpu_counts_as_that_of_a_gpu():
    query, key = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)
    # two products forward, five backward
    flops = instruments.flops_of(lambda: F.scaled_dot_product_attention(query, key, key).sum().backward())
    assert flops == 7 * 2 * (2 * 4 * 16 * 24 * 8)


def test_the_committed_readme_is_what_the_results_say():
    text = report.README.read_text()
    assert filled(text, report.blocks(report.RESULTS)) == text


def test_every_committed_plan_that_ran_exactly_left_the_same_gradients_to_rounding():
    rows = [row for row in read_rows(report.RESULTS / "compiled.csv") if row["method"] == report.EXACT]
    assert len({row["model"] for row in rows}) == 6
    assert all(row["same_gradients"] or row["error"] < 1e-5 for row in rows if row["peak_bytes"] is not None)


def test_every_committed_prediction_is_what_was_measured(tmp_path):
    shutil.copy(memory_report.RESULTS / memory_report.FILE, tmp_path)
    assert memory_report.write_report(tmp_path).startswith("| of exact | roberta-base |")
    assert (tmp_path / "figure.png").stat().st_size > 0
    predicted = [row for row in read_rows(tmp_path / memory_report.FILE) if row["predicted_bytes"] is not None]
    assert len({row["model"] for row in predicted}) == 7
    assert [row["predicted_bytes"] for row in predicted] == [row["kept_bytes"] for row in predicted]
