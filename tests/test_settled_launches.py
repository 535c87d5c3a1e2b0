"""Launches that are found by a key: never those of other tensors or options, and only while nothing has changed."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rmm_linear import ops, use_kernels
from rmm_linear.ops import dispatch
from rmm_linear_kernels.hadamard_at_once import reference as at_once
from rmm_linear_kernels.hadamard_sketch import reference as hadamard

pytestmark = pytest.mark.usefixtures("draws_of_a_gpu")

ROWS, FEATURES, OUT, BLOCKS, KEPT = 100, 8, 12, 2, 10
SEED = torch.tensor(3)
TWINS = {
    "hadamard_sketch": hadamard.hadamard_sketch,
    "sketch_and_mean_at_once": at_once.sketch_and_mean_at_once,
    "grad_weight_at_once": at_once.grad_weight_at_once,
}


@dataclass
class Kernels:
    """Kernels that are their twins, and note what they were launched with.

    Attributes:
        asked: What went the long way: (kernel, options).
        settled: What went the short way: kernels.
        error: What a launch in the short way raises.
    """

    asked: list[Any] = field(default_factory=list)
    settled: list[Any] = field(default_factory=list)
    error: Exception | None = None

    def loaded(self, name: str) -> Any:
        twin = TWINS.get(name) or getattr(hadamard, name)

        def kernel(*tensors: Tensor | None, **options: Any) -> Any:
            self.asked.append((name, options))
            return twin(*tensors, **options)

        def prepare(*tensors: Tensor | None, **options: Any) -> Any:
            if any(tensor is not None and tensor.numel() == 0 for tensor in tensors):
                return None

            def launch(*others: Tensor | None) -> list[Any]:
                if self.error is not None:
                    raise self.error
                self.settled.append(name)
                # as tensors are that a launch was prepared for
                assert facts(name, others) == facts(name, tensors)
                found = twin(*others, **options)
                return list(found) if isinstance(found, tuple) else [found, None]

            return launch

        if name in TWINS:
            kernel.prepared = prepare
        return kernel


def facts(name: str, tensors: tuple[Tensor | None, ...]) -> list[Any]:
    """What decides on a launch."""
    found: list[Any] = [None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    if name == "hadamard_sketch":
        # how many features a program has
        assert tensors[0] is not None
        found.append(tensors[0].data_ptr() % 16)
    return found


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setattr(dispatch, "_state", dispatch._State("auto"))
    monkeypatch.setattr(
        dispatch, "_reason_against", lambda name, x: "asked for" if dispatch.chosen() == "torch" else None
    )
    monkeypatch.setattr(dispatch, "_loaded", found.loaded)
    return found


def variants(x: Tensor) -> list[Tensor]:
    """A matrix, and its numbers in memory of other strides."""
    wider = torch.zeros(x.shape[0], x.shape[1] + 3, dtype=x.dtype)
    wider[:, :-3] = x
    return [x, x.t().contiguous().t(), wider[:, :-3]]


def shifted(x: Tensor) -> Tensor:
    """A matrix that begins within its memory."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)
    memory[1:] = x.flatten()
    return memory[1:].view_as(x)


