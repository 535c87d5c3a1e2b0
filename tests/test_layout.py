"""The shape of the repository: who may import whom, what must not exist, and what a wheel holds."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "rmm_linear"
KERNELS = ROOT / "kernels" / "rmm_linear_kernels"
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}

# layer of rmm_linear -> the layers of rmm_linear that it may import (design: no circle, one seam to the kernels)
ALLOWED = {
    "errors": set(),
    "backend": {"errors"},
    "torch_private": set(),
    "autocasting": set(),
    "fingerprint": {"backend"},
    "sketches": {"backend", "errors"},
    "config": {"sketches", "fingerprint", "errors"},
    "ops": {"backend", "config", "sketches"},
    "rows": {"errors"},
    "sharing": {"norm_cache"},
    "producers": {"torch_private"},
    "names": set(),
    "tables": set(),
    "padding": {"rows", "errors", "torch_private"},
    "norm_cache": {"sketches", "config", "padding"},
    "functional": {
        *("sketches", "config", "rows", "sharing", "producers", "padding", "norm_cache", "ops", "errors"),
        "torch_private",
    },
    "layer": {"functional", "config", "sharing", "padding", "norm_cache", "errors"},
    "adapters": {"layer", "padding", "sharing"},
    "convertible": {"layer"},
    "memory": {
        *("adapters", "byte_sizes", "convertible", "names", "producers", "sharing", "functional", "layer", "config"),
        *("rows", "padding", "errors", "tables", "torch_private"),
    },
    "convert": {"adapters", "convertible", "names", "tables", "layer", "config", "memory", "padding", "errors"},
    "variance": {
        *("functional", "names", "producers", "sharing", "sketches", "layer", "convert", "config", "memory", "rows"),
        *("padding", "ops", "errors", "autocasting", "tables"),
    },
    "byte_sizes": set(),
    # plans are made of plain data: no torch
    "planning": {"byte_sizes", "errors", "tables"},
    "paging": {"errors"},
    "compiler": {"planning", "memory", "config", "paging", "errors", "autocasting", "torch_private"},
    "checkpointing": {"compiler", "planning", "memory", "paging", "errors"},
    "candidates": {"byte_sizes", "checkpointing", "errors", "ops", "planning", "tables", "variance"},
    "module_fitting": {
        *("byte_sizes", "candidates", "compiler", "config", "convert", "errors", "layer", "memory"),
        *("planning", "variance"),
    },
    "fitting": {
        *("byte_sizes", "candidates", "checkpointing", "compiler", "errors", "module_fitting", "paging", "planning"),
        "variance",
    },
}
# these sit on the public interface and may import all of it
ON_TOP = {"__init__", "integrations", "cli"}


def python_files(folder):
    return sorted(path for path in folder.rglob("*.py") if ".venv" not in path.parts and "build" not in path.parts)


@cache
def imported_modules(path):
    """Absolute dotted names of everything that the file imports, at any depth; relative imports resolved."""
    return tuple(_imported_modules(path))


def _imported_modules(path):
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer_of(path):
    return path.relative_to(LIBRARY).with_suffix("").parts[0]


# a package -> the files of the library that import it
IMPORTERS = {
    "rmm_linear_kernels": {"backend.py"},
    "transformers": {
        "layer.py",
        *(f"integrations/{name}.py" for name in ("fitted_loss", "hf_models", "hf_trainer")),
        *(f"integrations/{name}.py" for name in ("norm_cache_callback", "replaced_loss")),
    },
    "triton": set(),
    "tests": set(),
    "experiments": set(),
}


def run_python(code):
    """Run code in a fresh interpreter that sees the sources, installed or not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_kernels_is_a_folder_and_not_a_package():
    """Transformers would take a package of that name for another one that it imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_file_names_nothing():
    tracked = [*python_files(LIBRARY), *python_files(ROOT / "kernels"), *python_files(ROOT / "tests")]
    tracked += python_files(ROOT / "experiments")
    assert [path for path in tracked if path.name in FORBIDDEN_NAMES] == []


def test_kernels_import_only_torch_triton_and_the_standard_library():
    allowed = {"torch", "triton", "rmm_linear_kernels"} | sys.stdlib_module_names
    found = {
        (path.name, name)
        for path in python_files(KERNELS)
        for name in imported_modules(path)
        # relative imports resolve to kernels.rmm_linear_kernels...
        if name.removeprefix("kernels.").split(".")[0] not in allowed
    }
    assert found == set()


@pytest.mark.parametrize("package", IMPORTERS)
def test_these_files_alone_import(package):
    assert IMPORTERS[package] >= {
        path.relative_to(LIBRARY).as_posix()
        for path in python_files(LIBRARY)
        if any(name.split(".")[0] == package for name in imported_modules(path))
    }


# beside the names of ops and the two functions that register a backend
PRIVATE = re.compile(
    r"\bfrom torch[\w.]* import (?:.*\b)?_\w+"
    r"|\btorch(?:\.\w+)*\._(?!_|dynamo\.(?:list_backends|register_backend)\b|dynamo$)\w+",
    re.MULTILINE,
)
WIDELY_USED = {"torch.utils._pytree", "torch.utils._python_dispatch", "from torch.utils import _pytree"}


def test_private_parts_of_torch_are_named_in_two_files():
    found = {
        (path.relative_to(LIBRARY).as_posix(), name)
        for path in python_files(LIBRARY)
        if path.name != "torch_private.py"
        for name in PRIVATE.findall(path.read_text(encoding="utf-8"))
        if name not in WIDELY_USED and not name.startswith("torch.ops.")
    }
    assert found == set()


def test_without_private_parts_of_torch_layers_train_and_planned_steps_name_the_part():
    code = """
