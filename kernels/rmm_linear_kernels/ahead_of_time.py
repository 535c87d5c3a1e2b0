"""What a kernel becomes on a GPU, found out without one: registers, spills, shared memory, and the instructions chosen.

Triton compiles for any GPU on any machine, and its wheel brings the assembler and the disassembler. Each build that a
`kernel.py` lists is compiled for each target, and

- registers, stack frame and spills of the NVIDIA targets are read from the log of the very `ptxas` run that makes the
  binary. Neither the stack frame nor the stores to local memory (STL) tells a spill: the library's sine and cosine,
  and so `tl.randn`, have a frame of 32 bytes and 16 such stores a kernel (not with triton 3.9), with nothing spilled;
- those of the AMD targets are read from the metadata that the compiler writes after the assembly;
- instructions are counted in the disassembly. They are counted as written, not as executed: an instruction of a loop
  counts once.

Not under TRITON_INTERPRET, where `triton.jit` makes nothing that could be compiled.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import io
import multiprocessing
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelInterface

import rmm_linear_kernels

from .builds import Build


@dataclass(frozen=True)
class Target:
    """A generation of GPUs: what triton calls it, and what limits the programs that run at once.

    Attributes:
        triton_name: Arguments of triton's `GPUTarget`.
        register_file: Registers that each quarter of a multiprocessor has for one lane.
        register_step: Registers of a lane are given out in multiples of this.
        warps: Warps that a multiprocessor holds at most.
        blocks: Programs that a multiprocessor holds at most.
        shared: Bytes of shared memory of a multiprocessor.
        shared_of_block: Bytes of it that one program may have.
        shared_reserved: Bytes of it that each program takes for the system.
    """

    triton_name: tuple[str, Any, int]
    register_file: int
    register_step: int
    warps: int
    blocks: int
    shared: int
    shared_of_block: int
    shared_reserved: int


_KIB = 1024
TARGETS = {
    "sm_80": Target(("cuda", 80, 32), 512, 8, 64, 32, 164 * _KIB, 163 * _KIB, _KIB),
    "sm_90": Target(("cuda", 90, 32), 512, 8, 64, 32, 228 * _KIB, 227 * _KIB, _KIB),
    "sm_100": Target(("cuda", 100, 32), 512, 8, 64, 32, 228 * _KIB, 227 * _KIB, _KIB),
    "gfx942": Target(("hip", "gfx942", 64), 512, 8, 32, 32, 64 * _KIB, 64 * _KIB, 0),
}
# Tiles are sized for these. gfx942 is compiled for, so that nothing in the kernels is NVIDIA's alone.
SUPPORTED = ("sm_80", "sm_90", "sm_100")
# Parts of a multiprocessor with registers of their own.
_QUARTERS = 4
# What is counted over what was: compilers shuffle a few instructions.
_TOLERATED = 1.05

# By triton's name of the backend. sm_90 has HGMMA beside HMMA, sm_100 UTCHMMA and its kind.
_MATRIX = {"cuda": re.compile(r"(UTC)?[A-Z]G?MMA\b"), "hip": re.compile(r"v_s?mfmac?_")}
_GLOBAL_LOAD = {
    "cuda": re.compile(r"(LDG|LDGSTS|UTMALDG|UBLKCP)\b"),
    "hip": re.compile(r"(global|buffer)_load_"),
}
_WIDE_LOAD = {
    "cuda": re.compile(r"(LDG|LDGSTS)\b.*\.(128|256)\b|(UTMALDG|UBLKCP)\b"),
    "hip": re.compile(r"(global|buffer)_load_(lds_)?dwordx4\b"),
}
_LOCAL_LOAD = {"cuda": re.compile(r"LDL\b"), "hip": re.compile(r"scratch_load_")}
_LOCAL_STORE = {"cuda": re.compile(r"STL\b"), "hip": re.compile(r"scratch_store_")}
# "/*0560*/  @!P0 HGMMA.64x128x16.F32.BF16 R88, ...": the opcode alone; AMD's assembly has one at each line's start
_OPCODES = {
    "cuda": re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)"),
    "hip": re.compile(r"^\t([a-z]\w+)", re.MULTILINE),
}


@dataclass(frozen=True)
class Resources:
    """What one build takes on one target.

    Attributes:
        name: The build's.
        target: A key of `TARGETS`.
        registers: Registers a lane.
        spill_stores: Bytes a lane that are written for want of registers.
        spill_loads: Bytes a lane that are read back; equal to the stores on AMD, where only their sum is told.
        scalar_spills: Scalar registers spilled (AMD; most often into vector registers, which costs no memory).
        stack: Bytes a lane of stack frame, spills and library functions' own arrays.
        shared: Bytes of shared memory a program.
        warps: Warps of a program.
        resident_warps: Warps that a multiprocessor holds at once, by registers and shared memory.
        instructions: All instructions, as written.
        matrix_instructions: Instructions that multiply matrices.
        global_loads: Instructions that load from global memory.
        wide_loads: Those of them that load 128 bits a lane or more, or whole tiles.
        local_loads: Instructions that load from local memory.
        local_stores: Instructions that store to local memory.
        triton: The version that compiled.
        fingerprint: Of what was compiled, see `fingerprint`.
    """

    name: str
    target: str
    registers: int
    spill_stores: int
    spill_loads: int
    scalar_spills: int
    stack: int
    shared: int
    warps: int
    resident_warps: int
    instructions: int
    matrix_instructions: int
    global_loads: int
    wide_loads: int
    local_loads: int
    local_stores: int
    triton: str
    fingerprint: str


def all_builds() -> list[Build]:
    """Collect what every `<op>/kernel.py` of this package ships.

    Raises:
        ValueError: If two builds have one name, or a launchable kernel's file lists no builds.
    """
    found: dict[str, Build] = {}
    for module in _kernel_modules():
        kernels = [name for name, value in vars(module).items() if _is_launched(name, value)]
        if not hasattr(module, "builds"):
            if kernels:
                raise ValueError(f"{module.__name__} has the kernels {kernels} and no builds(): list what ships")
            continue
        for build in module.builds():
            if build.name in found:
                raise ValueError(f"{module.__name__}: the name {build.name!r} is taken by another build")
            found[build.name] = build
    return list(found.values())


def unlisted_kernels() -> list[str]:
    """Name the kernels that no build compiles.

    Returns:
        "module._name_kernel" of each `triton.jit` function that is named like a kernel and is in no build.
    """
    listed = {id(build.kernel) for build in all_builds()}
    return [
        f"{module.__name__}.{name}"
        for module in _kernel_modules()
        for name, value in vars(module).items()
        if _is_launched(name, value) and id(value) not in listed
    ]


def _kernel_modules() -> Iterator[Any]:
    for folder in pkgutil.iter_modules(rmm_linear_kernels.__path__):
        path = f"{rmm_linear_kernels.__name__}.{folder.name}.kernel"
        if folder.ispkg and importlib.util.find_spec(path) is not None:
            yield importlib.import_module(path)


def _is_launched(name: str, value: Any) -> bool:
    """Device functions are called by kernels; what is launched is named `_xyz_kernel`."""
    return name.endswith("_kernel") and isinstance(value, KernelInterface)


def compile_build(build: Build, target: str) -> Resources:
    """Compile one build for one target, without a GPU and without triton's cache.

    Args:
        build: What to compile.
        target: A key of `TARGETS`.

    Raises:
        ValueError: If the target is not known, or arguments of the kernel are not described by the build.
        RuntimeError: Under TRITON_INTERPRET, or if a report of the compiler's is not understood.
    """
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(log):
            compiled = _binary(build, target, folder)
        backend = TARGETS[target].triton_name[0]
        figures = _from_ptxas(log.getvalue()) if backend == "cuda" else _from_amd_metadata(compiled.asm["amdgcn"])
        code = _disassembled(compiled.asm["cubin"], folder) if backend == "cuda" else compiled.asm["amdgcn"]
    opcodes = _OPCODES[backend].findall(code)
    if not opcodes:
        raise RuntimeError(f"{build.name} for {target}: no instruction was recognised in the disassembly")

    def count(patterns: dict[str, re.Pattern[str]]) -> int:
        return sum(patterns[backend].match(opcode) is not None for opcode in opcodes)

    shared = figures.pop("static_shared") + compiled.metadata.shared
    return Resources(
        name=build.name,
        target=target,
        **figures,
        shared=shared,
        warps=build.num_warps,
        resident_warps=resident_warps(target, registers=figures["registers"], shared=shared, warps=build.num_warps),
        instructions=len(opcodes),
        matrix_instructions=count(_MATRIX),
        global_loads=count(_GLOBAL_LOAD),
        wide_loads=count(_WIDE_LOAD),
        local_loads=count(_LOCAL_LOAD),
        local_stores=count(_LOCAL_STORE),
        triton=triton.__version__,
        fingerprint=fingerprint(build),
    )


def ships(build: Build, target: str) -> bool:
    """Return whether a build is launched on a target at all.

    Args:
        build: One of `all_builds`.
        target: A key of `TARGETS`.

    Returns:
        False where the launcher takes another way on GPUs of that kind.
    """
    return TARGETS[target].triton_name[0] in build.backends


def intermediate_code(build: Build, target: str) -> str:
    """Compile one build for one target, and return what triton makes of it before the target's own compiler.

    Args:
        build: What to compile.
        target: A key of `TARGETS`.

    Returns:
        TTGIR: in which order the memory is read, shared memory written, and products are formed.

    Raises:
        ValueError: As `compile_build`.
        RuntimeError: Under TRITON_INTERPRET.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return _binary(build, target, folder).asm["ttgir"]


