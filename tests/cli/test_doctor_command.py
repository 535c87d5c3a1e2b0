"""`rmm-linear doctor`: one screen that says what runs."""

import json

import pytest
import torch

from rmm_linear import backend
from rmm_linear.cli import doctor as command
from rmm_linear.cli import main
from rmm_linear_kernels.hadamard import reference


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(command, "_ON_CPU", (128, 16))
    monkeypatch.setattr(backend, "_state", backend._State("auto"))


def doctor(capsys, *arguments, status=0):
    assert main(["doctor", "--device", "cpu", *arguments]) == status
    return capsys.readouterr().out


def assert_it_fits_the_screen(lines):
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120


def test_a_cpu_runs_plain_torch_and_says_so(capsys):
    text = doctor(capsys)
    lines = text.splitlines()
    assert torch.__version__ in lines[0]
    assert_it_fits_the_screen(lines)
    for name in backend.KERNELS:
        assert sum(line.startswith(f"{name} ") and " torch " in line for line in lines) == 1
    assert lines[-1] == "no kernel for any: the tensors are on cpu, and the kernels are for GPUs"


@pytest.mark.usefixtures("draws_of_a_gpu")
def test_a_wrong_kernel_and_a_broken_one_are_named(capsys, monkeypatch):
    def wrong(x, *args, **kwargs):
        return 1.5 * reference.hadamard_sketch(x, *args, **kwargs)

    def broken(*args, **kwargs):
        raise RuntimeError("PassManager::run failed\n" + "a line of its log\n" * 40)

    kernels = {"hadamard_sketch": wrong, "quantize": broken}
    monkeypatch.setattr(backend, "_launcher", kernels.get)
    monkeypatch.setattr(
        backend,
        "_reason_against",
        lambda name, x: None if name in kernels and backend.chosen() != "torch" else "no kernel",
    )
    text = doctor(capsys, status=1)
    assert "WRONG: hadamard_sketch differ from plain torch by more than rounding. Set RMM_LINEAR_KERNELS=torch" in text
    assert "no kernel for quantize: RuntimeError: PassManager::run failed a line" in text
    assert_it_fits_the_screen(text.splitlines())
    line = next(line for line in text.splitlines() if line.startswith("hadamard_sketch "))
    assert line.split()[1] == "triton"
    assert abs(float(line.split()[-1]) - 0.5) < 0.02


def test_kernels_that_are_forced_and_cannot_run_are_an_error(capsys, monkeypatch):
    monkeypatch.setattr(backend, "_state", backend._State("triton"))
    lines = doctor(capsys, status=1).splitlines()
    assert "no kernel for any: the tensors are on cpu, and the kernels are for GPUs" in lines
    assert lines[-1].endswith("layers raise where they cannot run. Set RMM_LINEAR_KERNELS=auto")


def test_json_is_complete_and_nothing_is_left_behind(capsys):
    found = json.loads(doctor(capsys, "--json", "--dtype", "float32"))
    assert found["kernels_chosen"] == "auto"
    assert {check["runs"] for check in found["kernels"]} == {"torch"}
    assert all(check["torch_milliseconds"] > 0 for check in found["kernels"])
    assert backend.chosen() == "auto"
    assert backend._state.broken == {}
