"""The kernels' benchmark: a row a case, the twins alone on a processor, kernels that are wrong or break are named."""

import csv
import functools
import importlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch


@pytest.fixture
def each_kernel(benchmark_script):
    return benchmark_script("each_kernel")


def run(each_kernel, folder: Path, *options: str) -> tuple[int, list[dict[str, str]]]:
    status = each_kernel.main(["--device", "cpu", "--repeats", "1", "--results", str(folder), *options])
    (path,) = folder.glob("kernels-*.csv")
    with path.open(newline="") as file:
        return status, list(csv.DictReader(file))


@pytest.mark.slow
def test_a_processor_times_the_twins_of_every_op_that_has_a_kernel(each_kernel, tmp_path) -> None:
    status, rows = run(each_kernel, tmp_path)
    assert status == 0
    assert {row["op"] for row in rows} == {
        "hadamard_at_once",
        "hadamard_sketch",
        "hadamard_sketch_quantized",
        "random_projection",
        "row_gather",
        "row_sampling",
        "sampled_mean",
        "quantize_and_mean",
        "low_bit",
        "sketched_grad_weight",
    }
    for row in rows:
        assert float(row["twin_us"]) > 0
        assert float(row["copy_us"]) > 0
        assert row["kernel_us"] == row["kernel_error"] == ""
        assert row["note"] == "kernels need a GPU"
        assert row["commit"]
        # bfloat16 has eight bits, and int4's steps are wide
        assert (
            0
            <= float(row["twin_error"])
            < (0.2 if "to int4" in row["name"] else 0.05 if "to fp8" in row["name"] else 0.01)
        )


def launchers(factor: float):
    """Kernels that are their twins, times a factor."""

    def launcher_of(case, device):
        twin = getattr(importlib.import_module(f"rmm_linear_kernels.{case.op}.reference"), case.function)

        # `call` asks for the signature, which is the twin's.
        @functools.wraps(twin)
        def launch(**arguments):
            found = twin(**arguments)
            return tuple(part * factor for part in found) if isinstance(found, tuple) else found * factor

        return launch

    return launcher_of


def test_a_kernel_is_compared_with_its_twin_a_copy_and_the_rival(each_kernel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(each_kernel, "launcher_of", launchers(1.0))
    status, rows = run(each_kernel, tmp_path, "--only", "sketched_grad_weight, ")
    assert status == 0
    products = [row for row in rows if "grad_weight, ratio 0.25" in row["name"]]
    assert products
    for row in products:
        kernel, copy = float(row["kernel_us"]), float(row["copy_us"])
        assert math.isclose(float(row["kernel_over_copy"]), kernel / copy, rel_tol=1e-3)
        assert math.isclose(float(row["kernel_gb_per_s"]), int(row["moved_bytes"]) / kernel / 1e3, rel_tol=1e-3)
        assert math.isclose(float(row["kernel_tflop_per_s"]), int(row["flops"]) / kernel / 1e6, rel_tol=1e-3)
        assert math.isclose(float(row["kernel_over_rival"]), kernel / float(row["rival_us"]), rel_tol=1e-3)
        assert float(row["kernel_us_q20"]) <= kernel <= float(row["kernel_us_q80"])
        assert row["kernel_error"] == row["twin_error"]
        assert row["failed"] == "False"


def test_a_kernel_that_is_less_exact_than_it_may_be_fails(each_kernel, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(each_kernel, "launcher_of", launchers(1.02))
    status, rows = run(each_kernel, tmp_path, "--only", "hadamard_sketch of x")
    assert status == 1
    assert all(row["failed"] == "True" and "the twin's" in row["note"] for row in rows)
    assert "error 0.02" in capsys.readouterr().out


def test_a_kernel_that_breaks_is_named_and_the_others_are_measured(each_kernel, tmp_path, monkeypatch) -> None:
    def broken(case, device):
        def launch(x, wanted):
            return x

        return launch if case.function == "row_norms" else None

    monkeypatch.setattr(each_kernel, "launcher_of", broken)
    status, rows = run(each_kernel, tmp_path, "--only", "row")
    assert status == 1
    by_function = {row["name"].split(",")[0]: row for row in rows}
    assert "'wanted'" in by_function["row_norms"]["note"]
    assert float(by_function["gather_rows"]["twin_us"]) > 0


def test_a_rival_that_breaks_leaves_the_kernel_its_figures(each_kernel, monkeypatch) -> None:
    monkeypatch.setattr(each_kernel, "launcher_of", launchers(1.0))

    def rival(arguments):
        raise RuntimeError("no such library")

    device = torch.device("cpu")
    cases = each_kernel.cases(((256, 48, 80),), device=device, dtype=torch.float32)
    case = next(case for case in cases if case.function == "sketched_grad_weight")
    row = each_kernel.measure(replace(case, rival=rival), device=device, dtype=torch.float32, repeats=1)
    assert not row.failed
    assert row.kernel_over_copy > 0
    assert row.rival_us == row.kernel_over_rival == ""
    assert row.note == "rival: RuntimeError: no such library"


@pytest.mark.slow
def test_cases_of_ragged_shapes_run_in_every_dtype(each_kernel) -> None:
    device = torch.device("cpu")
    for dtype in (torch.float32, torch.float16):
        for case in each_kernel.cases(((203, 37, 53),), device=device, dtype=dtype):
            row = each_kernel.measure(case, device=device, dtype=dtype, repeats=1)
            assert not row.failed, row


def test_files_and_functions_that_are_not_there_are_no_error(each_kernel) -> None:
    assert each_kernel.implementation("trigonometric_sketch", "trigonometric_sketch", "no_such_file") is None
    assert each_kernel.implementation("hadamard_sketch", "no_such_function", "reference") is None
    assert each_kernel.implementation("hadamard_sketch", "hadamard_sketch", "reference") is not None


@pytest.mark.parametrize(
    "options",
    [
        ["--repeats", "0"],
        ["--dtype", "int8"],
        ["--device", "foo"],
        ["--only", "none such"],
        ["--share", "3"],
        ["--share", "9999/9999"],
        ["--results", "/dev/null/x"],
    ],
    ids=str,
)
def test_bad_options_are_named(each_kernel, options, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        each_kernel.main(["--device", "cpu", *options])
    assert options[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_what_to_do(each_kernel, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        each_kernel.main([])
    assert "no CUDA device; use --device cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_times_its_kernels(each_kernel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(each_kernel.roofline, "GOALS", {(256, 48, 80): {}})
    options = ["--device", "cuda", "--repeats", "2", "--results", str(tmp_path)]
    assert each_kernel.main(options) == 0
    with next(tmp_path.glob("kernels-*.csv")).open(newline="") as file:
        assert all(float(row["kernel_us"]) > 0 for row in csv.DictReader(file) if row["note"] != "no kernel")