def _binary(build: Build, target: str, folder: str) -> Any:
    """Compile one build without triton's cache; what ptxas says is printed."""
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")
    if not isinstance(build.kernel, JITFunction):
        raise RuntimeError(
            f"build {build.name!r}: its kernel is a {type(build.kernel).__name__} and no compilable function; unset"
            " TRITON_INTERPRET before triton is imported, and name the function itself, not an autotuner of it"
        )
    name = TARGETS[target].triton_name
    source = _source(build, name[0])
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    with knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope():
        # A binary out of a cache has no log.
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        return triton.compile(source, target=GPUTarget(*name), options=options)


def fingerprint(build: Build) -> str:
    """Return what changes when the build does: compiling all of them takes minutes, and comparing this none.

    Triton's own key of a function changes with the line that it begins at; this one does not.

    Args:
        build: What would be compiled.

    Returns:
        12 hexadecimal digits of the sources of the kernel and of all functions of this package that it calls, and of
        all else that the build says.
    """
    types, constants = dict(sorted(build.types.items())), dict(sorted(build.constants.items()))
    if constants.get("BACKEND") is not None:
        # the target's, whatever this machine's is
        constants["BACKEND"] = "of the target"
    told = [types, constants, sorted(build.divisible), build.num_warps, build.num_stages]
    sources: dict[str, str] = {}
    for function in (build.kernel, *build.constants.values()):
        if isinstance(function, JITFunction):
            _told_sources(function, sources)
    told += sorted(sources.values())
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def _told_sources(function: Any, found: dict[str, str]) -> dict[str, str]:
    """Name -> source of a function and of what it calls, and the constants that these read."""
    name = f"{function.__module__}.{function.__name__}"
    if name in found:
        return found
    found[name] = function.src
    for node in ast.walk(function.parse()):
        value = None
        if isinstance(node, ast.Name):
            value = function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = function.__globals__.get(node.value.id)
            value = getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
        if isinstance(value, JITFunction) and not value.__module__.startswith("triton."):
            _told_sources(value, found)
        elif isinstance(value, tl.constexpr):
            found[f"{name}: {ast.unparse(node)}"] = f"{ast.unparse(node)} = {value.value!r}"
    return found


