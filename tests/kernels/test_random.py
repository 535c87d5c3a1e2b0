"""Random numbers of a CPU, and sums that do not depend on slabs and tiles."""

import pytest
import torch
from torch import Tensor

from rmm_linear import ops, use_kernels
from rmm_linear.sketches import SKETCHES, LowBit
from rmm_linear_kernels import random
from rmm_linear_kernels.hadamard import reference as hadamard
from rmm_linear_kernels.low_bit import cpu as low_bit
from rmm_linear_kernels.low_bit import reference as low_bit_reference
from rmm_linear_kernels.projection import reference as projection

INTEGERS = ("int8", "int4", "int3", "int2")
GROUP = 16


def words(seed: int, stream: int) -> Tensor:
    return torch.empty(64, dtype=torch.int64).random_(generator=random.generator_of(seed, stream))


def test_a_stream_is_a_function_of_its_seed_and_number() -> None:
    assert torch.equal(words(3, 0), words(3, 0))
    tried = [0, 1, -1, 1 << 31, 1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1]
    drawn = [words(seed, stream) for seed in tried for stream in (0, 1, 2, 3, 1 << 32)]
    assert torch.unique(torch.stack(drawn), dim=0).shape[0] == len(drawn)


def test_streams_of_data_parallel_ranks_are_no_other_ranks_streams() -> None:
    ranks = [(5 + rank * ops._RANK_STRIDE + (1 << 63)) % (1 << 64) - (1 << 63) for rank in range(8)]
    drawn = [words(seed, stream) for seed in ranks for stream in range(8)]
    assert torch.unique(torch.stack(drawn), dim=0).shape[0] == len(drawn)


def test_many_seeds_draw_what_each_draws() -> None:
    seeds = torch.tensor([[3, -4, 5], [6, 7, -(1 << 63)]])
    options = {"rows": 70, "rank": 5, "dtype": torch.float32}
    for gaussian in (False, True):
        together = projection.projection_dense(seeds, gaussian=gaussian, **options)
        assert together.shape == (2, 3, 70, 5)
        for seed, alone in zip(seeds.flatten(), together.flatten(0, 1), strict=True):
            assert torch.equal(projection.projection_dense(seed, gaussian=gaussian, **options), alone)


@pytest.mark.parametrize("sketch", [*(kind(ratio=0.4) for kind in SKETCHES.values()), LowBit(None, "int4")], ids=str)
def test_the_default_generator_and_device_are_left_alone(sketch) -> None:
    """And a forward and a backward pass have one S, whatever is chosen for either."""
    x, seed = torch.randn(200, 8), torch.tensor(5)
    state = torch.get_rng_state()
    with torch.device("meta"):
        saved = sketch.compress(x, seed)
    assert {tensor.device.type for tensor in saved.tensors} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), state)
    with use_kernels("torch"):
        assert all(map(torch.equal, sketch.compress(x, seed).tensors, saved.tensors))


def test_a_matrix_that_is_made_in_inference_mode_serves_training() -> None:
    hadamard._matrix.cache_clear()
    x, seed, options = torch.randn(64, 8), torch.tensor(5), {"blocks": 1, "kept": 32, "scale": 1.0}
    with torch.inference_mode():
        found = hadamard.hadamard_sketch(x, seed, None, **options, dtype=torch.float32)
    assert not hadamard._matrix(64, torch.float32).is_inference()
    assert torch.equal(hadamard.hadamard_sketch(x, seed, None, **options, dtype=torch.float32), found)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 1000])
