"""The comparison of checkpointing: models of published sizes, instruments that see what is there, tables."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from experiments import results_by_model
from experiments.blocks import filled
from experiments.checkpointing import baselines, instruments, models, report, run
from experiments.checkpointing.compiled_report import compiled_block
from experiments.glue.errors import HarnessError
from rmm_linear.checkpointing import Schedule, capture, simulate
from rmm_linear.planning.strategies.base import Strategy

COMMITTED = (run.RESULTS / report.MEASURED_FILE).exists()
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


def test_shapes_are_the_published_ones() -> None:
    with torch.device("meta"):
        assert models.UNet()(torch.empty(1, 1, 572, 572)).shape == (1, 2, 388, 388)
        images = torch.empty(2, 3, 224, 224)
        assert models.ResNet((3, 4, 6, 3)).stages(torch.empty(2, 64, 56, 56)).shape == (2, 2048, 7, 7)
        assert models.VGG19().stages(images).shape == (2, 512, 7, 7)
        network = models.DenseNet161()
        assert network.stages(network.stem(images)).shape == (2, 2208, 7, 7)
        outputs = models.GoogLeNet()(images)
        assert [output.shape for output in outputs] == [(2, 1000)] * 3
        assert len(models.GoogLeNet(auxiliary=False)(images)) == 1


def test_an_lstm_in_a_loop_is_torchs() -> None:
    loop, lstm = models.LSTMLoop(3, 5), nn.LSTM(3, 5)
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(loop.inputs.weight)
        lstm.bias_ih_l0.copy_(loop.inputs.bias)
        lstm.weight_hh_l0.copy_(loop.state.weight)
        lstm.bias_hh_l0.zero_()
        x = torch.randn(7, 2, 3)
        assert torch.allclose(loop(x), loop.head(lstm(x)[0][-1]), atol=1e-6)


def test_storages_are_counted_from_the_op_that_makes_them_until_they_are_gone() -> None:
    outside = torch.zeros(100)
    with instruments.StorageLifetimes([outside]) as lifetimes:
        a = torch.zeros(10)
        view = a[2:]
        outside.add_(1)
        assert lifetimes.bytes == 40
        del a
        assert lifetimes.bytes == 40
        b = view + 1
        assert lifetimes.bytes == 40 + 32
        del view
        assert lifetimes.bytes == 32
        del b
        assert lifetimes.bytes == 0
    assert lifetimes.peak_bytes == 72


def test_the_allocator_sees_what_lives_together() -> None:
    def step() -> None:
        a = torch.zeros(2**18)
        b = a + 1
        del a
        c = b + 1
        del b, c

    assert 2**21 <= instruments.allocator_peak(step) < 2**21 + 2**12


def test_flops_are_those_that_torch_counts() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)), torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert instruments.peak_and_flops(lambda: model(x).sum().backward(), [])[1] == counter.get_total_flops() > 0


def test_attention_of_a_cpu_counts_as_that_of_a_gpu() -> None:
    query, key = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, 4, 24, 8, requires_grad=True)

    def step() -> None:
        F.scaled_dot_product_attention(query, key, key).sum().backward()

    # two products forward, five backward
    assert instruments.peak_and_flops(step, [])[1] == 7 * 2 * (2 * 4 * 16 * 24 * 8)


def test_flops_of_a_graph_are_those_that_are_measured() -> None:
    model, batch = TINY.at(TINY.small)
    captured = capture(model, batch, step=TINY.step)
    _, flops = instruments.peak_and_flops(lambda: TINY.step(model, *batch).backward(), [])
    assert sum(run.op_flops(captured)) == flops


def test_gradients_that_go_at_once_leave_a_smaller_peak() -> None:
    model, batch = TINY.at(TINY.small)
    graph = capture(model, batch, step=TINY.step).graph
    freed = graph.with_gradients_freed()
    assert len(freed.outputs) == 1
    kept = simulate(graph, Schedule.plain(graph)).bytes_at_step[-1]
    assert kept == 4 + sum(4 * parameter.numel() for parameter in model.parameters())
    assert simulate(freed, Schedule.plain(freed)).bytes_at_step[-1] == 4


@pytest.mark.parametrize("pattern", [r"stages\.\d+", pytest.param(r"stages\.\d+\.\d+", marks=pytest.mark.grid)])
def test_checkpointed_blocks_keep_less_and_leave_the_model_as_it_was(pattern: str) -> None:
    measuring = run.Measuring(TINY, TINY.small, repeats=0)
    plain = measuring.row("eager", "", measuring.plain)
    with baselines.checkpointed_blocks(measuring.model, pattern) as count:
        row = measuring.row("blocks", "", measuring.plain)
    assert count == 2
    assert row["peak_bytes"] < plain["peak_bytes"]
    assert 0.1 < row["extra_flops"] < 1 / 3
    assert row["same_gradients"]
    # batch norms update their statistics a second time
    assert not row["same_buffers"]
    after = measuring.row("eager", "", measuring.plain)
    assert (after["peak_bytes"], after["flops"]) == (plain["peak_bytes"], plain["flops"])


@pytest.mark.slow
def test_checkpointed_blocks_are_timed_against_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = run.Measuring(TINY, TINY.small, repeats=1)
    flops = {}

    def time_ratios(step: Any, reference: Any, repeats: int) -> list[float]:
        flops["step"], flops["reference"] = (instruments.peak_and_flops(each, [])[1] for each in (step, reference))
        return [1.0] * repeats

    monkeypatch.setattr(run, "time_ratios", time_ratios)
    plain = measuring.row("eager", "", measuring.plain)
    with baselines.checkpointed_blocks(measuring.model, r"stages\.\d+"):
        row = measuring.row("blocks", "", measuring.plain)
    assert flops["step"] == row["flops"] > plain["flops"]
    assert flops["reference"] == plain["flops"]


def test_a_measurement_tells_wrong_gradients() -> None:
    measuring = run.Measuring(TINY, TINY.small, repeats=0)
    assert measuring.row("eager", "", measuring.plain)["same_gradients"]
    row = measuring.row("wrong", "", lambda: 1.5 * measuring.plain())
    assert not row["same_gradients"]
    assert row["gradient_difference"] == 0.5


@pytest.fixture(scope="module")
def tiny_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # a few: every strategy has tests of its own
    names = [name for name in run.available_strategies() if name != "auto"][:3] or ["auto"]
    return run.run_workload(TINY, names=names, repeats=1, budgets=(0.3,))


@pytest.mark.slow
def test_a_tiny_comparison_runs_from_end_to_end(tiny_rows: Any, tmp_path: Path) -> None:
    simulated, measured = tiny_rows
    assert {row["method"] for row in measured} == {"eager", "torch checkpoint", "torch budget", "planned"}
    planned = [row for row in measured if row["method"] == "planned"]
    for row in planned:
        assert row["simulated_peak_bytes"] == row["peak_bytes"]
        assert row["same_gradients"]
        assert row["same_buffers"]
    # published widths are not timed
    assert {row["shape"] for row in measured} == {"small", "wide"}
    assert all((row["time_ratio"] is None) == (row["allocator_peak_bytes"] is None) for row in measured)
    assert all(row["time_ratio"] is None for row in measured if row["shape"] == "wide")
    assert any(row["time_ratio"] is not None for row in measured)
    eager = measured[0]
    assert eager["peak_bytes"] == pytest.approx(planned[0]["peak_bytes"], rel=0.01)
    budget = next(row for row in measured if row["method"] == "torch budget")
    # it really was the partitioner's program that ran
    assert budget["peak_bytes"] != eager["peak_bytes"]
    if simulated:
        run.write_rows(tmp_path / report.FRONTIERS_FILE, simulated)
        run.write_rows(tmp_path / report.MEASURED_FILE, measured)
        assert f"to the byte in {len(planned)}" in report.write_report(tmp_path)
        assert (tmp_path / "figure.png").stat().st_size > 0
        text = (tmp_path / "report.md").read_text()
        assert text.count("| torch budget | 0.3 | 1 graphs |") == 2
        assert "## resnet-50\n\n4 x 32" in text
        assert "## resnet-50, published widths\n\n2 x 32" in text


@pytest.mark.slow
def test_plans_are_made_anew_without_a_run(
    tiny_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated, measured = tiny_rows
    run.write_rows(tmp_path / report.FRONTIERS_FILE, simulated[:1])
    run.write_rows(tmp_path / report.MEASURED_FILE, measured)
    before = (tmp_path / report.MEASURED_FILE).read_text()
    monkeypatch.setattr(run, "WORKLOADS", (TINY,))
    monkeypatch.setattr(run, "available_strategies", lambda: ("chen2016_sqrt",))
    assert run.main(["--simulate", "--output", str(tmp_path)]) == 0
    found = report.read_rows(tmp_path / report.FRONTIERS_FILE)
    assert {row["shape"] for row in found} == {"full", "small", "wide"}
    assert {row["strategy"] for row in found} == {"chen2016_sqrt"}
    assert (tmp_path / report.MEASURED_FILE).read_text() == before
    assert "to the byte in" in capsys.readouterr().out


@pytest.mark.slow
def test_measured_flops_are_those_that_were_planned(tiny_rows: Any) -> None:
    simulated, measured = tiny_rows
    kept = [row for row in simulated if row["gradients"] == "kept"]
    for row in measured:
        if row["method"] == "planned":
            own = [each for each in kept if each["shape"] == row["shape"]]
            found = [each["extra_flops"] for each in own if each["peak_bytes"] == row["peak_bytes"]]
            assert row["extra_flops"] in found


def test_a_strategy_that_refuses_a_graph_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def frontier(self, graph: Any) -> Any:
            raise ValueError("too many ops")

    class PlainOnly(Strategy):
        name = "plain only"

        def orders(self, graph: Any) -> Any:
            return ()

    model, batch = TINY.at(TINY.small)
    graph = capture(model, batch, step=TINY.step).graph
    monkeypatch.setattr(run, "get_strategy", lambda name: Refusing() if name == "b" else PlainOnly())
    found, seconds = run.frontiers(graph, ["a", "b"])
    assert set(found) == set(seconds) == {"a"}


def _row(**changes: Any) -> dict[str, Any]:
    row = dict.fromkeys(report._NEEDED | {"simulated_peak_bytes", "method"})
    row |= {"model": "m", "batch": 2, "size": 4, "parameter_bytes": 10, "shape": "full", "gradients": "kept", "ops": 7}
    row |= {"plain_peak_bytes": 1000, "strategy": "a", "planning_s": 1.0, "extra_flops": 0.0}
    return row | changes


def test_tables_show_what_the_rows_say() -> None:
    rows = [
        _row(peak_bytes=1000, extra_cost=0.0),
        _row(peak_bytes=500, extra_cost=0.2),
        _row(peak_bytes=590, extra_cost=0.1, strategy="b"),
        _row(peak_bytes=300, extra_cost=0.9, strategy="b"),
        _row(peak_bytes=1, extra_cost=0.0, gradients="freed"),
    ]
    line = report.planned_table(rows).splitlines()[-1]
    expected = ("+10.0 %", "+10.0 %", "+90.0 %", "-", "50.0 % for +20.0 %", "30.0 % for +90.0 %")
    assert line.endswith(f"| {' | '.join(expected)} |")
    assert report.strategies_table(rows).splitlines()[2] == "| m | 50.0 % for +20.0 % | 59.0 % for +10.0 % |"
    measured = [
        _row(method="planned", simulated_peak_bytes=simulated, peak_bytes=5, same_gradients=True, same_buffers=same)
        | {"shape": shape}
        for simulated, same, shape in ((5, True, "small"), (6, True, "small"), (5, False, "wide"))
    ]
    text = report.exactness(measured)
    assert text.startswith("3 schedules of 1 strategies ran, on 1 models (1 of them at published widths too)")
    assert "to the byte in 2" in text
    assert text.endswith("bit for bit in 2.")


def test_results_are_replaced_model_by_model(tmp_path: Path) -> None:
    path = tmp_path / report.FRONTIERS_FILE
    rows = [_row(model=name, peak_bytes=1, extra_cost=0.5, commit="c") for name in ("u-net", "resnet-50")]
    run.write_rows(path, rows)
    run.write_rows(path, [rows[0] | {"peak_bytes": 2}])
    found = report.read_rows(path)
    assert [(row["model"], row["peak_bytes"]) for row in found] == [("resnet-50", 1), ("u-net", 2)]


@pytest.mark.skipif(not COMMITTED, reason="no results are committed")
def test_the_committed_reports_are_what_the_results_say(tmp_path: Path) -> None:
    for name in (report.FRONTIERS_FILE, report.MEASURED_FILE):
        shutil.copy(run.RESULTS / name, tmp_path)
    report.write_report(tmp_path)
    assert (tmp_path / "report.md").read_text() == (run.RESULTS / "report.md").read_text()
    text = report.README.read_text()
    made = report.blocks(run.RESULTS) | {"compiled": lambda: compiled_block(run.RESULTS)}
    assert filled(text, made) == text


@pytest.mark.skipif(not COMMITTED, reason="no results are committed")
def test_every_model_was_compared_with_all_of_its_budgets() -> None:
    rows = [row for row in report.read_rows(run.RESULTS / report.MEASURED_FILE) if row["method"] == baselines.BUDGET]
    found = {(row["model"], row["shape"], row["setting"]) for row in rows}
    shapes = [(each, shape) for each in models.WORKLOADS for shape in ("small", "wide") if getattr(each, shape)]
    assert found == {(each.name, shape, f"{budget:g}") for each, shape in shapes for budget in each.budgets}


@pytest.mark.skipif(not COMMITTED, reason="no results are committed")
def test_every_committed_schedule_took_what_was_simulated() -> None:
    planned = [row for row in report.read_rows(run.RESULTS / report.MEASURED_FILE) if row["method"] == "planned"]
    assert {row["model"] for row in planned if row["shape"] == "small"} == {each.name for each in models.WORKLOADS}
    wide = {each.name for each in models.WORKLOADS if each.wide is not None}
    assert {row["model"] for row in planned if row["shape"] == "wide"} == wide
    for row in planned:
        assert row["simulated_peak_bytes"] == row["peak_bytes"], row
        assert row["same_gradients"], row
        assert row["same_buffers"], row


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HarnessError, match="no model 'bert'; choose among resnet-50"):
        results_by_model.chosen(models.WORKLOADS, ["bert"])
    quick = (["--quick", "--output", str(tmp_path)], ["--quick", "--simulate"])
    for arguments in (["--models", "bert"], *quick, ["--output", str(tmp_path / "no")]):
        assert run.main(arguments) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert report.main([str(tmp_path)]) == 2
    assert "python -m experiments.checkpointing.run makes it" in capsys.readouterr().err
    (tmp_path / report.FRONTIERS_FILE).write_text("a,b\n1,2\n")
    assert report.main([str(tmp_path)]) == 2
    assert "make it anew" in capsys.readouterr().err
