"""The small language model: rows, table and figure of its runs; and estimators of other projects beside ours."""

import json
from pathlib import Path

import pytest
import torch

for package in ("transformers", "datasets", "matplotlib"):
    pytest.importorskip(package)

from experiments import language_model, peers


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"STEPS": 20, "SEQUENCES": 4, "LENGTH": 32, "_WARM_UP": 2, "_EVERY": 10, "_VALIDATED": 2}
    for name, size in {**sizes, "_NOISE_BATCHES": 4}.items():
        monkeypatch.setattr(language_model, name, size)


@pytest.mark.slow
def test_runs_become_rows_once_and_the_table_has_differences_of_the_same_seeds(
    short_runs: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--methods", "exact", "hadamard at 0.1", "--seeds", "2", "--results", str(tmp_path)]
    assert language_model.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / language_model.ROWS).read_text().splitlines()]
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("exact", 0),
        ("hadamard at 0.1", 0),
        ("exact", 1),
        ("hadamard at 0.1", 1),
    ]
    by_key = {(row["method"], row["seed"]): row for row in rows}
    exact, sketched = by_key["exact", 0], by_key["hadamard at 0.1", 0]
    assert all(len(row["losses"]) == 1 and [step for step, _ in row["validation"]] == [10, 20] for row in rows)
    assert {noise["ratio"] for noise in exact["noise"]} == {0.0}
    assert all(noise["ratio"] > 0 for noise in sketched["noise"])
    assert sketched["kept_bytes"] < exact["kept_bytes"]
    assert 0 < abs(sketched["losses"][0] - exact["losses"][0]) < 0.1

    capsys.readouterr()
    assert language_model.main([*command, "--report"]) == 0
    differences = [
        by_key["hadamard at 0.1", seed]["validation"][-1][1] - by_key["exact", seed]["validation"][-1][1]
        for seed in (0, 1)
    ]
    assert f"{sum(differences) / 2:+.4f}" in capsys.readouterr().out
    assert (tmp_path / language_model.FIGURE).read_bytes().startswith(b"\x89PNG")

    rows[-1]["text_sha256"] = "another"
    (tmp_path / language_model.ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert language_model.main([*command, "--report"]) != 0
    assert "different texts" in capsys.readouterr().err


@pytest.mark.slow
def test_our_estimators_have_a_slope_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_DRAWS", 400)
    torch.manual_seed(0)
    x, g = torch.randn(16, 32, 32), torch.randn(16, 32, 24)
    for name, layer in peers.ours():
        found = peers.measure(layer, x, g)
        assert abs(found["slope"] - 1) < 4 * found["slope_error"], name
        assert 0 < found["kept"] < 0.7, name
        assert found["squared_error"] > 0, name


def test_an_estimator_that_fails_has_its_error_as_its_row() -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such matrix\nand more")

    assert peers.measure(layer, torch.randn(2, 3, 4), torch.randn(2, 3, 5)) == {"error": "RuntimeError: no such matrix"}
