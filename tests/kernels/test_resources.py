"""What ships takes what it may take on every GPU; and the tool that says so catches what it must catch.

All of it compiles: `make check` runs it. What the committed table says is looked at by `test_resource_table.py`.
"""

import dataclasses
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'rmm-linear[kernels]'", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl

import rmm_linear_kernels
from rmm_linear_kernels import ahead_of_time
from rmm_linear_kernels.ahead_of_time import (
    TARGETS,
    all_builds,
    compile_build,
    fingerprint,
    problems,
    regressions,
    resident_warps,
)
from rmm_linear_kernels.builds import Build

pytestmark = pytest.mark.slow
NVIDIA = [name for name in TARGETS if name.startswith("sm_")]
SHIPPED = {build.name: build for build in all_builds()}


@triton.jit
def _held_kernel(X, OUT, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Every element is needed again after the last one was read.
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(X + place)
    tl.store(OUT + place, x / tl.max(tl.max(x, 0), 0))


@triton.jit
def _product_kernel(X, Y, OUT, SIZE: tl.constexpr, DOT: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = tl.load(X + place), tl.load(Y + place)
    if DOT:
        tl.store(OUT + place, tl.dot(x, y))
    else:
        tl.store(OUT + place, x.to(tl.float32) + y.to(tl.float32))


@triton.jit
def _normal_kernel(SEED, OUT, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(OUT + place, tl.randn(tl.load(SEED), place))


def held(*, rows, columns, num_warps):
    return Build(
        f"held {rows} x {columns}",
        _held_kernel,
        {"X": "*fp32", "OUT": "*fp32"},
        {"ROWS": rows, "COLUMNS": columns},
        divisible=("X", "OUT"),
        num_warps=num_warps,
    )


def product(*, dot, size=64):
    types = {"X": "*bf16", "Y": "*bf16", "OUT": "*fp32"}
    constants = {"SIZE": size, "DOT": dot}
    return Build("product", _product_kernel, types, constants, divisible=tuple(types), uses_tensor_cores=True)


@pytest.fixture
def resources(benchmark_script):
    return benchmark_script("resources")


@pytest.fixture
def table(resources):
    return resources.read_table(resources.TABLE)


def first_builds() -> list[str]:
    """One build of each kernel."""
    return list({build.kernel.__name__: build.name for build in reversed(SHIPPED.values())}.values())


@pytest.fixture(scope="module")
def compiled():
    """(build, target) -> the future figures: all are begun at once, and each test waits for its own."""
    with ahead_of_time.compiling(SHIPPED.values(), list(TARGETS), processes=2) as futures:
        yield futures


def check(found, table, resources):
    assert problems(SHIPPED[found.name], found) == []
    assert resources.compare([found], table) == []
    if table[found.name, found.target].triton == found.triton:
        assert table[found.name, found.target] == found, "run `make resources`, and commit the table"


@pytest.mark.parametrize("name", first_builds())
def test_the_committed_figures_are_those_of_the_compiler(name, table, resources):
    """A sample, for a look at one's own work: a build takes a second, and all of them minutes."""
    check(compile_build(SHIPPED[name], "sm_90"), table, resources)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SHIPPED)
def test_all_committed_figures_are_those_of_the_compiler(name, target, compiled, table, resources):
    if (name, target) not in table and target not in ahead_of_time.SUPPORTED:
        pytest.skip("does not ship or compile for a target that is not supported")
    check(compiled[name, target].result(), table, resources)


@pytest.mark.parametrize("target", NVIDIA)
def test_spills_are_caught_on_nvidia(target):
    build = held(rows=64, columns=128, num_warps=1)
    found = compile_build(build, target)
    assert found.spill_stores > 0
    # Nothing else of this kernel lies in local memory: the stores found in the disassembly are the spills of the log.
    assert 4 * found.local_stores <= found.spill_stores <= 16 * found.local_stores
    (said,) = problems(build, found)
    assert target in said
    assert "spills" in said
    assert problems(build, compile_build(held(rows=64, columns=128, num_warps=8), target)) == []


def test_spills_are_caught_on_amd():
    # 16 warps have 128 registers a lane, and the tile would take 256.
    build = held(rows=512, columns=512, num_warps=16)
    found = compile_build(build, "gfx942")
    assert found.spill_stores > 0
    assert found.local_stores > 0
    assert "spills" in problems(build, found)[0]
    fewer = held(rows=128, columns=256, num_warps=16)
    found = compile_build(fewer, "gfx942")
    assert problems(fewer, found) == []
    assert found.local_stores == 0


@pytest.mark.parametrize("target", TARGETS)
def test_matrix_instructions_and_wide_loads_are_found_and_missed(target):
    with_dot, without = compile_build(product(dot=True), target), compile_build(product(dot=False), target)
    assert with_dot.matrix_instructions > 0
    assert without.matrix_instructions == 0
    assert problems(product(dot=True), with_dot) == []
    assert "no matrix instruction" in problems(product(dot=False), without)[0]
    assert 0 < without.wide_loads == without.global_loads
    unaligned = dataclasses.replace(product(dot=False), divisible=())
    narrow = compile_build(unaligned, target)
    assert narrow.wide_loads == 0
    assert narrow.global_loads > without.global_loads
    assert any("no load of 128 bits" in said for said in regressions(narrow, without))


@pytest.mark.parametrize("target", NVIDIA)
def test_a_library_function_s_stack_is_no_spill(target):
    build = Build("normals", _normal_kernel, {"SEED": "*i64", "OUT": "*fp32"}, {"COUNT": 1024})
    found = compile_build(build, target)
    # sine and cosine of triton 3.9 have neither
    if triton.__version__.startswith(("3.6.", "3.7.")):
        assert found.stack > 0
        assert found.local_stores > 0
    assert found.spill_stores == 0
    assert problems(build, found) == []


def test_too_much_shared_memory_is_caught():
    fits = compile_build(product(dot=True), "sm_90")
    too_much = dataclasses.replace(fits, shared=228 * 1024, resident_warps=0)
    assert "cannot be launched" in problems(product(dot=True), too_much)[0]
    assert problems(product(dot=True), dataclasses.replace(too_much, target="gfx942")) == []
    assert resident_warps("sm_90", registers=32, shared=228 * 1024, warps=4) == 0
    assert resident_warps("gfx942", registers=32, shared=64 * 1024 + 1, warps=4) == 0


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "expected"),
    [
        # The occupancy calculators of the vendors: 65536 registers, 64 warps and 32 programs a multiprocessor.
        ("sm_80", 32, 0, 4, 64),
        ("sm_80", 33, 0, 4, 48),
        ("sm_80", 64, 0, 4, 32),
        ("sm_80", 255, 0, 8, 8),
        ("sm_80", 255, 0, 16, 0),
        ("sm_80", 16, 0, 1, 32),
        ("sm_80", 16, 48 * 1024, 4, 12),
        ("sm_90", 16, 48 * 1024, 4, 16),
        ("sm_90", 168, 200 * 1024, 12, 12),
        ("gfx942", 128, 0, 4, 16),
        ("gfx942", 129, 0, 4, 12),
        ("gfx942", 64, 0, 4, 32),
        ("gfx942", 512, 0, 4, 4),
    ],
)
def test_occupancy(target, registers, shared, warps, expected):
    assert resident_warps(target, registers=registers, shared=shared, warps=warps) == expected