import torch
from torch import nn

parts = {
    torch._C._functorch: (
        *("is_batchedtensor", "is_legacy_batchedtensor", "is_functorch_wrapped_tensor", "get_unwrapped"),
    ),
    torch._C._autograd: ("_top_saved_tensors_default_hooks",),
    torch._C: ("_are_functorch_transforms_active",),
    torch.compiler: ("_is_exporting_flag",),
    torch: ("_assert_async",),
}
hidden = [(owner, name, getattr(owner, name)) for owner, names in parts.items() for name in names]
for owner, name, _ in hidden:
    delattr(owner, name)
import rmm_linear.torch_private
# torch itself needs them
for owner, name, part in hidden:
    setattr(owner, name, part)
import rmm_linear
import rmm_linear.variance
from rmm_linear import memory

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
rmm_linear.convert_linears(model, ratio=0.5)
with memory.SavedTensors(model) as saved:
    loss = model(torch.randn(64, 8)).square().sum()
loss.backward()
assert saved.bytes > 0 and all(parameter.grad is not None for parameter in model.parameters())

import torch._functorch.aot_autograd
del torch._functorch.aot_autograd.aot_export_joint_with_descriptors
try:
    import rmm_linear.compiler
except ImportError as error:
    print(error)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "planned steps need a part of torch" in done.stdout
    assert "aot_export_joint_with_descriptors" in done.stdout


def test_layers_import_downwards_only():
    wrong = []
    for path in python_files(LIBRARY):
        layer = layer_of(path)
        if layer in ON_TOP:
            continue
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] == "rmm_linear" and len(parts) > 1 and parts[1] != layer and parts[1] not in ALLOWED[layer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_planning_imports_no_torch():
    planning = [*python_files(LIBRARY / "planning"), LIBRARY / "byte_sizes.py", LIBRARY / "errors.py"]
    assert [
        path.name for path in planning if "torch" in {name.partition(".")[0] for name in imported_modules(path)}
    ] == []


def test_modules_import_each_other_in_no_circle():
    """Also inside of functions, where a circle would go unnoticed; packages' own names are not counted."""
    files = [*python_files(LIBRARY), *python_files(ROOT / "experiments")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    left = {name: modules.keys() & set(imported_modules(path)) - {name} for name, path in modules.items()}
    # a module that imports none of those left is in no circle
    while done := [name for name, found in left.items() if not found & left.keys()]:
        for name in done:
            del left[name]
    assert not left


def test_experiments_use_public_names_only():
    private = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(ROOT / "experiments")
        for name in imported_modules(path)
        if name.startswith("rmm_linear") and any(part.startswith("_") for part in name.split("."))
    ]
    assert private == []


def test_the_library_imports_without_its_optional_packages_and_says_what_to_install():
    blocked = ["transformers", "triton", "scipy", "matplotlib", "sklearn", "datasets", "evaluate", "pandas", "rich"]
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import torch, rmm_linear\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))\n"
        "rmm_linear.convert_linears(model, 0.5)\n"
        "model(torch.randn(256, 8)).sum().backward()\n"
        "print(type(model[0]).__name__, bool(model[0].weight.grad.isfinite().all()))\n"
        "try:\n"
        "    rmm_linear.RMMCallback\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = run_python(code)
    assert done.stdout.startswith("RMMLinear True\n"), done.stderr
    assert 'pip install "rmm-linear[hf]"' in done.stdout


def test_version_is_the_same_everywhere():
    import rmm_linear

    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert rmm_linear.__version__ == declared[1]
    assert f"[{declared[1]}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_public_names_exist():
    pytest.importorskip("transformers")
    import rmm_linear

    assert [name for name in rmm_linear.__all__ if not hasattr(rmm_linear, name)] == []
    assert len(set(rmm_linear.__all__)) == len(rmm_linear.__all__)


SOURCES = {"rmm_linear": ROOT / "rmm_linear", "rmm_linear_kernels": ROOT / "kernels" / "rmm_linear_kernels"}


def test_the_wheel_has_every_module_and_can_be_imported_alone(tmp_path):
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in SOURCES.values():
        shutil.copytree(folder, tmp_path / folder.relative_to(ROOT), ignore=ignored)
    for other in ("experiments", "tests"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "__init__.py").touch()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", ".", "-w", "dist"]
    subprocess.run(build, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "alone")
    expected = {f"{name}/{path.relative_to(of)}" for name, of in SOURCES.items() for path in of.rglob("*.py")}
    found = {str(path.relative_to(tmp_path / "alone")) for path in (tmp_path / "alone").rglob("*.py")}
    assert found == expected
    assert (tmp_path / "alone" / "rmm_linear" / "py.typed").exists()
    assert {path.name for path in (tmp_path / "alone").iterdir() if path.suffix != ".dist-info"} == set(SOURCES)
    code = "import rmm_linear, rmm_linear.compiler; print(rmm_linear.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "alone",
        env={"PYTHONPATH": str(tmp_path / "alone"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "alone"))
