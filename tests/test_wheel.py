"""The wheel has every module, and works alone."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[1]
SOURCES = {"rmm_linear": ROOT / "rmm_linear", "rmm_linear_kernels": ROOT / "kernels" / "rmm_linear_kernels"}


def test_the_wheel_has_every_module_and_can_be_imported_alone(tmp_path):
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
