"""The monitor's cost: pairs of steps, their quantiles by window, and where they were measured."""

import json
from pathlib import Path

import pytest

from experiments.glue import monitor_cost


def test_windows_are_summed_before_they_are_compared() -> None:
    # 10 % in one pair, nothing in the other; then 20 % in both
    pairs = [(1.0, 1.1), (3.0, 3.0), (1.0, 1.2), (2.0, 2.4)]
    found = monitor_cost.summarised(pairs, 2)
    assert found["overhead_percent_by_window"] == pytest.approx([2.5, 20.0])
    assert found["overhead_percent_of_all"] == pytest.approx(10.0)
    assert found["step_ms_without"] == pytest.approx(1500)


@pytest.mark.usefixtures("tiny_demo")
def test_the_result_says_what_was_measured_and_where(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    arguments = ["--model", "demo", "--output", str(path), "--batch-size", "8", "--every", "2", "--windows", "2"]
    assert monitor_cost.main(arguments) == 0
    result = json.loads(path.read_text())
    assert (result["pairs"], result["every"], result["null"]) == (4, 2, False)
    assert result["records"] > 0
    assert len(result["wall"]["overhead_percent_by_window"]) == 2
    assert result["hardware"]["cpu"]
    assert "commit" in result
    assert monitor_cost.main([*arguments, "--null"]) == 0
    assert json.loads(path.read_text())["records"] == 0
