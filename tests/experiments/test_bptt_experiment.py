"""The experiment's rows say what they claim to; and its committed results keep the promises."""

import csv

import pytest

from experiments.checkpointing.bptt import FILE, RESULTS, rows


def test_measured_bytes_are_the_promised_ones_and_gradients_identical():
    configurations = [{"strategy": "ism", "slots": 4}, {"strategy": "msm", "memory": 0.3}]
    found = list(rows(steps=24, batch=2, features=4, hidden=8, repeats=1, configurations=configurations))
    assert [row["strategy"] for row in found] == ["ism", "msm"]
    for row in found:
        assert row["gradients_identical"]
        assert row["measured_bytes"] == row["promised_bytes"] <= row["plain_bytes"]
    assert found[1]["promised_bytes"] <= 0.3 * found[1]["plain_bytes"]
    assert found[0]["counted_time_ratio"] == pytest.approx((48 + found[0]["forward_steps"]) / 72, abs=1e-4)


def test_committed_results_hold_what_is_published():
    with (RESULTS / FILE).open(newline="") as file:
        found = list(csv.DictReader(file))
    headline = next(row for row in found if row["strategy"] == "ism" and row["slots"] == "50")
    assert headline["steps"] == "1000"
    assert headline["forward_steps"] == "1950"
    assert float(headline["counted_time_ratio"]) < 1.32
    at_a_twentieth = next(row for row in found if row["strategy"] == "msm" and row["memory"] == "0.05")
    # within 5 % of the bytes, not of the places
    assert float(at_a_twentieth["of_plain"]) <= 0.05
    assert float(at_a_twentieth["counted_time_ratio"]) < 1.325
    for row in found:
        assert row["gradients_identical"] == "True"
        assert row["measured_bytes"] == row["promised_bytes"]
        assert not row["commit"].endswith("+")
