"""The implementation that runs, and what happens where a kernel cannot."""

import itertools
import subprocess
import sys
import warnings
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch

from rmm_linear import RMMConfig, RMMLinear, backend, use_kernels
from rmm_linear_kernels.hadamard import reference

X = torch.randn(100, 8)
OPTIONS = {"blocks": 2, "kept": 10, "scale": 0.125, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def unspoilt(monkeypatch):
    """A state of its own for each test, whatever the environment asks for."""
    monkeypatch.setattr(backend, "_state", backend._State("auto"))
    backend._unusable.cache_clear()
    yield
    backend._unusable.cache_clear()


def sketch(x):
    return backend.run("hadamard_sketch", x, torch.tensor(3), None, **OPTIONS)


@pytest.fixture
def launches(monkeypatch):
    """A GPU whose kernels are `launches.kernel`, and whose references return "reference"."""
    found = SimpleNamespace(names=[], kernel=None)

    def launcher(name):
        found.names.append(name)
        return found.kernel

    monkeypatch.setattr(backend, "_launcher", launcher)
    monkeypatch.setattr(backend, "_REFERENCES", dict.fromkeys(backend.KERNELS, lambda x: "reference"))
    monkeypatch.setattr(backend, "_unusable", lru_cache(lambda device: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    return found


def on_a_gpu(dtype=torch.float32, index=0):
    return SimpleNamespace(is_cuda=True, is_cpu=False, is_meta=False, device=torch.device("cuda", index), dtype=dtype)


def failing(*args):
    raise RuntimeError("Failed to find C compiler")


def out_of_memory(*args):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_plain_torch_runs_on_a_cpu_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice in ("auto", "torch"):
            with use_kernels(choice):
                assert torch.equal(sketch(X), reference.hadamard_sketch(X, torch.tensor(3), None, **OPTIONS))


def test_choices_nest_and_end():
    assert backend.chosen() == "auto"
    with use_kernels("torch"):
        assert backend.chosen() == "torch"
        with use_kernels("triton"):
            assert backend.chosen() == "triton"
        assert backend.chosen() == "torch"
    assert backend.chosen() == "auto"
    use_kernels("torch")
    assert backend.chosen() == "torch"


def test_a_wrong_choice_is_named():
    with pytest.raises(ValueError, match="choice='cuda' is none of auto, triton, torch"):
        use_kernels("cuda")
    environment = {"PYTHONPATH": ":".join(sys.path), backend.ENVIRONMENT: "on"}
    command = [sys.executable, "-c", "import rmm_linear"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "RMM_LINEAR_KERNELS='on' is none of auto, triton, torch" in done.stderr


def test_triton_by_force_says_why_it_cannot():
    layer = RMMLinear(8, 4, config=RMMConfig(min_rows=1))
    message = r"cpu, and the kernels are for GPUs; use_kernels\('auto"
    with use_kernels("triton"), pytest.raises(ValueError, match=message):
        layer(X)


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_taken_where_it_can_run(launches, index):
    launches.kernel = lambda x: "kernel"
    assert backend.run("hadamard_sketch", on_a_gpu(index=index)) == "kernel"
    with use_kernels("torch"):
        assert backend.run("hadamard_sketch", on_a_gpu()) == "reference"


def test_kernels_that_fail_are_replaced_with_one_warning_for_all(launches):
    launches.kernel = failing
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for dtype, name in itertools.product((torch.float32, torch.bfloat16), ("hadamard_sketch", "quantize")):
                assert backend.run(name, on_a_gpu(dtype)) == "reference"
    assert len(said) == 1
    message = "hadamard_sketch failed for torch.float32 (RuntimeError: Failed to find C compiler)"
    assert message in str(said[0].message)
    assert "doctor" in str(said[0].message)
    # each is tried once
    assert len(launches.names) == len(backend._state.broken) == 4


@pytest.mark.parametrize("why", ["asked for", "captured", "no memory"])
def test_failures_that_are_no_fault_of_a_kernel_or_can_not_be_passed_over_raise(launches, monkeypatch, why):
    expected = {
        "asked for": (RuntimeError, "C compiler"),
        "captured": (RuntimeError, "run a step before the capture"),
        "no memory": (torch.OutOfMemoryError, "CUDA out of memory"),
    }
    launches.kernel = failing if why != "no memory" else out_of_memory
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    kind, message = expected[why]
    with use_kernels("triton" if why == "asked for" else "auto"), pytest.raises(kind, match=message):
        backend.run("hadamard_sketch", on_a_gpu())
    assert backend._state.broken == {}


def test_old_gpus_and_missing_triton_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "Tesla T4 has compute capability 7.5" in backend._unusable(0)
    backend._unusable.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backend._unusable(0) is None
    backend._unusable.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "need an NVIDIA GPU" in backend._unusable(0)
    backend._unusable.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton cannot be imported" in backend._unusable(0)
    assert "pip install 'rmm-linear[kernels]'" in backend._unusable(0)


def test_every_dtype_without_a_kernel_has_its_reference(launches):
    launches.kernel = lambda x: "kernel"
    for dtype in (torch.float64, torch.float8_e4m3fn):
        for choice in ("auto", "triton"):
            with use_kernels(choice), warnings.catch_warnings():
                warnings.simplefilter("error")
                assert backend.run("hadamard_sketch", on_a_gpu(dtype)) == "reference"


def test_float64_on_a_cpu_runs_though_kernels_are_asked_for():
    with use_kernels("triton"):
        assert sketch(X.double()).shape == (20, 8)


def test_half_precision_keeps_float32_sums_in_autocast():
    """Of sketches that are called by themselves, as closed forms do."""
    for storage in (None, "int8"):
        for name in ("hadamard", "gaussian"):
            sketched = RMMConfig(ratio=0.5, sketch=name, storage=storage, min_rows=1).sketch_object
            g, seed = torch.randn(100, 6), torch.tensor(3)
            expected = sketched.backward(g, sketched.compress(X, seed))
            with torch.autocast("cpu", torch.bfloat16):
                found = sketched.backward(g, sketched.compress(X, seed))
            assert torch.equal(found[0], expected[0])
