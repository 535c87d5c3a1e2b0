"""Budgets are read as users write them, and answered in the same unit."""

import re

import numpy as np
import pytest
import torch
from planned_models import mean_square
from torch import nn

from rmm_linear.byte_sizes import readable, unit_for
from rmm_linear.checkpointing import checkpoint_model, checkpoint_step
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.budget import Budget

PLAIN = 1_000_003


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (7, 7),
        ("60%", 600_001),
        ("33.3 %", 333_000),
        (0.6, 600_001),
        (1.0, PLAIN),
        ("2 kB", 2000),
        ("1.5KiB", 1536),
        ("3TB", 3 * 10**12),
        ("2 TiB", 2 * 2**40),
        (1e-12, 1),
        (np.int64(10**9), 10**9),
        (np.float32(0.5), 500_001),
        (np.float64(0.6), 600_001),
        (np.float32(1), PLAIN),
    ],
)
def test_a_budget_is_read(budget, size_bytes):
    assert Budget.of(budget).in_bytes(PLAIN) == size_bytes


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, float("nan"), float("inf"), True, None, "", "1.2.3", "0%", "3PB"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(ValueError, match=re.escape(f"budget={budget!r} is no budget")):
        Budget.of(budget)


@pytest.mark.parametrize(
    ("budget", "hint"), [(60, '"60%"'), (np.int64(80), '"80%"'), ("90", '"90%"'), (512, '"512MB"')]
)
def test_a_budget_of_a_few_bytes_is_refused_with_a_hint(budget, hint):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    with pytest.raises(InfeasibleBudgetError, match=f"did you mean {hint}"):
        checkpoint_model(model, torch.zeros(64, 16), budget=budget, strategy="chen2016_sqrt")


@pytest.mark.parametrize("written", [1000, "1000", "1%", 0.01, "1kB", "0.001MiB", "0.000001GiB"])
@pytest.mark.parametrize("size_bytes", [1, 999, 20_388, 123_457, 999_999, 1_000_003, 10**9 + 1])
def test_the_least_budget_of_the_same_unit_holds_and_is_close(written, size_bytes):
    budget = Budget.of(written)
    least = budget.that_holds(size_bytes, PLAIN)
    assert least.unit == budget.unit
    assert least.in_bytes(PLAIN) >= size_bytes
    # a tenth of a percent of the whole, or one in the third digit
    assert least.in_bytes(PLAIN) - size_bytes <= max(1.1 * PLAIN / 1000, 0.011 * size_bytes)
    if not isinstance(written, float):
        assert Budget.of(str(least).replace(" bytes", "")).in_bytes(PLAIN) >= size_bytes


def test_sizes_are_shown_in_a_unit_that_keeps_numbers_short():
    assert [readable(size) for size in (0, 1023, 1024, 2**20, 9999 * 2**20, 10_000 * 2**20, 20 * 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB",
        "1.00 MiB",
        "9999.00 MiB",
        "9.77 GiB",
        "20.00 TiB",
    ]
    assert [unit_for(size).name for size in (0, 2**20, 2**33, 2**40, 2**44)] == ["KiB", "MiB", "MiB", "GiB", "TiB"]


_DOORS = {
    "checkpoint_model": checkpoint_model,
    "checkpoint_step": lambda model, x, **options: checkpoint_step(model, mean_square, x, **options),
}


@pytest.mark.parametrize(
    ("door", "budget", "pattern"),
    [
        *(
            (
                door,
                "20%",
                r"within 20% = ([\d.]+ KiB); the least that was found takes ([\d.]+)% = ([\d.]+ KiB), of the [\d.]+ ",
            )
            for door in _DOORS
        ),
        ("checkpoint_model", 0.2, r"within 0.2 = ([\d.]+ KiB); the least that was found takes (0\.\d+) = ([\d.]+ KiB)"),
        ("checkpoint_model", "0.00001GiB", r"within 0.00001 GiB; the least that was found takes (0.00\d+) GiB"),
        ("checkpoint_model", 1000, r"within 1000 bytes; the least that was found takes (\d+) bytes"),
    ],
)
def test_a_refusal_is_in_the_users_unit_and_what_it_names_can_be_met(door, budget, pattern):
    door, model, x = _DOORS[door], nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]), torch.randn(256, 32)
    with pytest.raises(InfeasibleBudgetError, match=pattern) as caught:
        door(model, x, budget=budget, strategy="chen2016_sqrt")
    found = re.search(pattern, str(caught.value))
    named = found[1] if "GiB" in pattern or "bytes" in pattern else found[2]
    kind = {"20%": f"{named}%", "0.00001GiB": f"{named}GiB"}
    again = kind.get(budget) or (float(named) if isinstance(budget, float) else int(named))
    door(model, x, budget=again, strategy="chen2016_sqrt")
