"""Rows that no single stride leads through are read where they lie: to the bit what comes of a copy in order."""

import inspect
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from rmm_linear import RMMConfig, ops, use_kernels
from rmm_linear.functional import linear
from rmm_linear.sketches import Hadamard
from rmm_linear_kernels.hadamard_at_once import kernel as at_once
from rmm_linear_kernels.hadamard_sketch import kernel as sketches
from rmm_linear_kernels.hadamard_sketch_quantized import kernel as quantized
from rmm_linear_kernels.hadamard_sketch_quantized.shapes import holds
from rmm_linear_kernels.strides import in_runs

pytestmark = pytest.mark.usefixtures("nan_poison")

# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)
# layouts of (batch, length, features), each in memory that is NaN beside it
LAYOUTS = {
    "without the first token": lambda base: base[:, 1:, :-3],
    "length first": lambda base: base[:, :-1, 3:].transpose(0, 1),
    "channels first": lambda base: base[1:, 2:, 1:].transpose(1, 2),
    "every other token": lambda base: base[:, 1:-2:2],
    "places without the first": lambda base: base[:, 1:].transpose(1, 2)[:, :, 1:],
}


def batch(layout: str, dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int] = (5, 27, 21)) -> Tensor:
    """Numbers in a layout, and NaN in all of the memory that does not belong to it."""
    memory = torch.full(sizes, torch.nan, device=device).to(dtype)
    x = LAYOUTS[layout](memory)
    x.copy_((torch.randn(x.shape) + 2).to(device, dtype))
    found = in_runs(x)
    assert (found.dim(), found.data_ptr()) == (3, x.data_ptr())
    return found


def options_of(x: Tensor, ratio: float) -> dict:
    blocks, kept = Hadamard(ratio).geometry(x.shape[0] * x.shape[1])
    return {"blocks": blocks, "kept": kept, "scale": 0.25, "dtype": x.dtype}