def calls() -> list[tuple[Any, ...]]:
    """Calls of the operators, each of which differs from another one in one thing: (function, tensors, options)."""
    found: list[tuple[Any, ...]] = []
    x, g, mean = torch.randn(ROWS, FEATURES), torch.randn(ROWS, OUT), torch.randn(FEATURES)
    stored = torch.randn(BLOCKS * KEPT, FEATURES)
    sizes = {"blocks": BLOCKS, "kept": KEPT}
    options = {**sizes, "ratio": 0.2, "dtype": None, "need_bias": True}
    more_sizes = ({"blocks": 4, "kept": KEPT}, {"blocks": BLOCKS, "kept": 11})
    inputs = [*variants(x), x.bfloat16(), x[:-1].clone(), x[:, :-1].clone()]
    for one, gradient in itertools.product([*inputs, shifted(x)], (False, True)):
        found.append((ops.hadamard_sketch, (one, SEED, None), {**sizes, "gradient": gradient}))
    found.extend((ops.hadamard_sketch, (x, SEED, None), {**other, "gradient": False}) for other in more_sizes)
    found.append((ops.hadamard_sketch, (x, SEED, mean), {**sizes, "gradient": False}))
    # only operators take such a seed
    found.append((ops.hadamard_sketch, (x, SEED.int(), None), {**sizes, "gradient": False}))
    found.append((ops.hadamard_sketch_and_mean, (x, SEED.int()), sizes))
    found.append((ops.hadamard_grad_weight, (g, SEED.int(), stored, mean), options))
    found.extend((ops.hadamard_sketch_and_mean, (one, SEED), sizes) for one in inputs)
    found.extend((ops.hadamard_sketch_and_mean, (x, SEED), other) for other in more_sizes)
    gradients = [*variants(g), g.bfloat16(), g[:-1].clone(), g[:, :-1].clone()]
    found.extend((ops.hadamard_grad_weight, (one, SEED, stored, mean), options) for one in gradients)
    found.extend((ops.hadamard_grad_weight, (g, SEED, one, mean), options) for one in variants(stored)[1:])
    found.append((ops.hadamard_grad_weight, (g, SEED, stored[:, :-1].clone(), mean[:-1].clone()), options))
    found.append((ops.hadamard_grad_weight, (g, SEED, stored, None), options))
    found.append((ops.hadamard_grad_weight, (g, SEED, stored, mean.double()), options))
    found.append((ops.hadamard_grad_weight, (g, SEED, stored, torch.stack((mean, mean), 1)[:, 0]), options))
    changes: tuple[dict[str, Any], ...] = ({"ratio": 0.7}, {"dtype": torch.float64}, {"need_bias": False})
    found.extend((ops.hadamard_grad_weight, (g, SEED, stored, mean), {**options, **change}) for change in changes)
    found.append((ops.hadamard_grad_weight, (g, SEED, stored, mean), {**options, "blocks": 4, "kept": 5}))
    taller = torch.randn(BLOCKS * 11, FEATURES)
    found.append((ops.hadamard_grad_weight, (g, SEED, taller, mean), {**options, "kept": 11}))
    return found


def run(call: tuple[Any, ...]) -> tuple[Tensor, ...]:
    function, tensors, options = call
    found = function(*tensors, **options)
    return found if isinstance(found, tuple) else (found,)


def test_a_key_tells_all_calls_apart_that_are_not_alike(kernels):
    expected = [run(call) for call in calls_of_one_draw()]
    ways = len(kernels.asked)
    assert ways == len(expected)
    # asked again, in another order, none goes the long way but what has a mean to be made contiguous
    for call, results in reversed(list(zip(calls_of_one_draw(), expected, strict=True))):
        for result, same in zip(run(call), results, strict=True):
            assert result.dtype == same.dtype
            assert torch.equal(result, same)
    assert [name for name, _ in kernels.asked[ways:]] == ["hadamard_sketch"]
    assert len(kernels.settled) == ways - 1
    assert set(kernels.settled) == set(TWINS)


def calls_of_one_draw() -> list[tuple[Any, ...]]:
    torch.manual_seed(1)
    return calls()


def test_what_is_chosen_begins_anew(kernels):
    x = torch.randn(ROWS, FEATURES)
    call = ops.hadamard_sketch, (x, SEED, None), {"blocks": BLOCKS, "kept": KEPT, "gradient": False}
    run(call)
    run(call)
    assert (len(kernels.asked), len(kernels.settled)) == (1, 1)
    with use_kernels("torch"):
        run(call)
        run(call)
        assert (len(kernels.asked), len(kernels.settled)) == (1, 1)
    run(call)
    assert (len(kernels.asked), len(kernels.settled)) == (2, 1)
    dispatch.forget_launches()
    run(call)
    assert len(kernels.asked) == 3


def test_a_launch_that_fails_is_asked_for_in_the_long_way(kernels):
    x = torch.randn(ROWS, FEATURES)
    call = ops.hadamard_sketch, (x, SEED, None), {"blocks": BLOCKS, "kept": KEPT, "gradient": False}
    expected = run(call)
    kernels.error = RuntimeError("no such kernel image")
    assert torch.equal(run(call)[0], expected[0])
    kernels.error = None
    assert len(kernels.asked) == 2
    assert torch.equal(run(call)[0], expected[0])
    assert (len(kernels.asked), len(kernels.settled)) == (2, 1)
    kernels.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        run(call)
    assert len(kernels.asked) == 2


