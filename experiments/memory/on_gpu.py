"""What a CPU can't tell: the peak of the CUDA allocator, the time of a step, and the largest batch that fits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor, nn

BUDGETS_GIB = (16, 24, 80)
_STEPS = 10
_WARM_UP = 3


def step_costs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[int, float]:
    """Train for a few steps with AdamW.

    Returns:
        Most bytes allocated at once, the optimizer's state included; and the median time of a step in milliseconds.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # a rate of zero does all of the work, and leaves the weights as they are
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    times = []
    for step in range(_WARM_UP + _STEPS):
        if step == _WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated()
    optimizer.zero_grad()
    return peak, statistics.median(times[_WARM_UP:])


def largest_batch(small: tuple[int, int], large: tuple[int, int], budget_bytes: int) -> int:
    """Extrapolate the largest batch that fits: what does not grow with the batch, and what each sequence adds.

    Returns:
        Sequences, 0 if not one fits.

    Raises:
        ValueError: If the sizes or the peaks don't grow.
    """
    a_sequence = (large[1] - small[1]) / (large[0] - small[0]) if large[0] > small[0] else 0.0
    if a_sequence <= 0:
        raise ValueError(f"{small} and {large} are no (batch, peak) that grow; pass two batch sizes and their peaks")
    fixed = small[1] - a_sequence * small[0]
    return max(0, int((budget_bytes - fixed) // a_sequence))