@pytest.mark.parametrize("dtype", [torch.float32, grid(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("layout", ["without the first token", "length first", *map(grid, list(LAYOUTS)[2:])])
def test_the_sketches(layout, dtype, device):
    x, seed = batch(layout, dtype, device), torch.tensor(11, device=device)
    in_order, mean = x.reshape(-1, x.shape[2]), torch.randn(x.shape[2], device=device)
    options = options_of(x, 0.3)
    for kernel, more in (
        (sketches.hadamard_sketch, (None,)),
        (sketches.hadamard_sketch, (mean,)),
        (sketches.hadamard_sketch_and_mean, (mean,)),
        (sketches.hadamard_sketch_and_sums, (mean,)),
        (at_once.sketch_and_mean_at_once, ()),
    ):
        found, expected = kernel(x, seed, *more, **options), kernel(in_order, seed, *more, **options)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), kernel.__name__
            assert not one.isnan().any()


@pytest.mark.parametrize("layout", ["without the first token", grid("length first")])
def test_blocks_of_more_rows_than_are_multiplied_at_a_time(layout, device):
    x, seed = batch(layout, torch.float32, device, (4, 40, 9)), torch.tensor(3, device=device)
    options = options_of(x, 0.02)
    found = sketches.hadamard_sketch(x, seed, None, **options)
    assert torch.equal(found, sketches.hadamard_sketch(x.reshape(-1, x.shape[2]), seed, None, **options))


@pytest.mark.parametrize("kind", ["int8", grid("int4"), grid("fp8")])
@pytest.mark.parametrize("layout", ["without the first token", grid("length first"), grid("channels first")])
def test_codes(kind, layout, device):
    # blocks of 62 rows and more
    sizes = (6 if layout == "channels first" else 5, 38, 39)
    x, seed = batch(layout, torch.float16, device, sizes), torch.tensor(-2, device=device)
    in_order, mean = x.reshape(-1, x.shape[2]), torch.randn(x.shape[2], device=device)
    blocks = -(-in_order.shape[0] // 64)
    for centre in (None, mean):
        # in one kernel, and by way of the memory
        for group in (64, 48) if layout == "length first" or centre is None else (64,):
            options = {"blocks": blocks, "kept": 32, "kind": kind, "group": group}
            assert holds(x, **options) == (group == 64)
            found = quantized.hadamard_sketch_quantized(x, seed, centre, scale=0.125, **options)
            expected = quantized.hadamard_sketch_quantized(in_order, seed, centre, scale=0.125, **options)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.slow
def test_elements_beyond_two_to_the_31(device):
    """Runs that begin some 2**30 elements apart, forwards and backwards; the memory between them is never touched."""
    memory = torch.empty((1 << 31) + (1 << 30) + 4096, dtype=torch.bfloat16, device=device)
    forwards = memory.as_strided((3, 30, 40), ((1 << 30) + 64, 64, 1))
    backwards = memory.as_strided((30, 3, 40), (64, (1 << 30) + 64, 1))
    forwards.copy_(torch.randn(3, 30, 40))
    seed = torch.tensor(3, device=device)
    for x in (forwards, backwards):
        in_order, options = x.reshape(-1, 40), options_of(x, 0.3)
        for kernel in (sketches.hadamard_sketch, at_once.sketch_and_mean_at_once):
            more = (None,) if kernel is sketches.hadamard_sketch else ()
            found, expected = kernel(x, seed, *more, **options), kernel(in_order, seed, *more, **options)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_kernel_for_one_length_serves_all():
    """None is compiled anew for runs of another length."""
    kernels = (
        sketches._hadamard_sketch_kernel,
        at_once._sketch_and_mean_at_once_kernel,
        quantized._hadamard_sketch_quantized_kernel,
    )
    for kernel in kernels:
        # of Triton's interpreter, which compiles nothing, only the source is there
        named = inspect.getsource(sys.modules[kernel.fn.__module__]).split(f"def {kernel.fn.__name__}(")[0]
        assert '"run"' in named.rsplit("@triton.jit(do_not_specialize=", 1)[1], kernel.fn.__name__


CONFIGS = {
    "plain": RMMConfig(ratio=0.3, center=False, min_rows=1),
    "centred": RMMConfig(ratio=0.3, center=True, min_rows=1),
    "int8": RMMConfig(ratio=0.5, center=True, storage="int8", min_rows=1),
    # without a way through the rows of their own: the rows in order
    "gaussian": RMMConfig(ratio=0.3, sketch="gaussian", min_rows=1),
    "int8 alone": RMMConfig(ratio=1.0, storage="int8", min_rows=1),
    "first tokens kept": RMMConfig(ratio=0.3, keep_tokens=(0,), min_rows=1),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("layout", [grid("without the first token"), "length first"])
def test_a_layer_reads_them_where_they_lie_and_makes_the_same_gradients(config, layout, device, monkeypatch):
    memory = torch.randn(6, 32, 21, device=device)
    weight, bias = torch.randn(7, 21, device=device), torch.randn(7, device=device)
    seen = []

    def in_runs_noted(x):
        seen.append(in_runs(x))
        return seen[-1]

    gradients = []
    for is_in_order in (False, True):
        x = LAYOUTS[layout](torch.cat((memory, memory[..., :3]), -1))[..., :18]
        x = (x.contiguous() if is_in_order else x).detach().requires_grad_()
        matrix = weight[:, :18].clone().requires_grad_()
        offset = bias.clone().requires_grad_()
        with use_kernels("triton"), monkeypatch.context() as patch:
            patch.setattr(ops, "in_runs", in_runs_noted)
            output = linear(x, matrix, offset, config=config, seed=5)
            output.backward(torch.ones_like(output) * torch.arange(7, device=device))
        gradients.append((matrix.grad, offset.grad))
        if not is_in_order:
            values = [view for view in seen if view.data_ptr() == x.data_ptr()]
            assert len(values) == (config.sketch == "hadamard" and config.ratio < 1 and not config.keep_tokens)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
