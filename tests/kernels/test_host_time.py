"""What a step launches on a GPU, counted without one; and the benchmark of the host's time."""

import csv
import os
from functools import partial

import pytest
import torch
from torch import nn

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear_kernels.hadamard_at_once import reference

pytest.importorskip("triton", reason="triton is not installed: pip install 'rmm-linear[kernels]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

KERNELS = {
    "sketch at once": "_sketch_and_mean_at_once_kernel",
    "gradient at once": "_grad_weight_at_once_kernel",
    "sketch": "_hadamard_sketch_kernel",
    "codes": "_hadamard_sketch_quantized_kernel",
    "mean": "_sampled_mean_kernel",
    "quantize and mean": "_quantize_and_mean_kernel",
    "quantize": "_quantize_kernel",
    "outer": "_outer_product_of_sums_kernel",
    "product": "_grad_weight_kernel",
    "product of codes": "_low_bit_grad_weight_kernel",
    "draws": "_uniform_draws_kernel",
    "weights": "_sampling_weights_kernel",
    "weighted": "_weighted_draws_kernel",
    "norms": "_row_norms_kernel",
    "rows": "_gather_rows_kernel",
}


# each compiles kernels of its own
more = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def host_time(benchmark_script):
    return benchmark_script("host_time")


def launched(host_time, layer: nn.Module, dtype: torch.dtype, *, small: bool, rows: int = 128) -> list[str]:
    x = torch.randn(rows, layer.in_features, dtype=dtype, requires_grad=True)
    g = torch.randn(rows, layer.out_features, dtype=dtype)
    with host_time.as_on_a_gpu(small=small) as gpu:
        step = host_time.step_of(layer.to(dtype), x, g)
        # what is compiled and cached is so by the second
        step()
        return sorted(host_time.launches(step, gpu))


def test_a_linear_layer_launches_four_kernels(host_time):
    assert launched(host_time, nn.Linear(8, 8), torch.float32, small=True) == ["addmm", "mm", "mm", "sum"]


@pytest.mark.parametrize(
    ("center", "storage", "small", "expected"),
    [
        more(False, None, True, ["sketch", "gradient at once", "addmm", "mm", "random_"]),
        (True, None, True, ["sketch at once", "gradient at once", "addmm", "mm", "random_"]),
        more(False, None, False, ["sketch", "sketch", "outer", "addmm", "addmm_", "mm", "random_"]),
        (True, None, False, ["sketch", "sketch", "outer", "mean", "addmm", "addmm_", "mm", "random_", "sum"]),
        more(False, "int8", True, ["codes", "sketch", "product of codes", "addmm", "mm", "random_"]),
        more(True, "int8", True, ["codes", "sketch", "product of codes", "mean", "addmm", "mm", "random_", "sum"]),
    ],
)
def test_what_a_sketched_layer_launches(host_time, center, storage, small, expected):
    """Few rows: a seed, the sketch, the weight's gradient out of g; and the two other products.

    Many: a seed, about the mean, the sketch of x, the sum of its parts; of g the sketch, and what its product with the
    other sketch is added to.
    """
    layer = RMMLinear(8, 8, config=RMMConfig(ratio=0.5, center=center, storage=storage, min_rows=1))
    dtype = torch.float32 if storage is None else torch.bfloat16
    found = launched(host_time, layer, dtype, small=small)
    assert found == sorted(KERNELS.get(name, name) for name in expected)


@pytest.mark.parametrize(
    ("sketch", "expected"),
    [
        ("rows_with_replacement", ["draws", "rows", "draws", "rows"]),
        ("rows_without_replacement", ["draws", "sort", "rows"] * 2),
        ("crs", ["norms", "weights", "weighted", "rows", "rows"]),
    ],
)
def test_rows_are_drawn_by_few_launches(host_time, sketch, expected):
    layer = RMMLinear(8, 8, config=RMMConfig(ratio=0.3, sketch=sketch, center=False, min_rows=1))
    found = launched(host_time, layer, torch.float32, small=False, rows=8192)
    # and the products: of the sketches, of the input and for its gradient; a gradient that is centred by nothing
    expected = [*expected, "addmm", "addmm_", "mm", "random_", "sum"]
    assert found == sorted(KERNELS.get(name, name) for name in expected)


def test_the_heaviest_rows_are_found_by_few_launches(host_time):
    layer = RMMLinear(8, 8, config=RMMConfig(ratio=0.3, sketch="wta_crs", center=False, min_rows=1))
    assert len(launched(host_time, layer, torch.float32, small=False, rows=8192)) <= 25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "ratio", "rows", "more"),
    [("int8", 0.3, 128, []), ("int4", 0.05, 8192, ["sum"]), ("int8", 0.05, 8192, ["sum"])],
)
def test_codes_that_are_not_made_in_one_pass_take_a_launch_more(host_time, storage, ratio, rows, more):
    """The sketch by way of the memory; what they take off the mean comes with the codes, and the sums of all blocks."""
    layer = RMMLinear(8, 8, config=RMMConfig(ratio=ratio, storage=storage, min_rows=1))
    found = launched(host_time, layer, torch.bfloat16, small=True, rows=rows)
    of_x = ["mean", "sketch", "quantize and mean", "sum"]
    # of many blocks' sums of g, their own sum comes first
    expected = [*of_x, "sketch", *more, "product of codes", "addmm", "mm", "random_"]
    assert found == sorted(KERNELS.get(name, name) for name in expected)