def test_products_are_those_with_the_whole_of_s(rows: int, gaussian: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either order of the products; slabs of 128 rows."""
    monkeypatch.setattr(projection, "_CPU_SLAB_ELEMENTS", 1)
    seed, rank = torch.tensor(5), 9
    options = {"rows": rows, "rank": rank, "gaussian": gaussian, "dtype": torch.float64}
    entries = 3 * projection.projection_dense(seed, **options)
    x, stored = torch.randn(rows, 13).double(), torch.randn(rank, 13).double()
    for outputs in (1, 200):
        g, mean = torch.randn(rows, outputs).double(), torch.randn(outputs).double()
        for centre in (None, mean):
            centred = g if centre is None else g - centre
            options = {"gaussian": gaussian, "scale": 0.3}
            got = projection.projected_grad_weight(g, seed, stored, centre, **options)
            torch.testing.assert_close(got, 0.3 * (entries.t() @ centred).t() @ stored)
            got = projection.random_projection(g, seed, centre, rank=rank, dtype=torch.float64, **options)
            torch.testing.assert_close(got, 0.3 * entries.t() @ centred)
    assert x.shape[0] == rows


def uneven(rows: int, features: int) -> Tensor:
    """Columns of very different sizes and means, one of them constant, one zero."""
    y = torch.randn(rows, features, dtype=torch.float64) * torch.logspace(-3, 3, features, dtype=torch.float64)
    y += 3 * torch.randn(features, dtype=torch.float64)
    y[:, 2], y[:, 3] = 1.2345678, 0
    return y


def round_trip(y: Tensor, seed: int, mean: Tensor | None, kind: str, group: int = GROUP) -> Tensor:
    codes = low_bit.quantize(y, torch.tensor(seed), mean, kind=kind, group=group)
    return low_bit.dequantize(*codes, torch.tensor(seed), kind=kind, group=group, features=y.shape[1])


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("kind", INTEGERS)
def test_every_element_is_unbiased_with_the_variance_it_says(kind: str, mean: bool) -> None:
    """4,000 draws of each element, 100 of them side by side: they see 1 % of a step, and 15 % of its variance."""
    (rows, features), copies, seeds = (37, 9), 100, 40
    y = uneven(rows, features)
    centre = y.mean(0) if mean else None
    exact = y if centre is None else y - centre
    step = low_bit.quantize(y, torch.tensor(0), centre, kind=kind, group=GROUP)[1].double()
    step = step.repeat_interleave(GROUP, 0)[:rows]
    wide, wide_centre = y.repeat(1, copies), None if centre is None else centre.repeat(copies)
    drawn = torch.stack([round_trip(wide, seed, wide_centre, kind).double() for seed in range(seeds)])
    error = drawn.unflatten(-1, (copies, features)).transpose(1, 2).flatten(0, 1) - exact
    # where float32 can tell the values apart
    seen = step > 2**-12 * exact.abs().clamp(min=1e-30)
    assert seen.sum() > 150
    error, draws = error[:, seen] / step[seen], copies * seeds
    # uniform on +-1/2: 1e-6 by Bonferroni over 333 elements
    assert (error.mean(0) * (12 * draws) ** 0.5).abs().max() < 6.1
    assert ((error.var(0) * 12 - 1) / (0.8 / draws) ** 0.5).abs().max() < 6.1
    # all of them together, of which those of a row and a seed have a part in common
    assert abs(float(error.mean())) < 0.003
    assert abs(float(error.square().mean()) * 12 - 1) < 0.01
    assert error.abs().max() < 0.501


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*INTEGERS, "fp8"])
def test_steps_and_offsets_are_the_reference_s_and_tiles_do_not_show(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, features in ((0, 5), (1, 1), (100, 7), (161, 24)):
        y, seed = (torch.randn(rows, features) + 1).to(dtype), torch.tensor(3)
        for mean in (None, torch.randn(features)):
            whole = low_bit.quantize(y, seed, mean, kind=kind, group=GROUP)
            expected = low_bit_reference.quantize(y, seed, mean, kind=kind, group=GROUP)
            assert [part.shape for part in whole] == [part.shape for part in expected]
            assert all(torch.equal(one, other) for one, other in zip(whole[1:], expected[1:], strict=True))
            values = low_bit.dequantize(*whole, seed, kind=kind, group=GROUP, features=features, dtype=dtype)
            assert values.dtype == dtype
            for elements in (1, 5 * features, 40 * features):
                with monkeypatch.context() as patch:
                    patch.setattr(low_bit, "_TILE_ELEMENTS", elements)
                    parts = low_bit.quantize(y, seed, mean, kind=kind, group=GROUP)
                    assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))
                    again = low_bit.dequantize(*parts, seed, kind=kind, group=GROUP, features=features, dtype=dtype)
                assert torch.equal(again, values)


@pytest.mark.parametrize("order", [2, 4, 8, 16, 32, 64])
def test_runs_of_hadamard_rows_have_the_second_moments_of_uniform_subsets(order: int) -> None:
    powers = hadamard._powers(order, torch.float64)
    assert powers.shape == (2 * (order - 1), order)
    assert torch.equal(powers[: order - 1], powers[order - 1 :])
    for kept in range(1, order):
        runs = torch.stack([powers[first : first + kept] for first in range(order - 1)])
        # distinct rows of H, and each pair of entries of S S^T as large as its variance says: all exact in integers
        assert torch.equal(runs @ runs.mT, order * torch.eye(kept, dtype=torch.float64).expand(order - 1, -1, -1))
        squares = (runs.mT @ runs).square().sum(0)
        expected = torch.full((order, order), float(kept * (order - kept)), dtype=torch.float64)
        expected.fill_diagonal_(float(kept * kept * (order - 1)))
        assert torch.equal(squares, expected)


def test_the_first_row_of_a_run_is_uniform_and_the_seed_s_own() -> None:
    """A generator's seed has it, in bits from which the generator does not draw."""
    numbers = [random.generator_of(seed, 0).initial_seed() >> 32 for seed in range(6300)]
    counts = torch.bincount(torch.tensor([(number * 63) >> 32 for number in numbers]), minlength=63)
    assert counts.shape == (63,)
    # chi squared with 62 degrees of freedom: beyond 125 once in 300,000
    assert ((counts - 100).square() / 100).sum() < 125
    assert random.generator_of(5, 0).initial_seed() >> 32 == numbers[5]
