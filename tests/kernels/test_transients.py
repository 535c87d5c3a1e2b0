"""What a step allocates in the ways of a GPU: no copy of x or g besides outputs and gradients.

The launchers run as they do on a GPU (`pretended_gpu.py`) and launch nothing, so that nothing is compiled;
allocations are followed.
"""

import importlib.util
import os
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.ops import dispatch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'rmm-linear[kernels]'", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from pretended_gpu import as_on_a_gpu

from rmm_linear_kernels import launching
from rmm_linear_kernels.random_projection import kernel as random_projection
from rmm_linear_kernels.row_sampling import reference as row_sampling
from rmm_linear_kernels.strides import in_runs

ROWS, FEATURES, OUT = 8192, 96, 160
ELEMENT = 2


class Allocations(TorchDispatchMode):
    """Bytes that appear and go, storage by storage, in their order."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata for tensor in known}
        # (name of the storage, bytes), negative where it goes; a storage's address may be another one's later
        self.events: list[tuple[int, int]] = []
        self.names: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                address, size = storage._cdata, storage.nbytes()
                if size and address not in self.alive:
                    self.alive.add(address)
                    name = self.names[address] = len(self.events)
                    self.events.append((name, size))
                    weakref.finalize(storage, self._gone, address, name, size)
        return results

    def _gone(self, address: int, name: int, size: int) -> None:
        self.alive.discard(address)
        self.events.append((name, -size))

    def without(self, others: list[Tensor]) -> tuple[int, int]:
        """The most bytes at a time, and those of the largest, without some tensors that are still there."""
        left_out = {self.names[tensor.untyped_storage()._cdata] for tensor in others}
        held = peak = largest = 0
        for name, size in self.events:
            if name not in left_out:
                held += size
                peak, largest = max(peak, held), max(largest, size)
        return peak, largest


def allocated(config: RMMConfig, monkeypatch, *, transposed: bool = False) -> tuple[int, int]:
    """What a step allocates but for output and gradients: at a time, and at most for one tensor."""
    layer = RMMLinear(FEATURES, OUT, config=config).bfloat16()
    if transposed:
        x, g = torch.randn(FEATURES, ROWS).bfloat16().t().requires_grad_(), torch.randn(OUT, ROWS).bfloat16().t()
    else:
        x = torch.randn(ROWS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(ROWS, OUT, dtype=torch.bfloat16)
    # operators are called as functions, or the mode would see each as one
    monkeypatch.setattr("rmm_linear.ops.registration._is_watched", lambda: False)
    launched = []
    monkeypatch.setattr(launching, "_launch_by_triton", lambda plan, *how: launched.append(plan.kernel.__name__))
    with as_on_a_gpu():
        # the second of two steps: in the first one, what serves all steps is made
        layer(x).backward(g)
        x.grad = None
        layer.zero_grad()
        with Allocations([x, g, *layer.parameters()]) as seen:
            output = layer(x)
            output.backward(g)
    assert launched
    return seen.without([output, x.grad, layer.weight.grad, layer.bias.grad])


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.1])
@pytest.mark.parametrize(("center", "transposed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_nothing_is_larger_than_the_sketch_of_g_and_all_than_two_sketches_each(
    storage, center, transposed, ratio, monkeypatch
):
    """What is kept, and what comes and goes, in the bytes of 2 rank (in + out) elements; whatever the strides."""
    config = RMMConfig(ratio=ratio, storage=storage, center=center, min_rows=1)
    rank = int(64 * ratio) * ROWS // 64
    at_a_time, largest = allocated(config, monkeypatch, transposed=transposed)
    # there are more outputs than inputs; and even the largest sketch is smaller than x
    assert largest == rank * OUT * ELEMENT < ROWS * FEATURES * ELEMENT
    assert largest <= at_a_time <= 2 * rank * (FEATURES + OUT) * ELEMENT


@pytest.mark.parametrize("storage", [None, "int8", "int3"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("layout", ["without the first token", "length first", "channels first"])
def test_no_copy_of_rows_in_runs_but_the_product_s(layout, center, storage, monkeypatch):
    """Of an input whose rows no single stride leads through, nn.Linear makes a copy for its product; a sketch none."""
    runs, run = 8, ROWS // 8
    sizes, part, order = {
        "without the first token": ((runs, run + 1, FEATURES), (0, 1, 0), (0, 1, 2)),
        "length first": ((run, runs + 1, FEATURES), (0, 1, 0), (1, 0, 2)),
        "channels first": ((runs, FEATURES + 1, run + 1), (0, 1, 1), (0, 2, 1)),
    }[layout]
    monkeypatch.setattr("rmm_linear.ops.registration._is_watched", lambda: False)
    monkeypatch.setattr(launching, "_launch_by_triton", lambda plan, *how: None)
    config = RMMConfig(ratio=0.5, center=center, storage=storage, min_rows=1)
    found = []
    with as_on_a_gpu():
        for layer in (nn.Linear(FEATURES, OUT).bfloat16(), RMMLinear(FEATURES, OUT, config=config).bfloat16()):
            memory = torch.randn(*sizes).bfloat16()
            x = memory[part[0] :, part[1] :, part[2] :].permute(order).requires_grad_()
            assert x.shape == (runs, run, FEATURES)
            assert in_runs(x).dim() == 3
            g = torch.randn(runs, run, OUT, dtype=torch.bfloat16)
            layer(x).backward(g)
            x.grad = None
            layer.zero_grad()
            with Allocations([x, g, *layer.parameters()]) as seen:
                layer(x).backward(g)
            found.append(sum(size == ROWS * FEATURES * ELEMENT for _, size in seen.events))
    # the copy, the gradient of x, and that in x's order
    assert found[0] in (2, 3)
    # numbers of a row that are apart are put in order for the sketch
    assert found[1] == found[0] + (layout == "channels first")


@pytest.mark.parametrize("reason", ["none for this dtype", "broken"])
def test_plain_torch_makes_one_copy_for_the_sketch(reason, monkeypatch):
    """Where the twins run on a GPU: one for all of them."""
    monkeypatch.setattr("rmm_linear.ops.registration._is_watched", lambda: False)
    layer = RMMLinear(FEATURES, OUT, config=RMMConfig(ratio=0.5, center=True, min_rows=1))
    x = torch.randn(8, ROWS // 8 + 1, FEATURES)[:, 1:].requires_grad_()

    def raising(name):
        def kernel(*args, **kwargs):
            raise RuntimeError("Failed to find C compiler")

        return kernel

    with as_on_a_gpu(), monkeypatch.context() as patch:
        state = dispatch._State("auto")
        patch.setattr(dispatch, "_state", state)
        if reason == "broken":
            patch.setattr(dispatch, "_loaded", raising)
            patch.setattr(dispatch, "_reason_against", lambda name, x: state.broken.get((name, x.dtype, x.device)))
            with pytest.warns(RuntimeWarning, match="C compiler"):
                layer(x)
        else:
            patch.setattr(dispatch, "_reason_against", lambda name, x: reason)
        with Allocations([x, *layer.parameters()]) as seen:
            layer(x)
    assert sum(size == ROWS * FEATURES * 4 for _, size in seen.events) == 2


@pytest.mark.parametrize("sketch", ["gaussian", "rademacher", "rows_without_replacement", "crs", "wta_crs"])
def test_no_tensor_of_other_sketches_is_larger(sketch, monkeypatch):
    """But for parts of a dense projection, and rows on the way to their norms: so many bytes, whatever the layer."""
    rank = ROWS // 10
    allowed = 2 * rank * (FEATURES + OUT) * ELEMENT
    if sketch in ("gaussian", "rademacher"):
        tile = random_projection._constants(sketch == "gaussian", torch.bfloat16, False, None)
        allowed = max(allowed, random_projection._PROGRAMS * tile["BLOCK_RANK"] * tile["BLOCK_FEATURES"] * 4)
    elif sketch in ("crs", "wta_crs"):
        allowed = max(allowed, row_sampling._SLAB_ELEMENTS * torch.float64.itemsize)
    _, largest = allocated(RMMConfig(ratio=0.1, sketch=sketch, min_rows=1), monkeypatch)
    assert rank * OUT * ELEMENT <= largest <= allowed
