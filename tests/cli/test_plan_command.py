"""`rmm-linear plan`: the plan is the library's, and a mistake is one line."""

import json
import re

import pytest
import torch

from rmm_linear.checkpointing import Schedule, capture, simulate
from rmm_linear.cli import main

hf_models = pytest.importorskip("rmm_linear.integrations.hf_models")


@pytest.fixture
def folder(gpt2_folder):
    return str(gpt2_folder)


@pytest.fixture
def captured_once(monkeypatch):
    """One capture for all calls of a test, whose model and batch have one graph."""
    found = []

    def once(*arguments, **keywords):
        if not found:
            found.append(capture(*arguments, **keywords))
        return found[0]

    monkeypatch.setattr("rmm_linear.cli.plan.capture", once)


OPTIONS = ("--batch", "4", "--seq", "48", "--strategy", "chen2016_sqrt")


def run(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_json_is_the_plan_of_the_real_model(folder, capsys):
    found = json.loads(run(capsys, folder, *OPTIONS, "--budget", "70%", "--json"))
    model = hf_models.build_model(folder)
    model.config.use_cache = False
    ids = torch.randint(0, 50, (4, 48))
    graph = capture(model, (), {"input_ids": ids, "labels": ids}).graph
    assert simulate(graph, Schedule.plain(graph)).peak_bytes == found["plain_peak_bytes"]
    schedule = Schedule.from_dict(found["schedule"])
    assert simulate(graph, schedule).peak_bytes == found["planned_peak_bytes"] <= found["budget_bytes"]
    assert simulate(graph, schedule).overhead == pytest.approx(found["overhead"])
    peaks = [point["peak_bytes"] for point in found["frontier"]]
    assert peaks == sorted(peaks, reverse=True)


def test_text_shows_the_blocks(folder, capsys, tmp_path):
    text = run(capsys, folder, *OPTIONS, "--budget", "70%", "--figure", str(tmp_path / "plan.png"))
    for part in ("transformer.h.0", "extra compute", "least"):
        assert part in text
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.usefixtures("captured_once")
def test_a_budget_that_is_too_small_is_told_in_percent_with_one_that_is_not(folder, capsys):
    assert main(["plan", folder, *OPTIONS, "--budget", "1%"]) == 2
    error = capsys.readouterr().err
    found = re.search(
        r"within 1% = ([\d.]+) KiB; the least that was found takes ([\d.]+)% = ([\d.]+) KiB, of the ([\d.]+) (KiB|MiB)"
        r" that the captured step takes without a plan; gradients and results alone take ([\d.]+) KiB; pass --budget"
        r" ([\d.]+)%$",
        error,
    )
    assert found, error
    given, percent, least, plain, unit, results, suggested = (
        part if part.endswith("iB") else float(part) for part in found.groups()
    )
    plain *= 1024 if unit == "MiB" else 1
    plan = json.loads(run(capsys, folder, *OPTIONS, "--budget", f"{suggested:g}%", "--json"))
    assert plan["planned_peak_bytes"] / 2**10 == pytest.approx(least, abs=0.006)
    assert plan["plain_peak_bytes"] / 2**10 == pytest.approx(plain, rel=0.01)
    assert 0 <= suggested - 100 * plan["planned_peak_bytes"] / plan["plain_peak_bytes"] < 0.11
    assert percent == pytest.approx(100 * least / plain, abs=0.5)
    # the gradients of all parameters, the logits and the loss
    model = hf_models.build_model(folder)
    size = sum(parameter.nbytes for parameter in model.parameters()) + 4 * 48 * 50 * 4 + 4
    assert results == pytest.approx(size / 2**10, abs=0.006)
    assert suggested == percent
    assert given < results < least
    assert main(["plan", folder, *OPTIONS, "--budget", f"{suggested - 0.2:g}%"]) == 2