@pytest.mark.parametrize(
    ("rows", "features", "of_x", "of_g"),
    [
        (256, 8, ["sketch at once"], ["gradient at once"]),
        more(257, 8, ["mean", "sketch", "sum"], ["gradient at once"]),
        more(512, 8, ["mean", "sketch", "sum"], ["gradient at once"]),
        # the blocks' sums of g are more than the product adds up by itself
        more(513, 8, ["mean", "sketch", "sum"], ["sketch", "sum", "product"]),
        # 1024 tiles of 32 x 32, and a row of them more
        more(64, 1024, ["sketch at once"], ["gradient at once"]),
        more(64, 1025, ["sketch at once"], ["sketch", "product"]),
    ],
)
def test_what_is_done_at_once(host_time, rows, features, of_x, of_g):
    layer = RMMLinear(features, features, config=RMMConfig(ratio=0.5, min_rows=1))
    found = launched(host_time, layer, torch.float32, small=True, rows=rows)
    expected = [*of_x, *of_g, "addmm", "mm", "random_"]
    assert found == sorted(KERNELS.get(name, name) for name in expected)


def test_gradients_of_feed_forward_layers_are_formed_at_once():
    for rows, blocks, out, features, dtype, expected in (
        (128, 2, 3072, 768, torch.bfloat16, True),
        (128, 2, 1024, 4096, torch.float16, True),
        (128, 2, 1024, 4097, torch.float16, False),
        (128, 2, 3072, 768, torch.float32, False),
        (513, 9, 64, 64, torch.bfloat16, False),
        (512, 4, 64, 64, torch.bfloat16, False),
    ):
        assert reference.holds_gradient(rows, blocks, out, features, dtype) == expected


def rows_of_a_run(host_time, folder, monkeypatch, *options: str) -> list[dict[str, str]]:
    monkeypatch.setattr(host_time, "_STEPS", 16)
    monkeypatch.setattr(host_time, "_WARM_STEPS", 2)
    threads = torch.get_num_threads()
    try:
        assert host_time.main(["--repeats", "2", "--results", str(folder), *options]) == 0
    finally:
        torch.set_num_threads(threads)
    (path,) = folder.glob("host-time-*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_file_has_a_row_a_layer(host_time, tmp_path, monkeypatch, capsys):
    found = rows_of_a_run(host_time, tmp_path, monkeypatch, "--modes", "eager")
    assert [(row["layers"], row["layer"], row["center"], row["launches"]) for row in found] == [
        (layers, *layer)
        for layers in ("1", "8")
        for layer in (("nn.Linear", "", "4"), ("hadamard", "False", "5"), ("hadamard", "True", "5"))
    ]
    for row in found:
        assert row["mode"] == "eager"
        assert (float(row["over_linear"]) == 1) == (row["layer"] == "nn.Linear")
        # of a few steps on a machine that others use, a forward pass may seem to take longer than a step
        assert float(row["forward_us"]) > 0
        assert float(row["step_us_q20"]) <= float(row["step_us"]) <= float(row["step_us_q80"])
        assert row["commit"]
    assert "host-time-" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_layers_are_timed_as_well(host_time, tmp_path, monkeypatch):
    monkeypatch.setattr(host_time, "DEPTHS", (2,))
    found = rows_of_a_run(host_time, tmp_path, monkeypatch, "--modes", "compiled")
    assert [(row["mode"], row["layers"], row["launches"]) for row in found] == [("compiled", "2", "")] * 3


def test_bad_options_are_refused(host_time, capsys):
    for option, value in (("--repeats", "0"), ("--modes", "eager,graph")):
        with pytest.raises(SystemExit):
            host_time.main([option, value])
        assert f"{option} {value}" in capsys.readouterr().err
