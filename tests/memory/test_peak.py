"""The measured peak of a run."""

import gc

import torch

from rmm_linear.memory.peak import measure_peak_bytes


def test_garbage_of_an_earlier_run_is_not_subtracted():
    def run():
        # the collector comes when the next run is measured
        if next(numbers) == 3:
            gc.collect()
        cycle = [torch.zeros(1 << 18)]
        cycle.append(cycle)

    numbers = iter(range(4))
    gc.collect()
    gc.disable()
    try:
        assert [measure_peak_bytes(run, torch.device("cpu")) for _ in range(2)] == [1 << 20] * 2
    finally:
        gc.enable()
