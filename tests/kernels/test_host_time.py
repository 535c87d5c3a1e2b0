"""What a step launches on a GPU, counted without one; and the benchmark of the host's time."""

import csv

import pytest
import torch
from torch import nn

from rmm_linear import RMMConfig, RMMLinear

pytest.importorskip("triton")

KERNELS = {
    "sketch": "_hadamard_sketch_kernel",
    "codes": "_hadamard_sketch_quantized_kernel",
    "mean": "_sampled_mean_kernel",
    "outer": "_outer_product_of_sums_kernel",
    "product": "_grad_weight_kernel",
    "product of codes": "_low_bit_grad_weight_kernel",
}


@pytest.fixture
def host_time(benchmark_script):
    return benchmark_script("host_time")


def launched(host_time, layer: nn.Module, dtype: torch.dtype, *, small: bool) -> list[str]:
    x = torch.randn(128, 8, dtype=dtype, requires_grad=True)
    g = torch.randn(128, 8, dtype=dtype)
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
        (False, None, True, ["sketch", "sketch", "product", "addmm", "mm", "randint"]),
        (True, None, True, ["sketch", "sketch", "product", "mean", "addmm", "mm", "randint", "sum"]),
        (False, None, False, ["sketch", "sketch", "outer", "addmm", "addmm_", "mm", "randint"]),
        (True, None, False, ["sketch", "sketch", "outer", "mean", "addmm", "addmm_", "mm", "randint", "sum"]),
        (True, "int8", True, ["codes", "sketch", "product of codes", "mean", "addmm", "mm", "randint", "sum"]),
    ],
)
def test_a_sketched_layer_launches_no_more_than_twice_as_many_and_one(host_time, center, storage, small, expected):
    """A seed, about the mean, the sketch of x, the sum of its parts; of g the sketch; and the two other products.

    Where the product of the sketches is a large one, what it is added to is a launch of its own.
    """
    layer = RMMLinear(8, 8, config=RMMConfig(ratio=0.5, center=center, storage=storage, min_rows=1))
    dtype = torch.float32 if storage is None else torch.bfloat16
    found = launched(host_time, layer, dtype, small=small)
    assert found == sorted(KERNELS.get(name, name) for name in expected)
    assert len(found) <= 2 * 4 + 1


def test_the_file_has_a_row_a_layer(host_time, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host_time, "_STEPS", 3)
    monkeypatch.setattr(host_time, "_WARM_STEPS", 2)
    threads = torch.get_num_threads()
    try:
        assert host_time.main(["--repeats", "2", "--results", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("host-time-*.csv")
    with path.open(newline="") as file:
        exact, *sketched = csv.DictReader(file)
    assert (exact["layer"], exact["launches"], float(exact["over_linear"])) == ("nn.Linear", "4", 1.0)
    assert [(row["layer"], row["center"], row["launches"]) for row in sketched] == [
        ("hadamard", "False", "6"),
        ("hadamard", "True", "8"),
    ]
    for row in (exact, *sketched):
        assert 0 < float(row["forward_us"]) < float(row["step_us"])
        assert float(row["step_us_q20"]) <= float(row["step_us"]) <= float(row["step_us_q80"])
        assert row["commit"]
    assert str(path) in capsys.readouterr().out


def test_no_repetitions_are_refused(host_time, capsys):
    with pytest.raises(SystemExit):
        host_time.main(["--repeats", "0"])
    assert "--repeats 0" in capsys.readouterr().err
