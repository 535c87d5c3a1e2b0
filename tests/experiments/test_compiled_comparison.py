"""The comparison of compiled steps: what each way runs, its peaks, tables and figure."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments import results_by_model
from experiments.checkpointing import compiled, compiled_models, compiled_report, instruments, models
from experiments.checkpointing.compiled_report import COMPILED, EXACT, INDUCTOR, SPREAD

COMMITTED = compiled.RESULTS / compiled_report.ROWS_FILE


class Chain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


TINY = models.Shape({"width": 16}, 512, 16)
CHAIN = models.Workload(
    "chain",
    Chain,
    lambda model, batch, size: (torch.randn(batch, size),),
    _loss,
    TINY,
    TINY,
    blocks={"each block": r"blocks\.\d+"},
)
CASE = compiled_models.Case("chain", CHAIN, TINY, TINY, blocks=4)
EXTENT = compiled_models.Extent((0.5,), rivals=None, spread=3, rounds=2, backend="aot_eager", executors=(EXACT,))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return compiled.compare(CASE, EXTENT)


def test_every_way_runs_what_it_says(rows: list[dict[str, Any]]) -> None:
    by_way = {(row["method"], row["setting"]): row for row in rows}
    assert {method for method, _ in by_way} == {"eager", COMPILED, EXACT}
    eager, checkpointed = by_way["eager", ""], by_way["eager", "torch checkpoint"]
    assert checkpointed["peak_bytes"] < eager["peak_bytes"]
    assert checkpointed["note"] == "4 blocks"
    assert by_way[COMPILED, "torch checkpoint"]["peak_bytes"] < by_way[COMPILED, ""]["peak_bytes"]
    plans = [row for row in rows if row["method"] == EXACT and row["peak_bytes"] is not None]
    assert len([row for row in rows if row["setting"].startswith(SPREAD)]) == 3
    for row in plans:
        assert row["simulated_peak_bytes"] == row["tensors_peak_bytes"] == row["peak_bytes"] <= row["budget_bytes"]
        assert row["same_gradients"]
        assert row["step_s_q20"] <= row["step_s"] <= row["step_s_q80"]
    for row in rows:
        assert (row["note"] or "").startswith("no plan") or row["peak_bytes"] is not None


def test_results_make_tables_and_a_figure(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / compiled_report.ROWS_FILE
    # the tables are about plans that Inductor compiled
    others = [row | {"method": INDUCTOR} for row in rows if row["method"] == EXACT]
    results_by_model.write_rows(path, [*rows, *others], old=[], names=["chain"])
    read = compiled_report.read_compiled_rows(path)
    assert [row["peak_bytes"] for row in read] == [row["peak_bytes"] for row in (*rows, *others)]
    text = compiled_report.write_compiled_report(tmp_path)
    assert "in 3 of 3 budgets that lie evenly" in text
    assert "it grows with the budget on 1 of 1 models" in text
    assert "| chain, 512 x 16 |" in compiled_report.compiled_block(tmp_path)
    assert "## chain" in (tmp_path / "compiled.md").read_text()
    assert (tmp_path / "compiled.png").stat().st_size > 0


def test_a_budget_that_was_missed_is_told() -> None:
    row = {"model": "m", "method": INDUCTOR, "budget_bytes": 10, "same_gradients": False}
    missed = [row | {"setting": f"{SPREAD} 1", "peak_bytes": 11}]
    missed.append(row | {"setting": f"{SPREAD} 2", "peak_bytes": 12, "budget_bytes": 9})
    text = compiled_report.claims(missed)
    assert "in 0 of 2 budgets" in text
    assert "on 0 of 1 models" in text


def test_what_a_kernel_holds_for_itself_is_counted_apart() -> None:
    images, convolution = torch.randn(2, 8, 32, 32), nn.Conv2d(8, 8, 3, bias=False)
    everything, tensors = instruments.allocator_peaks(lambda: convolution(images))
    assert everything >= tensors == 4 * 2 * 8 * 30 * 30


def test_steps_are_timed_by_turns() -> None:
    order: list[str] = []
    times = instruments.interleaved([(name, lambda name=name: order.append(name)) for name in "abc"], 3)
    assert "".join(order) == "abccbaabc"
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_sizes_that_are_measured_have_no_dropout() -> None:
    for case in compiled_models.CASES:
        with torch.device("meta"):
            model = case.workload.build(**case.shape.options)
        assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))
        pattern = next(iter(case.workload.blocks.values()), None)
        with compiled.checkpointed_blocks(model, pattern) as count:
            assert count == (case.blocks or model.config.num_hidden_layers)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--models", "bert"], ["--quick", "--output", str(tmp_path)], ["--output", str(tmp_path / "no")]):
        assert compiled.main(arguments) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.skipif(not COMMITTED.exists(), reason="no results are committed")
def test_the_committed_tables_are_what_the_results_say() -> None:
    text = compiled_report.compiled_summary(compiled_report.read_compiled_rows(COMMITTED))
    assert (COMMITTED.parent / "compiled.md").read_text() == f"# Compiled steps as they ran\n\n{text}\n"
