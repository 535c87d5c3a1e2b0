"""Runs of a program before the first training step, which measure its peak and its time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rmm_linear.compiler.costs import COLLECTIVES, median_ms
from rmm_linear.compiler.exact_program import Program
from rmm_linear.compiler.fake_memory import tensors_of
from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.compiler.runner import as_kernels
from rmm_linear.compiler.torch_private import is_profiled
from rmm_linear.memory.peak import measure_peak_bytes


def is_measurable(capture: Capture) -> bool:
    """Tell whether the step can run now: no profiler, which another would end, runs, and the step does not communicate.

    Other processes may not run the step now.
    """
    return not is_profiled() and not any(getattr(n.target, "namespace", "") in COLLECTIVES for n in capture.nodes)


def measured_peak_bytes(capture: Capture, program: Program, inputs: Sequence[Tensor]) -> int:
    """Run a program, forward and backward, and measure its peak; nothing of the caller's changes.

    It is the most that is in memory at any time beside the inputs and the gradients of the results.
    """
    with _step(capture, program, inputs) as run:
        return measure_peak_bytes(run, tensors_of(capture.results[0])[0].device)


def measured_ms(capture: Capture, program: Program, inputs: Sequence[Tensor]) -> float:
    """Run a program some times, forward and backward, and measure its time; nothing of the caller's changes."""
    with _step(capture, program, inputs) as run:
        return median_ms(run, list({tensor.device for tensor in inputs}))


@contextmanager
def _step(capture: Capture, program: Program, inputs: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    tangents = [None if node is None else _zeros_like(tensors_of(node)[0]) for node in capture.tangents]

    def run() -> None:
        gradients: list[Tensor | None] = [None] * len(inputs)
        # the caller keeps the results until the end
        kept, _, saved = program.forward([tensor.detach() for tensor in inputs])
        for _ in program.backward([tensor.detach() for tensor in inputs], saved, tangents, gradients):
            pass
        del kept

    devices = sorted({tensor.device.index for tensor in inputs if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices), as_kernels({tensor.device.type for tensor in inputs}):
        yield run


def _zeros_like(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
