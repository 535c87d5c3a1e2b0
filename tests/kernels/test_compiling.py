"""Every Triton kernel compiles for sm_80 and sm_90, on a machine without a GPU, and spills no register."""

import importlib
import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'rmm-linear[kernels]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from pretended_gpu import pretended_gpu
from triton import knobs
from triton.runtime.jit import JITFunction

import rmm_linear_kernels

# Rows, inputs and outputs of a layer.
SHAPE = (2048, 768, 1536)


def all_kernels():
    """Device functions are called by kernels; what is launched is named `_xyz_kernel`."""
    folder = Path(rmm_linear_kernels.__file__).parent
    modules = [
        importlib.import_module(f"rmm_linear_kernels.{path.parent.name}.kernel") for path in folder.glob("*/kernel.py")
    ]
    found = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    return {name for name, value in found.items() if isinstance(value, JITFunction)}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_kernel_compiles_without_spills(target, benchmark_script, tmp_path, capfd):
    each_kernel = benchmark_script("each_kernel")
    compiled, spilled = set(), []
    with knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope(), pretended_gpu(target) as gpu:
        # a binary out of a cache has no log
        knobs.cache.dir, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = str(tmp_path), True, True
        cases = each_kernel.cases((SHAPE,), device=torch.device("cpu"), dtype=torch.bfloat16)
        for case in {case.function: case for case in reversed(list(cases))}.values():
            gpu.launches.clear()
            each_kernel.call(each_kernel.implementation(case.op, case.function, "kernel"), case.make())
            log = capfd.readouterr().out
            compiled |= {launch.kernel for launch in gpu.launches}
            spilled += [f"{case.name}: {found}" for found in re.findall(r"[1-9]\d* bytes spill \w+", log)]
            if "bytes spill stores" in log:
                compiled |= {f"{launch.kernel} with a log" for launch in gpu.launches}
    assert spilled == []
    assert compiled == {each for name in all_kernels() for each in (name, f"{name} with a log")}
