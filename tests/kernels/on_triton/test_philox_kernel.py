"""Random bits made inside a kernel are those of the reference, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from rmm_linear_kernels.philox import kernel, reference

SEEDS = (0, 1, -1, 7_000_000_000, -(1 << 63), (1 << 63) - 1)
COUNT = 512


@triton.jit
def _draw_kernel(SEED, INDEX, OUT, COUNT: tl.constexpr, STREAM: tl.constexpr, DRAW: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(OUT + place, DRAW(tl.load(SEED), tl.load(INDEX + place), STREAM).to(tl.int64))


@triton.jit
def _cell_kernel(SEED, OUT, first, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, NORMAL: tl.constexpr):
    group, column = first + tl.arange(0, GROUPS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if NORMAL:
        numbers = kernel.normals_of_cell(tl.load(SEED), group, column, kernel.PROJECTION_STREAM)
    else:
        numbers = kernel.words_of_cell(tl.load(SEED), group, column, kernel.PROJECTION_STREAM)
    place = tl.arange(0, GROUPS)[:, None] * COLUMNS + column
    for index in tl.static_range(4):
        tl.store(OUT + index * GROUPS * COLUMNS + place, numbers[index])


def run(draw, seed, index, stream, device):
    out = torch.full((COUNT,), -7, device=device)
    seed_tensor = torch.tensor(seed, device=device)
    _draw_kernel[(1,)](seed_tensor, index.to(device, torch.int32), out, COUNT=COUNT, STREAM=stream, DRAW=draw)
    return out.cpu()


def words_from(seed, first, stream):
    """The words of a stream from any place on; `test_philox.py` holds its beginning against the paper."""
    counters = torch.arange(first // 4, first // 4 + COUNT // 4 + 1) + (stream << 32)
    return reference.randint4x(torch.tensor(seed), counters).t().flatten()[first % 4 :][:COUNT]


@pytest.mark.parametrize(
    ("seed", "first"),
    [
        pytest.param(seed, first, marks=() if first == 12_345 or seed == -1 else pytest.mark.grid)
        for first in (0, 12_345, (1 << 30) - COUNT)
        for seed in SEEDS
    ],
)
def test_words_signs_and_halves_are_the_reference_s(seed, first, device):
    index = torch.arange(COUNT) + first
    for stream in (reference.SIGN_STREAM, reference.CHOICE_STREAM, reference.ROUNDING_STREAM):
        assert torch.equal(run(kernel.random_word, seed, index, stream, device), words_from(seed, first, stream))
        halves = words_from(seed, first // 2, stream)[(index - first // 2 * 2) // 2] >> index % 2 * 16 & 0xFFFF
        assert torch.equal(run(kernel.random_half, seed, index, stream, device), halves)
        bits = words_from(seed, first // 32, stream)[(index - first // 32 * 32) // 32] >> index % 32 & 1
        assert torch.equal(run(kernel.sign_bit, seed, index, stream, device), bits)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, (1 << 31) - 16, -8])
def test_cells_are_the_reference_s(seed, first, device):
    """The words bit for bit; an angle of float32 in [0, 2 pi) is off by 2.4e-7, and the radius is at most 5.7."""
    key, unsigned = torch.tensor(seed, device=device), first % (1 << 32)
    groups = min(32, (1 << 32) - unsigned)
    counters = reference.cell_counters(
        unsigned, groups, 64, stream=reference.PROJECTION_STREAM, device=torch.device("cpu")
    )
    for normal, dtype in ((False, torch.int64), (True, torch.float32)):
        out = torch.zeros(4, groups, 64, dtype=dtype, device=device)
        _cell_kernel[(1,)](key, out, first, GROUPS=groups, COLUMNS=64, NORMAL=normal)
        plain = reference.randn4x if normal else reference.randint4x
        expected = plain(torch.tensor(seed), *counters).view(out.shape)
        assert (out.cpu() - expected).abs().max() <= 3e-6 * normal