def test_what_launches_nothing_is_never_settled(kernels):
    """The kernels' own answers, in plain torch, to tensors of no elements."""
    g, stored = torch.randn(ROWS, OUT), torch.randn(BLOCKS * KEPT, 0)
    for _ in range(3):
        options = {"blocks": BLOCKS, "kept": KEPT, "ratio": 0.2, "need_bias": True}
        grad_weight, bias = ops.hadamard_grad_weight(g, SEED, stored, None, **options)
        assert grad_weight.shape == (OUT, 0)
        assert torch.allclose(bias, g.sum(0), atol=1e-4)
    assert len(kernels.asked) == 3
    kernels.asked.clear()
    x = torch.randn(0, FEATURES)
    for _ in range(3):
        assert ops.hadamard_sketch(x, SEED, None, blocks=0, kept=1, gradient=False).shape == (0, FEATURES)
    assert len(kernels.asked) == 3


def test_another_choice_while_a_kernel_is_under_way(kernels, monkeypatch):
    """What was launched as things were is not there for how things are."""
    loaded = kernels.loaded

    def choosing(name: str) -> Any:
        kernel = loaded(name)

        def late(*tensors: Tensor | None, **options: Any) -> Any:
            use_kernels("torch")
            return kernel(*tensors, **options)

        late.prepared = kernel.prepared
        return late

    monkeypatch.setattr(dispatch, "_loaded", choosing)
    ops.hadamard_sketch(torch.randn(ROWS, FEATURES), SEED, None, blocks=BLOCKS, kept=KEPT, gradient=False)
    assert len(kernels.asked) == 1
    assert dispatch._state.settled == {}


def test_a_kernel_that_breaks_ends_what_was_settled(kernels, monkeypatch):
    x = torch.randn(ROWS, FEATURES)
    call = ops.hadamard_sketch, (x, SEED, None), {"blocks": BLOCKS, "kept": KEPT, "gradient": False}
    run(call)
    assert len(dispatch._state.settled) == 1

    def broken(name: str) -> Any:
        def kernel(*tensors: Tensor | None, **options: Any) -> Any:
            raise RuntimeError("out of registers")

        return kernel

    monkeypatch.setattr(dispatch, "_loaded", broken)
    with pytest.warns(RuntimeWarning, match="out of registers"):
        ops.hadamard_sketch(x[:-1], SEED, None, blocks=BLOCKS, kept=KEPT, gradient=False)
    assert dispatch._state.settled == {}


def test_a_preparation_that_fails_is_no_fault_of_the_kernel(kernels, monkeypatch):
    def without_preparation(name: str) -> Any:
        kernel = Kernels().loaded(name)
        kernel.prepared = lambda *tensors, **options: 1 / 0
        return kernel

    monkeypatch.setattr(dispatch, "_loaded", without_preparation)
    with pytest.raises(ZeroDivisionError):
        ops.hadamard_sketch(torch.randn(ROWS, FEATURES), SEED, None, blocks=BLOCKS, kept=KEPT, gradient=False)
    assert dispatch._state.broken == {}


def test_a_tensor_on_another_gpu_than_the_current_one_goes_the_long_way(kernels, monkeypatch):
    class OnAGPU:
        is_cuda = True

        def __init__(self, number: int) -> None:
            self.number = number

        def get_device(self) -> int:
            return self.number

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    dispatch._state.settled["key",] = lambda x: [x.number]
    assert dispatch.run_settled(("key",), OnAGPU(1)) == [1]
    assert dispatch.run_settled(("key",), OnAGPU(0)) is None


def test_what_is_remembered_is_bounded(kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_REMEMBERED", 3)
    for rows in range(60, 70):
        ops.hadamard_sketch(torch.randn(rows, FEATURES), SEED, None, blocks=BLOCKS, kept=KEPT, gradient=False)
        assert 1 <= len(dispatch._state.settled) <= 3