def _source(build: Build, backend: str) -> ASTSource:
    names = list(build.kernel.arg_names)
    described = {*build.types, *build.constants}
    wrong = described.symmetric_difference(names) | (build.types.keys() & build.constants.keys())
    if wrong or not set(build.divisible) <= set(build.types):
        raise ValueError(
            f"build {build.name!r}: its types and constants must be the arguments {names}, each once, and what is"
            f" divisible one of its types; look at {sorted(wrong | (set(build.divisible) - set(build.types)))}"
        )
    constants = dict(build.constants)
    if constants.get("BACKEND") is not None:
        constants["BACKEND"] = backend
    return ASTSource(
        fn=build.kernel,
        signature={name: build.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.divisible},
    )


def _only(pattern: str, text: str, *, default: int | None = None) -> int:
    """The number that the pattern finds: the largest, should several functions be told of."""
    found = [int(number) for number in re.findall(pattern, text)]
    if not found and default is None:
        raise RuntimeError(f"the compiler's report holds no {pattern!r}:\n{text[:2000]}")
    return max(found) if found else int(default or 0)


def _from_ptxas(log: str) -> dict[str, int]:
    return {
        "registers": _only(r"Used (\d+) registers", log),
        "spill_stores": _only(r"(\d+) bytes spill stores", log),
        "spill_loads": _only(r"(\d+) bytes spill loads", log),
        "scalar_spills": 0,
        "stack": _only(r"(\d+) bytes stack frame", log),
        "static_shared": _only(r"(\d+) bytes smem", log, default=0),
    }