def test_what_got_worse_is_named_and_what_got_better_is_not(resources):
    former = compile_build(product(dot=True), "sm_80")
    key = (former.name, former.target)

    def said(**changes):
        return resources.compare([dataclasses.replace(former, **changes)], {key: former})

    assert said() == []
    assert said(registers=former.registers - 1, shared=0, local_stores=0) == []
    assert "spills 8" in said(spill_stores=8)[0]
    assert "warps at once" in said(resident_warps=former.resident_warps - 4)[0]
    assert "no matrix instructions" in said(matrix_instructions=0)[0]
    assert "stores to local memory" in said(local_stores=1)[0]
    assert "loads from local memory" in said(local_loads=1)[0]
    many, products = former.instructions, former.matrix_instructions
    assert said(instructions=int(1.04 * many)) == []
    assert f"{2 * many} instructions, formerly {many}" in said(instructions=2 * many)[0]
    assert "multiply matrices" in said(matrix_instructions=products // 2)[0]
    assert "multiply matrices" in said(matrix_instructions=1, instructions=many - 1)[0]
    assert said(matrix_instructions=products // 2, instructions=many // 2) == []
    assert former.wide_loads == former.global_loads > 1
    assert "loads have 128 bits" in said(wide_loads=former.wide_loads - 1)[0]
    assert said(wide_loads=former.wide_loads - 1, global_loads=former.global_loads - 1) == []
    assert said(global_loads=former.global_loads + 1) == []
    assert f"{2 * former.global_loads} loads, formerly" in said(global_loads=2 * former.global_loads)[0]
    # More registers that cost no occupancy are no loss, and other versions of the compiler are not compared.
    assert said(registers=former.registers + 1) == []
    assert said(spill_stores=8, triton="0.0.0") == []
    assert resources.compare([former], {}) == []


def test_a_fingerprint_is_that_of_what_is_compiled(resources):
    build = product(dot=True)
    same = fingerprint(build)
    assert fingerprint(dataclasses.replace(build, name="another", uses_tensor_cores=False)) == same
    changes = [
        {"num_warps": 8},
        {"num_stages": 3},
        {"divisible": ("X", "Y")},
        {"constants": {"SIZE": 64, "DOT": False}},
        {"types": {**build.types, "OUT": "*bf16"}},
        {"kernel": _held_kernel},
    ]
    assert len({same, *(fingerprint(dataclasses.replace(build, **change)) for change in changes)}) == 1 + len(changes)
    line = compile_build(build, "sm_90")
    lines = {(build.name, target): dataclasses.replace(line, target=target) for target in TARGETS}
    assert resources.out_of_date([build], lines) == []
    changed = dataclasses.replace(build, num_warps=8)
    assert resources.out_of_date([changed], lines) == [
        f"product for {target}: changed since the table was made" for target in TARGETS
    ]
    assert resources.unchanged(build, lines) == list(lines.values())
    assert resources.unchanged(changed, lines) == []
    assert resources.unchanged(build, {("product", "sm_90"): line}) == []
    of_another = {key: dataclasses.replace(found, triton="3.5.0") for key, found in lines.items()}
    assert resources.unchanged(build, of_another) == []
    assert resources.out_of_date([build], {}) == [f"product for {target}: not in the table" for target in NVIDIA]
    assert resources.out_of_date([], lines)[0].endswith("ships no more")


def test_a_fingerprint_follows_the_functions_that_a_kernel_calls(tmp_path, monkeypatch):
    """Also where they are in other modules; but not which line they are on."""

    def kernel_of(folder: str, line: str, constant: int = 3, above: str = ""):
        package = tmp_path / folder
        package.mkdir()
        start = f"import triton\nimport triton.language as tl\n{above}\n"
        body = f"CONSTANT = tl.constexpr({constant})\n\n\n@triton.jit\ndef inner(x):\n    return {line}\n"
        (package / "called.py").write_text(start + body)
        middle = "@triton.jit\ndef middle(x):\n    return called.inner(x)\n\n\n"
        outer = "@triton.jit\ndef outer(X):\n    tl.store(X, middle(tl.load(X)))\n"
        (package / "calling.py").write_text(start + "import called\n\n\n" + middle + outer)
        monkeypatch.syspath_prepend(package)
        for name in ("called", "calling"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        build = Build("outer", importlib.import_module("calling").outer, {"X": "*fp32"}, {})
        return fingerprint(build)

    same = kernel_of("first", "x + CONSTANT")
    assert kernel_of("second", "x + CONSTANT", above="# a line more\n") == same
    assert kernel_of("third", "x - CONSTANT") != same
    assert kernel_of("fourth", "x + CONSTANT", constant=4) != same


def test_builds_and_targets_that_are_not_understood_are_named():
    with pytest.raises(ValueError, match="sm_1 .*sm_80"):
        compile_build(product(dot=True), "sm_1 ")
    with pytest.raises(ValueError, match="'DOT'"):
        compile_build(dataclasses.replace(product(dot=True), constants={"SIZE": 64}), "sm_80")
    with pytest.raises(ValueError, match="'SIZE'"):
        compile_build(dataclasses.replace(product(dot=True), divisible=("SIZE",)), "sm_80")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_build(dataclasses.replace(product(dot=True), kernel=product), "sm_80")


OP = """
import triton
import triton.language as tl

from rmm_linear_kernels.builds import Build


@triton.jit
def _twice_kernel(X, OUT, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(OUT + place, tl.load(X + place) * 2)


@triton.jit
def _thrice_kernel(X, OUT, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(OUT + place, tl.load(X + place) * 3)
"""
BUILDS = """

def builds():
    return [
        Build(name, kernel, {"X": "*fp32", "OUT": "*fp32"}, {"COUNT": 1024}, ("X", "OUT"))
        for name, kernel in KERNELS
    ]
"""


@pytest.fixture
def ops(monkeypatch, tmp_path):
    """A package of kernels in which `write(op, kernels)` makes an op."""
    folder = tmp_path / "ops"
    monkeypatch.setattr(rmm_linear_kernels, "__path__", [str(folder)])

    def write(op: str, kernels: str | None) -> None:
        (folder / op).mkdir(parents=True)
        (folder / op / "__init__.py").touch()
        (folder / op / "kernel.py").write_text(OP + (BUILDS.replace("KERNELS", kernels) if kernels else ""))

    yield write
    for name in [name for name in sys.modules if name.startswith("rmm_linear_kernels.made_up")]:
        del sys.modules[name]


BOTH = "[('twice', _twice_kernel), ('thrice', _thrice_kernel)]"


def test_the_table_is_written_and_then_checked(ops, resources, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(resources, "TARGETS", ["sm_90", "gfx942"])
    ops("made_up_first", BOTH)
    command = ["--processes", "1", "--results", str(tmp_path)]
    # No table yet: nothing may pass unseen.
    assert resources.main([*command, "--check"]) == 1
    assert "twice for sm_90: not in the table" in capsys.readouterr().err
    assert resources.main(command) == 0
    assert resources.main([*command, "--check"]) == 0
    path = tmp_path / "resources.csv"
    table = resources.read_table(path)
    assert set(table) == {(name, target) for name in ("twice", "thrice") for target in ("sm_90", "gfx942")}
    assert all(line.wide_loads == line.global_loads > 0 for line in table.values())
    capsys.readouterr()
    # A build is gone, another is new, and the figures were better once.
    text = path.read_text()
    path.write_text(text.replace("twice,sm_90", "gone,sm_90"))
    assert resources.main([*command, "--check"]) == 1
    error = capsys.readouterr().err
    assert "twice for sm_90: not in the table" in error
    assert "gone for sm_90: in the table, but ships no more" in error
    line = table["twice", "gfx942"]
    former = dataclasses.replace(line, matrix_instructions=3)
    lines = [dataclasses.asdict(found if found is not line else former) for found in table.values()]
    resources.write_csv(path, lines)
    assert resources.main([*command, "--check"]) == 1
    assert capsys.readouterr().err == "twice for gfx942: no matrix instructions, formerly 3\n"
    # A part of the builds is compared with that part of the table, and never written.
    assert resources.main([*command, "--check", "--only", "thrice"]) == 0
    before = path.read_text()
    assert resources.main([*command, "--only", "thrice"]) == 0
    assert path.read_text() == before
    # Whoever makes the table anew is told what got worse, and decides.
    capsys.readouterr()
    assert resources.main(command) == 0
    assert "worse than before: twice for gfx942: no matrix instructions" in capsys.readouterr().out
    assert path.read_text() == text


def test_what_does_not_compile_is_named_and_only_matters_where_it_is_supported(
    ops, resources, tmp_path, monkeypatch, capsys
):
    ops("made_up_first", BOTH)
    monkeypatch.setattr(resources, "TARGETS", ["sm_90", "gfx942"])
    real = ahead_of_time.compile_build

    def broken(build, target):
        if (build.name, target) == ("twice", where):
            raise ValueError("the source\nis not understood")
        return real(build, target)

    monkeypatch.setattr(ahead_of_time, "compile_build", broken)
    command = ["--processes", "1", "--results", str(tmp_path)]
    where = "sm_90"
    assert resources.main(command) == 1
    assert capsys.readouterr().err == "twice for sm_90: does not compile: is not understood\n"
    assert not (tmp_path / "resources.csv").exists()
    where = "gfx942"
    assert resources.main(command) == 0
    assert "not supported: twice for gfx942: does not compile" in capsys.readouterr().out
    assert set(resources.read_table(tmp_path / "resources.csv")) == {
        ("twice", "sm_90"),
        ("thrice", "sm_90"),
        ("thrice", "gfx942"),
    }
    assert resources.main([*command, "--check"]) == 0


def test_a_build_is_compiled_only_where_it_ships(ops, resources, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resources, "TARGETS", ["sm_90", "gfx942"])
    ops("made_up_first", BOTH)
    command = ["--processes", "1", "--results", str(tmp_path)]
    assert resources.main(command) == 0
    table = resources.read_table(tmp_path / "resources.csv")
    twice, thrice = all_builds()
    assert all(ahead_of_time.ships(build, target) for build in (twice, thrice) for target in TARGETS)
    of_nvidia = dataclasses.replace(twice, backends=("cuda",))
    assert [target for target in TARGETS if ahead_of_time.ships(of_nvidia, target)] == NVIDIA
    monkeypatch.setattr(resources, "all_builds", lambda: [of_nvidia, thrice])
    # what it would take elsewhere is in no table, and of no account
    assert resources.out_of_date([of_nvidia, thrice], table) == ["twice for gfx942: in the table, but ships no more"]
    assert resources.main([*command, "--all"]) == 0
    table = resources.read_table(tmp_path / "resources.csv")
    assert set(table) == {("twice", "sm_90"), ("thrice", "sm_90"), ("thrice", "gfx942")}
    assert resources.main([*command, "--check"]) == 0
    assert "not supported" not in capsys.readouterr().out


def test_kernels_without_builds_and_names_taken_twice_are_named(ops):
    ops("made_up_first", "[('twice', _twice_kernel)]")
    assert ahead_of_time.unlisted_kernels() == ["rmm_linear_kernels.made_up_first.kernel._thrice_kernel"]
    ops("made_up_second", BOTH)
    with pytest.raises(ValueError, match="made_up_second.kernel: the name 'twice'"):
        all_builds()


def test_a_file_of_kernels_must_list_them(ops):
    ops("made_up_third", None)
    with pytest.raises(ValueError, match="_twice_kernel.*no builds"):
        all_builds()


@pytest.mark.parametrize("options", [["--processes", "0"], ["--only", "no such build"], ["--results", "/dev/null/x"]])
def test_bad_options_are_named(resources, options, capsys):
    with pytest.raises(SystemExit, match="2"):
        resources.main(options)
    assert options[0] in capsys.readouterr().err


@pytest.mark.slow
def test_tensor_cores_take_a_third_of_what_butterflies_take(benchmark_script, resources):
    """Instructions a number that is read: why the Hadamard sketch's kernel multiplies by the matrix."""
    butterflies = benchmark_script("butterflies")
    table = resources.read_table(resources.RESULTS / "resources.csv")
    rivals = ("hadamard_sketch uncentred x bf16 order=64 kept=32", "hadamard_sketch g bf16 order=64 kept=32")
    for build, rival in zip(butterflies.builds(), rivals, strict=True):
        found, shipped = compile_build(build, "sm_90"), SHIPPED[rival]
        assert found.spill_stores == 0
        each = found.instructions * found.warps / build.constants["TILE"]
        of_rival = table[rival, "sm_90"].instructions * shipped.num_warps
        assert each > 2.9 * of_rival / (shipped.constants["TILE"] * shipped.constants["TILES"])
