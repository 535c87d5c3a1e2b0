"""Every Triton kernel compiles for sm_80 and sm_90, on a machine without a GPU, and spills no register."""

import importlib
import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'rmm-linear[kernels]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rmm_linear.backend import KERNELS
from rmm_linear.backend import STORAGE_BITS as BITS

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.uint8: "u8"}
TYPES[torch.int16] = "i16"
X, SEED, MEAN = torch.randn(2048, 768), torch.tensor(3), torch.randn(768)


def compile_for(capability, kernel, *args, grid, warmup, num_warps=4, num_stages=None, **constants):
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, fixed, attributes = {}, {}, {}
    for place, (name, value) in enumerate(values.items()):
        if value is None or name in constants:
            signature[name], fixed[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[place,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
    source = ASTSource(kernel, signature, fixed, attributes)
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def launches(dtype):
    """Calls of each launcher: (name, arguments, options)."""
    x = X.to(dtype)
    # both sizes of a result, a matrix of Paley's, and blocks of more than 64 rows
    for rows, blocks, kept in ((2048, 32, 32), (2048, 32, 58), (300, 5, 20), (2048, 4, 2)):
        how = {"blocks": blocks, "kept": kept, "scale": 1.0, "dtype": dtype}
        yield "hadamard_sketch", (x[:rows], SEED, MEAN), how
    for gaussian in (False, True):
        yield "random_projection", (x, SEED, MEAN), {"rank": 512, "gaussian": gaussian, "scale": 1.0, "dtype": dtype}
    for kind, bits in BITS.items():
        group = 1024 // bits
        yield "quantize", (x, SEED, MEAN), {"kind": kind, "group": group}
        codes = torch.zeros(2048, 96 * bits, dtype=torch.uint8)
        scales = torch.zeros(-(-2048 // group), 768, dtype=torch.bfloat16)
        yield (
            "dequantize",
            (codes, scales, scales, SEED),
            {"kind": kind, "group": group, "features": 768, "dtype": dtype},
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_without_spills(capability, dtype, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **how: compile_for(capability, kernel, *args, **how))
    spilled, compiled = [], set()
    with knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope():
        # a binary out of a cache has no log
        knobs.cache.dir, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = str(tmp_path), True, True
        for name, arguments, options in launches(dtype):
            module = importlib.import_module(f"rmm_linear_kernels.{KERNELS[name]}.kernel")
            if name == "quantize":
                # groups of more rows than a program holds at once
                with monkeypatch.context() as patch:
                    patch.setattr(module, "_MOST_ROWS", 64)
                    getattr(module, name)(*arguments, **options)
                    capfd.readouterr()
            getattr(module, name)(*arguments, **options)
            log = capfd.readouterr().out
            assert "bytes spill stores" in log
            compiled.add(name)
            spilled += [f"{name} {options}: {found}" for found in re.findall(r"[1-9]\d* bytes spill \w+", log)]
    assert spilled == []
    assert compiled == set(KERNELS)