def _from_amd_metadata(assembly: str) -> dict[str, int]:
    metadata = assembly.partition(".amdgpu_metadata")[2]
    # counted in registers of four bytes
    spilled = 4 * _only(r"\.vgpr_spill_count:\s+(\d+)", metadata)
    return {
        "registers": _only(r"\.vgpr_count:\s+(\d+)", metadata),
        "spill_stores": spilled,
        "spill_loads": spilled,
        "scalar_spills": _only(r"\.sgpr_spill_count:\s+(\d+)", metadata),
        "stack": _only(r"\.private_segment_fixed_size:\s+(\d+)", metadata),
        "static_shared": _only(r"\.group_segment_fixed_size:\s+(\d+)", metadata),
    }


def _disassembled(cubin: bytes, folder: str) -> str:
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    return subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True, check=True).stdout


def resident_warps(target: str, *, registers: int, shared: int, warps: int) -> int:
    """Return how many warps of a kernel a multiprocessor holds at once: its theoretical occupancy.

    Args:
        target: A key of `TARGETS`.
        registers: Registers a lane.
        shared: Bytes of shared memory a program.
        warps: Warps a program.

    Returns:
        Warps of whole programs; 0 if not even one fits.
    """
    gpu = TARGETS[target]
    if shared > gpu.shared_of_block:
        return 0
    given = -(-max(1, registers) // gpu.register_step) * gpu.register_step
    by_registers = min(_QUARTERS * (gpu.register_file // given), gpu.warps) // warps
    by_shared = gpu.shared // max(1, shared + gpu.shared_reserved)
    return warps * min(by_registers, by_shared, gpu.blocks)


def problems(build: Build, found: Resources) -> list[str]:
    """Say what must not be, whatever the former figures were."""
    where = f"{found.name} for {found.target}"
    said = []
    if found.spill_stores:
        said.append(
            f"{where}: spills {found.spill_stores} bytes a lane ({found.registers} registers are used);"
            " take a smaller tile or more warps"
        )
    if build.uses_tensor_cores and not found.matrix_instructions:
        said.append(f"{where}: no matrix instruction was chosen; look at the operands' types and the tile's shape")
    if not found.resident_warps and found.target in SUPPORTED:
        said.append(
            f"{where}: cannot be launched: {found.shared} bytes of shared memory (at most"
            f" {TARGETS[found.target].shared_of_block}), {found.registers} registers times {found.warps} warps"
        )
    return said


def regressions(found: Resources, former: Resources) -> list[str]:
    """Say what got worse than it was.

    More registers or shared memory alone are no loss; fewer warps at once are. So are instructions above a twentieth
    more. A change for which the reason is good is committed together with the table it makes.

    Args:
        found: What a build takes on a target.
        former: What it took.
    """
    where = f"{found.name} for {found.target}"
    said = []
    if found.spill_stores > former.spill_stores:
        said.append(f"{where}: spills {found.spill_stores} bytes a lane, formerly {former.spill_stores}")
    if found.resident_warps < former.resident_warps:
        said.append(
            f"{where}: a multiprocessor holds {found.resident_warps} warps at once, formerly {former.resident_warps}"
            f" (registers {former.registers} -> {found.registers}, shared memory {former.shared} -> {found.shared},"
            f" warps {former.warps} -> {found.warps})"
        )
    if found.instructions > _TOLERATED * former.instructions:
        said.append(f"{where}: {found.instructions} instructions, formerly {former.instructions}")
    if former.matrix_instructions and not found.matrix_instructions:
        said.append(f"{where}: no matrix instructions, formerly {former.matrix_instructions}")
    elif found.matrix_instructions * former.instructions * _TOLERATED < former.matrix_instructions * found.instructions:
        said.append(
            f"{where}: {found.matrix_instructions} of {found.instructions} instructions multiply matrices, formerly"
            f" {former.matrix_instructions} of {former.instructions}"
        )
    if former.wide_loads and not found.wide_loads:
        said.append(f"{where}: no load of 128 bits, formerly {former.wide_loads}")
    elif found.wide_loads < former.wide_loads and found.global_loads >= former.global_loads:
        said.append(
            f"{where}: {found.wide_loads} of {found.global_loads} loads have 128 bits, formerly {former.wide_loads} of"
            f" {former.global_loads}"
        )
    if found.global_loads > max(former.global_loads + 1, _TOLERATED * former.global_loads):
        said.append(f"{where}: {found.global_loads} loads, formerly {former.global_loads}")
    if found.local_loads > former.local_loads:
        said.append(f"{where}: {found.local_loads} loads from local memory, formerly {former.local_loads}")
    if found.local_stores > former.local_stores:
        said.append(f"{where}: {found.local_stores} stores to local memory, formerly {former.local_stores}")
    return said


@cache
def _builds_by_name() -> dict[str, Build]:
    return {build.name: build for build in all_builds()}


def compile_by_name(name: str, target: str) -> Resources:
    """Compile the build of a name: what a worker process can be asked for, as kernels cannot be sent to it.

    Args:
        name: A build's name.
        target: A key of `TARGETS`.
    """
    return compile_build(_builds_by_name()[name], target)


@contextlib.contextmanager
def compiling(
    builds: Iterable[Build], targets: Sequence[str], *, processes: int
) -> Iterator[dict[tuple[str, str], "Future[Resources]"]]:
    """Compile builds for those of the targets that they ship for, in several processes.

    What is not yet begun at the end is given up.

    Args:
        builds: Some of `all_builds`, or any for `processes=1`.
        targets: Keys of `TARGETS`.
        processes: How many compile at a time; 1 compiles in this one, before the first result can be asked for.

    Yields:
        (name, target) -> the future result.
    """
    wanted = [(build, target) for build in builds for target in targets if ships(build, target)]
    if processes == 1:
        yield {(build.name, target): _compiled(build, target) for build, target in wanted}
        return
    # spawned: a fork would copy the locks that torch's and triton's threads hold
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield {(build.name, target): pool.submit(compile_by_name, build.name, target) for build, target in wanted}
    finally:
        pool.shutdown(cancel_futures=True)


def _compiled(build: Build, target: str) -> "Future[Resources]":
    future: Future[Resources] = Future()
    try:
        future.set_result(compile_build(build, target))
    except Exception as error:
        future.set_exception(error)
    return future
