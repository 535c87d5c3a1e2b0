"""No step of plain torch makes a GPU's stream wait for the host: shown without a GPU, on tensors without memory.

The references run as they do on a GPU without kernels. `tests/test_cuda.py` asks torch itself, on a GPU.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.sketches import STORAGES, available_sketches

FEATURES, OUT = 32, 16
FILLS_ONE_PLACE = torch.__version__ >= "2.15"
MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (Tensor, "new_tensor"))


class Waits(TorchDispatchMode):
    """What a GPU would wait for: numbers asked of it, sizes that depend on them, and copies from the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, results)) if isinstance(leaf, Tensor)}
        # a number that is assigned to one place, and not to a slice, is a tensor of the host's on a GPU
        is_of_one_place = name == "copy_" and args[0].dim() == 0
        # how many places are true is not known
        is_by_truth = name.startswith(("index", "_index", "_unsafe_index")) and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if len(devices) > 1 or is_of_one_place or is_by_truth or name in ("_local_scalar_dense", "nonzero"):
            self.found.append(name)
        return results

    def __enter__(self):
        # made of numbers of the host's, which on a tensor without memory leaves no trace
        self.patch = pytest.MonkeyPatch()
        for place, name in MAKERS:
            self.patch.setattr(place, name, self._noting(getattr(place, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def _noting(self, maker):
        def make(*args, **kwargs):
            made = maker(*args, **kwargs)
            if made.device.type != "cpu" and not any(made is argument for argument in args):
                self.found.append(maker.__name__)
            return made

        return make


def waits(dtype=torch.bfloat16, rows=300, **options):
    """Of a step: inside of the operators, and around them."""
    config = RMMConfig(min_rows=1, **options)
    layer = RMMLinear(FEATURES, OUT, config=config, device="meta", dtype=dtype)
    x = torch.randn(rows, FEATURES, device="meta", dtype=dtype)
    g = torch.randn(rows, OUT, device="meta", dtype=dtype)
    seed = torch.empty((), dtype=torch.int64, device="meta")
    with Waits() as found:
        config.sketch_object.backward(g, config.sketch_object.compress(x, seed))
        layer(x.view(4, -1, FEATURES).requires_grad_()).backward(g.view(4, -1, OUT))
    return found.found


CASES = [
    *(
        {"sketch": sketch, "storage": storage, "center": center}
        for sketch, storage, center in itertools.product(available_sketches(), (None, *STORAGES), (False, True))
    ),
    *(
        {"sketch": sketch, "dtype": dtype}
        for sketch, dtype in itertools.product(available_sketches(), (torch.float64, torch.float32, torch.float16))
    ),
    *({"storage": storage, "ratio": 1.0} for storage in STORAGES),
    # orders of the Hadamard matrix
    *({"rows": rows} for rows in (4, 24, 80, 144, 200, 256)),
    *({"keep_tokens": tokens} for tokens in ((0,), (0, -1))),
]


def of_the_grid(options):
    """Of storages and dtypes, a sketch that looks at no data and one that does stand for all."""
    is_plain = options.get("storage") is None and options.get("dtype", torch.float32) == torch.float32
    return not is_plain and options.get("sketch", "hadamard") not in ("hadamard", "crs")


@pytest.mark.parametrize(
    "options", [pytest.param(each, marks=[pytest.mark.grid] * of_the_grid(each)) for each in CASES], ids=str
)
def test_no_step_waits(options):
    assert waits(**{"ratio": 0.3, **options}) == []


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (lambda x: x[:1].fill_(0), []),
        (lambda x: x.__setitem__(slice(1), 0), []),
        (lambda x: x.__setitem__(slice(1), x[0]), []),
        (lambda x: x.__setitem__(0, 0), [] if FILLS_ONE_PLACE else ["copy_"]),
        (lambda x: x.copy_(torch.ones(8)), ["copy_"]),
        (lambda x: x.__setitem__(x > 0, x[:1]), ["index_put_"]),
        (lambda x: torch.tensor([1.0], device=x.device), ["tensor"]),
        (lambda x: torch.as_tensor([1.0], device=x.device), ["as_tensor"]),
        (lambda x: torch.as_tensor(x), []),
        (lambda x: x.new_tensor([1.0]), ["new_tensor"]),
    ],
)
def test_what_would_wait_is_seen(how, expected):
    x = torch.empty(8, device="meta")
    with Waits() as found:
        how(x)
    assert found.found == expected


@pytest.mark.parametrize("how", [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0]])
def test_what_asks_for_a_number_cannot_pass(how):
    with Waits(), pytest.raises((RuntimeError, NotImplementedError)):
        how(torch.empty(8, device="meta"))
