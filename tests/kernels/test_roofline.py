"""The predictions of kernels/README.md are what the formulas give, and the formulas are what tensors weigh."""

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear_kernels.hadamard_at_once import reference as at_once
from rmm_linear_kernels.hadamard_sketch import reference as hadamard
from rmm_linear_kernels.low_bit import reference as low_bit


@pytest.fixture
def roofline(benchmark_script):
    return benchmark_script("roofline")


def test_the_readme_s_tables_are_those_of_the_script(benchmark_script, tmp_path, monkeypatch) -> None:
    tables = benchmark_script("readme_tables")
    assert tables.main(["--check"]) == 0
    text = tables.README.read_text()
    changed = tmp_path / "README.md"
    changed.write_text(text.replace("| 0.833 |", "| 0.834 |", 1))
    monkeypatch.setattr(tables, "README", changed)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert changed.read_text() == text
    changed.write_text(text.replace("<!-- begin: layer times -->", ""))
    with pytest.raises(ValueError, match="layer times"):
        tables.main(["--check"])


def test_bytes_are_those_of_the_tensors(roofline) -> None:
    rows, features, out, ratio = 256, 48, 80, 0.25
    rank = roofline.rank_of(rows, ratio)
    for some_rows, some_ratio in ((rows, ratio), (203, 0.3), (8192, 0.1), (65, 0.5)):
        expected = RMMConfig(ratio=some_ratio, center=False).sketch_object.rank(some_rows)
        assert roofline.rank_of(some_rows, some_ratio) == expected
    seed = torch.tensor(1)
    x = torch.randn(rows, features).bfloat16()
    y = hadamard.hadamard_sketch(x, seed, None, blocks=4, kept=rank // 4, scale=0.1, dtype=x.dtype)
    assert roofline.hadamard_sketch(rows, features, rank).moved_bytes == x.nbytes + y.nbytes + seed.nbytes
    y, rest = at_once.sketch_and_mean_at_once(x, seed, blocks=4, kept=rank // 4, scale=0.1, dtype=x.dtype)
    moved = roofline.sketch_and_mean_at_once(rows, features, rank).moved_bytes
    assert moved == x.nbytes + y.nbytes + seed.nbytes + rest.nbytes
    g, how = torch.randn(rows, out).bfloat16(), {"scale": 0.1, "bias_dtype": torch.bfloat16}
    gradient, bias = at_once.grad_weight_at_once(g, seed, y, rest, blocks=4, kept=rank // 4, **how)
    moved = roofline.grad_weight_at_once(rows, features, out, rank).moved_bytes
    assert moved == sum(part.nbytes for part in (g, seed, y, rest, gradient, bias))
    for kind, bits in low_bit.BITS.items():
        if kind == low_bit.FP8:
            continue
        group = RMMConfig(storage=kind, center=False).sketch_object.group
        assert group == roofline.GROUP_BITS // bits
        stored = low_bit.quantize(y, seed, None, kind=kind, group=group)
        weight = sum(part.nbytes for part in stored) + seed.nbytes
        assert roofline.quantize(rank, features, bits).moved_bytes == y.nbytes + weight
        assert roofline.hadamard_sketch_quantized(rows, features, rank, bits).moved_bytes == x.nbytes + weight
        sums, mean = torch.zeros(stored[1].shape), torch.zeros(features)
        centred = roofline.hadamard_sketch_quantized(rows, features, rank, bits, with_sum=True, with_mean=True)
        assert centred.moved_bytes == x.nbytes + weight + sums.nbytes + mean.nbytes
        # read, next to the sketch: the sums of the blocks; and the parts, which are written, too
        sums_of_blocks = torch.zeros(-(-rows // roofline.BLOCK_ROWS), features)
        moved = y.nbytes + weight + sums_of_blocks.nbytes + 2 * sums.nbytes + mean.nbytes
        assert roofline.quantize_and_mean(rows, features, rank, bits).moved_bytes == moved
        of_x = low_bit.quantize(x, seed, None, kind=kind, group=group)
        moved = x.nbytes + seed.nbytes + sum(part.nbytes for part in of_x) + 4 * of_x[1].nbytes + 2 * mean.nbytes
        assert roofline.quantize_and_mean(rows, features, 0, bits).moved_bytes == moved
        value = low_bit.dequantize(*stored, seed, kind=kind, group=group, features=features)
        assert roofline.dequantize(rank, features, bits).moved_bytes == weight + value.nbytes
        g = torch.zeros(rank, out).bfloat16()
        grad = torch.zeros(out, features).bfloat16()
        moved = roofline.sketched_grad_weight(rank, features, out, bits=bits).moved_bytes
        assert moved == weight + g.nbytes + grad.nbytes
    assert roofline.sketched_grad_weight(rank, features, out).flops == 2 * rank * features * out


def test_a_prediction_obeys_both_roofs(roofline) -> None:
    gpu = roofline.Gpu("made up", bandwidth=1e9, multiplication=1e12, multiprocessors=100, clock=2.5e9)
    assert roofline.Cost(9 * 10**8, 1).seconds(gpu) == pytest.approx(1.0)
    assert roofline.Cost(1, 75 * 10**10).seconds(gpu) == pytest.approx(1.0)
    for shape in roofline.GOALS:
        for gpu in roofline.GPUS:
            exact = roofline.linear_seconds(gpu, *shape)
            plain, centred = (roofline.sketched_seconds(gpu, *shape, 0.25, center=center) for center in (False, True))
            assert roofline.limit(0.25) * exact < plain < centred < exact


def test_the_goals_are_above_what_free_sketches_would_reach(roofline) -> None:
    for goals in roofline.GOALS.values():
        assert tuple(goals) == (0.5, 0.25, 0.1)
        assert all(roofline.limit(ratio) < goal < 1 for ratio, goal in goals.items())
