"""The comparisons of checkpointing: published sizes, exact instruments, and a report that the results make."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.blocks import filled
from experiments.checkpointing import instruments, models, plans, report, steps
from experiments.checkpointing.models import Shape, Workload
from experiments.rows import read_rows, write_rows
from rmm_linear import RMMConfig

PARAMETERS = {
    "resnet-50": 25_557_032,
    "resnet-152": 60_192_808,
    "vgg-19": 143_667_240,
    "densenet-161": 28_681_000,
    "googlenet": 13_004_888,
    "u-net": 31_030_658,
}


@pytest.mark.parametrize("workload", models.of_shape("published")[:6], ids=lambda workload: workload.name)
def test_models_have_the_published_number_of_parameters(workload: Workload) -> None:
    with torch.device("meta"):
        model = workload.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[workload.name]


def test_attention_of_a_cpu_counts_as_that_of_a_gpu() -> None:
    query, key = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)
    # two products forward, five backward
    flops = instruments.flops_of(lambda: F.scaled_dot_product_attention(query, key, key).sum().backward())
    assert flops == 7 * 2 * (2 * 4 * 16 * 24 * 8)


class _Chain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.Sequential(*(nn.Sequential(*layers) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def _step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


CHAIN = Workload(
    "chain",
    _Chain,
    lambda model, batch, size: {"x": torch.randn(batch, size)},
    _step,
    {"published": Shape({"width": 16}, 512, 16)},
    blocks=r"blocks\.\d+",
)


def test_wrong_gradients_and_checkpointed_blocks_are_told_from_the_plain_step() -> None:
    with steps.Comparison(CHAIN, CHAIN.shapes["published"], counts_flops=True) as comparison:
        plain = comparison.add(steps.Way("eager"))
        blocks = comparison.add(steps.Way("eager", "torch checkpoint", is_checkpointed=True))
        assert plain is not None
        assert blocks is not None
        blocks.step = lambda whole=blocks.step: whole() or [p.grad.mul_(1.5) for p in blocks.model.parameters()]
        blocks()
        assert comparison._errors(blocks, 1)["error"] == pytest.approx(0.5)
    assert (plain.row["error"], plain.row["same_gradients"]) == (0.0, True)
    assert blocks.row["peak_bytes"] < plain.row["peak_bytes"]
    assert 0.1 < blocks.row["extra_flops"] <= 1 / 3
    assert blocks.row["same_gradients"]
    assert blocks.row["note"] == "4 blocks"


@pytest.mark.slow
def test_steps_are_compared_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.MEMORY_BUDGETS, "eager", (0.5,))
    with steps.Comparison(CHAIN, CHAIN.shapes["published"], counts_flops=True) as comparison:
        steps.compare(comparison, steps.rivals("eager"), {report.EXACT: "exact"}, spread=3)
        rows = [{"model": "chain"} | row for row in comparison.rows(2)]
    planned = [row for row in rows if row["method"] == report.EXACT and row["peak_bytes"] is not None]
    assert len(planned) >= 5
    for row in planned:
        assert row["simulated_peak_bytes"] == row["tensors_peak_bytes"] == row["peak_bytes"] <= row["budget_bytes"]
        assert row["same_gradients"]
        assert row["step_s"] > 0
    write_rows(tmp_path / report.EAGER_FILE, rows)
    assert "| chain |" in report.eager_table(tmp_path)
    # the other table is about plans that Inductor compiled, beside all that torch has
    others = [row | {"method": report.INDUCTOR} for row in planned]
    plain = next(row for row in rows if row["setting"] == f"{report.BUDGET} 0.5")
    others += [plain | {"method": report.COMPILED, "setting": setting} for setting in ("", report.BLOCKS)]
    write_rows(tmp_path / report.COMPILED_FILE, [*rows, *others])
    assert "in 3 of 3 budgets that lie evenly" in report.write_report(tmp_path)
    assert (tmp_path / "compiled.png").stat().st_size > 0


@pytest.mark.slow
def test_codes_are_compared_from_end_to_end(tmp_path: Path) -> None:
    roberta = next(workload for workload in models.WORKLOADS if workload.name == "roberta")
    sizes = models._layers(64, 128, 2, 2, vocab_size=50, max_position_embeddings=66, **models._NO_DROPOUT)
    with steps.Comparison(roberta, Shape(sizes, 8, 64, is_padded=True)) as comparison:
        sketched = steps.Way("hadamard at 0.5", sketched=RMMConfig(ratio=0.5))
        ways = (steps.Way("eager"), steps.Way("8 bits", options={"bits": 8}), steps.Way("fit 60%", fitted="60%"))
        for way in (*ways, sketched):
            assert comparison.add(way) is not None
        rows = [{"model": "roberta"} | row for row in comparison.rows(2)]
    eager, coded, fitted, with_sketches = rows
    assert eager["saved_bytes"] > coded["saved_bytes"] > 0
    assert 0 < coded["mean_error"] < coded["error"] < 0.1
    assert coded["draws"] == with_sketches["draws"] == 8
    assert coded["error"] < with_sketches["error"]
    assert fitted["saved_bytes"] > 0
    write_rows(tmp_path / report.CODES_FILE, rows)
    assert "roberta, 2 layers of 64, batch 8 x 64," in report.codes_table(tmp_path)


def test_a_gpus_table_tells_the_time_in_kernels_and_what_has_no_plan(tmp_path: Path) -> None:
    config = json.dumps({"num_hidden_layers": 2, "hidden_size": 64})
    eager = {"model": "roberta", "method": "eager", "batch": 8, "size": 64, "config": config, "precision": "float32"}
    eager |= {"hardware": "a GPU", "torch": "2.11", "saved_bytes": 100, "peak_bytes": 120, "activation_peak_bytes": 90}
    eager |= {"step_s": 2.0, "eager_step_s": 2.0, "kernels_s": 1.0, "error": 0.0, "mean_error": 0.0, "draws": 1}
    eager |= {"eager_kernels_s": 1.0}
    planned = eager | {"method": "budget 60%", "step_s": 3.0, "kernels_s": 0.9, "activation_peak_bytes": 45}
    nothing = dict.fromkeys(("peak_bytes", "activation_peak_bytes", "saved_bytes", "step_s", "kernels_s"))
    write_rows(tmp_path / report.CODES_CUDA_FILE, [eager, planned, eager | nothing | {"method": "budget 9%"}])
    table = report.codes_table(tmp_path)
    assert "| way | step time | in kernels | saved for the backward pass |" in table
    assert "| budget 60% | 1.50 | 0.90 | 100 % | 50 % |" in table
    assert "| budget 9% | no plan |  |  |  |  |" in table
    # step times of processes whose eager steps differ say nothing
    write_rows(tmp_path / report.CODES_CUDA_FILE, [eager, planned | {"eager_step_s": 2.5}])
    assert "| budget 60% | - | 0.90 | 100 % | 50 % |" in report.codes_table(tmp_path)
    # another process ran this way, and the kernels of its eager step took longer
    write_rows(tmp_path / report.CODES_CUDA_FILE, [eager, planned | {"eager_kernels_s": 2.0}])
    assert "| budget 60% | 1.50 | 0.45 | 100 % | 50 % |" in report.codes_table(tmp_path)
    # rows of two GPUs stand in two tables
    other = [row | {"hardware": "another GPU", "kernels_s": 0.5, "eager_kernels_s": 0.5} for row in (eager, planned)]
    write_rows(tmp_path / report.CODES_CUDA_FILE, [eager, planned, *other])
    assert "| budget 60% | 1.50 | 1.00 | 100 % | 50 % |" in report.codes_table(tmp_path)


def test_plans_are_compared_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "available_strategies", lambda: ("auto", "chen2016_sqrt"))
    graph = plans._captured(CHAIN, CHAIN.shapes["published"])
    rows = list(plans.strategies(CHAIN, graph))
    assert {row["strategy"] for row in rows} == {"chen2016_sqrt"}
    assert all(row["peak_bytes"] <= row["plain_peak_bytes"] for row in rows)
    for row in plans.bounds(CHAIN, graph):
        if row["extra_cost"] is not None:
            assert row["bound"] <= row["extra_cost"] + 1e-4
    assert [row["policy"] for row in plans.arenas(CHAIN, graph)] == ["DTR", "Coop", "OLLA"]


def test_the_committed_readme_is_what_the_results_say() -> None:
    text = report.README.read_text()
    assert filled(text, report.blocks(report.RESULTS)) == text


def test_every_committed_plan_that_ran_exactly_left_the_same_gradients_to_rounding() -> None:
    rows = [row for row in read_rows(report.RESULTS / report.COMPILED_FILE) if row["method"] == report.EXACT]
    assert len({row["model"] for row in rows}) == 5
    assert all(row["same_gradients"] or row["error"] < 1e-5 for row in rows if row["peak_bytes"] is not None)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (steps.main, ["compiled", "--models", "bert"], "invalid choice: 'bert'"),
        (plans.main, ["bounds", "--models", "bert"], "invalid choice: 'bert'"),
        (steps.main, ["fast"], "invalid choice: 'fast'"),
    ],
)
def test_mistakes_are_one_line(main, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
