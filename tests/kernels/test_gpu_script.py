"""`make gpu` keeps to its budget, ends what hangs, goes on after a failure, and tells by its exit status."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(benchmark_script):
    return benchmark_script("gpu")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def probed(**changes) -> str:
    found = {"python": "3", "torch": "2", "cuda": "13", "gpu": "NVIDIA Made-Up", "triton": "3", "missing": []}
    return f"print('''{json.dumps(found | changes)}''')"


def commands(stages) -> list[list[str]]:
    return [
        command
        for stage in stages
        for command in (stage.command.values() if isinstance(stage.command, dict) else [stage.command])
    ]


@pytest.fixture
def run(gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run stages as if there were a GPU; returns the exit status and the summary."""

    def main(stages, *options: str):
        monkeypatch.setattr(gpu, "_PROBE", probed())
        monkeypatch.setattr(gpu, "stages", lambda *folders_and_missing: stages)
        status = gpu.main(["--results", str(tmp_path), *options])
        return status, json.loads((tmp_path / "nvidia-made-up" / "summary.json").read_text())

    return main


def test_every_stage_runs_whatever_became_of_the_others(gpu, run, tmp_path) -> None:
    stages = [
        gpu.Stage("good", python("print('all is well')"), 20),
        gpu.Stage("bad", python("print('one'); print('two'); raise SystemExit(3)"), 20, shown=1),
        gpu.Stage("absent", [str(tmp_path / "no such program")], 20),
        gpu.Stage("left out", python("print('no')"), 20, skip="it is not installed"),
        gpu.Stage("last", python("import os; print(os.environ['MARK'])"), 20, environment={"MARK": "seen"}),
    ]
    status, summary = run(stages)
    assert status == 1
    assert [(stage["name"], stage["status"], stage["tail"]) for stage in summary["stages"]] == [
        ("good", "passed", "all is well"),
        ("bad", "failed", "two"),
        ("absent", "failed", ""),
        ("left out", "skipped", ""),
        ("last", "passed", "seen"),
    ]
    assert summary["stages"][1]["why"] == "exit status 3"
    assert summary["gpu"] == "NVIDIA Made-Up"
    assert summary["commit"]
    folder = tmp_path / "nvidia-made-up"
    text = (folder / "summary.txt").read_text()
    assert "left out      skipped" in text
    assert "it is not installed" in text
    assert "===== last\nseen" in text
    assert "one\ntwo" in (folder / "output" / "bad.txt").read_text()


def test_no_failure_is_a_status_of_zero(gpu, run) -> None:
    status, summary = run([gpu.Stage("good", python(""), 20), gpu.Stage("left out", [], 20, skip="no tool")])
    assert status == 0
    assert [stage["status"] for stage in summary["stages"]] == ["passed", "skipped"]


def test_what_only_prepares_is_no_failure(gpu, run) -> None:
    stages = [gpu.Stage("compile", python("raise SystemExit(3)"), 20), gpu.Stage("good", python(""), 20)]
    status, summary = run(stages)
    assert status == 0
    assert [stage["status"] for stage in summary["stages"]] == ["failed", "passed"]


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(gpu, run, tmp_path) -> None:
    number = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; print('begun', flush=True);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(number)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    began = time.monotonic()
    status, summary = run([gpu.Stage("hangs", python(code), 2), gpu.Stage("next", python("print('here')"), 20)])
    assert time.monotonic() - began < 30
    assert status == 1
    hanging, following = summary["stages"]
    assert (hanging["status"], hanging["why"]) == ("timed out", "after 2 s")
    assert hanging["tail"].startswith("begun\n")
    assert hanging["tail"].endswith("KeyboardInterrupt")
    assert following["status"] == "passed"
    child = int(number.read_text())
    for _ in range(100):
        # A killed orphan may stay for a moment, or as a zombie that nobody has asked about.
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child runs on")


def test_what_is_interrupted_may_say_what_it_knows(gpu, run, tmp_path) -> None:
    code = """import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('what was found')
"""
    # as a shell's background job has it
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status, summary = run([gpu.Stage("speaks", python(code), 2)])
    finally:
        signal.signal(signal.SIGINT, former)
    assert status == 1
    (stage,) = summary["stages"]
    assert stage["status"] == "timed out"
    assert stage["tail"].endswith("what was found")
    assert stage["seconds"] < 2 + gpu._GRACE_SECONDS


def test_what_ignores_the_interrupt_is_ended_by_force(gpu, run, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "_GRACE_SECONDS", 1.0)
    code = (
        "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('heard'));"
        "print('begun');\nwhile True: time.sleep(1)"
    )
    began = time.monotonic()
    status, summary = run([gpu.Stage("stays", {"deaf": python(code)}, 2), gpu.Stage("next", python("pass"), 20)])
    assert time.monotonic() - began < 20
    assert status == 1
    staying, following = summary["stages"]
    assert (staying["status"], staying["why"]) == ("timed out", "deaf: after 2 s")
    assert 3 <= staying["seconds"] < 10
    assert staying["tail"].endswith("begun\nheard")
    assert following["status"] == "passed"


def test_tests_that_time_out_tell_what_failed(gpu, run, tmp_path) -> None:
    path = tmp_path / "test_slow.py"
    path.write_text("import time\n\ndef test_bad():\n    assert 1 + 1 == 3\n\ndef test_long():\n    time.sleep(60)\n")
    stages = gpu.stages(tmp_path, tmp_path, [])
    (command,) = [stage.command["test_philox_kernel 1/2"] for stage in stages if stage.name == "kernel tests"]
    status, summary = run([gpu.Stage("tests", {"slow": [*command[: command.index("--share")], str(path)]}, 5)])
    assert status == 1
    (stage,) = summary["stages"]
    assert stage["status"] == "timed out"
    for said in ("assert (1 + 1) == 3", "FAILED", "KeyboardInterrupt", "1 failed"):
        assert said in stage["tail"]


def test_parts_of_a_stage_run_at_the_same_time(gpu, run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 2)
    meeting = (
        "import pathlib, sys, time; mine, other = map(pathlib.Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\nprint('much'); print('met')"
    )
    places = [str(tmp_path / name) for name in ("here", "there")]
    parts = {"one": [*python(meeting), *places], "two": [*python(meeting), *reversed(places)]}
    status, summary = run([gpu.Stage("pair", parts, 30)])
    assert status == 0
    (stage,) = summary["stages"]
    assert (stage["status"], stage["why"]) == ("passed", "all 2 of them")
    heads = [line.split(",")[0] for line in stage["tail"].splitlines()]
    assert heads == ["--- one: passed", "met", "--- two: passed", "met"]
    for name in parts:
        assert (tmp_path / "nvidia-made-up" / "output" / f"pair-{name}.txt").read_text().endswith("much\nmet\n")


def test_no_more_parts_run_at_a_time_than_there_are_cores(gpu, run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 1)
    code = (
        f"import os, time; path = {str(tmp_path / 'lock')!r};"
        "os.close(os.open(path, os.O_CREAT | os.O_EXCL)); time.sleep(0.2); os.unlink(path)"
    )
    status, summary = run([gpu.Stage("three", dict.fromkeys(("a", "b", "c"), python(code)), 30)])
    assert status == 0, summary


def test_what_becomes_of_one_part_does_not_touch_the_others(gpu, run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)
    former = tmp_path / "nvidia-made-up" / "output" / "former.txt"
    former.parent.mkdir(parents=True)
    former.touch()
    parts = {
        "good": python("print('fine')"),
        "bad": python("print('one'); print('two'); raise SystemExit(3)"),
        "absent": [str(tmp_path / "no such program")],
        "endless": python("import time; print('begun'); time.sleep(60)"),
    }
    status, summary = run([gpu.Stage("parts", parts, 2)])
    assert status == 1
    (stage,) = summary["stages"]
    assert stage["status"] == "failed"
    bad, absent, endless = stage["why"].split("; ")
    assert bad == "bad: exit status 3"
    assert absent.startswith("absent: could not be started")
    assert endless == "endless: after 2 s"
    assert "one\ntwo" in stage["tail"]
    said = {path.stem: path.read_text() for path in former.parent.iterdir()}
    assert set(said) == {f"parts-{name}" for name in parts}
    assert said["parts-good"].endswith("fine\n")
    assert "begun\n" in said["parts-endless"]


def test_a_part_that_no_core_was_free_for_is_no_success(gpu, run, monkeypatch) -> None:
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 1)
    status, summary = run([gpu.Stage("parts", {"long": python("import time; time.sleep(60)"), "late": python("")}, 1)])
    assert status == 1
    (stage,) = summary["stages"]
    assert stage["status"] == "timed out"
    assert stage["why"] == "long: after 1 s; late: no time was left to begin"


def test_the_whole_keeps_to_its_budget_and_unused_time_is_passed_on(gpu, run) -> None:
    wait = "import time; time.sleep({})"
    stages = [
        gpu.Stage("quick", python("print('done')"), 3),
        # longer than its own budget, within what the first one left
        gpu.Stage("slow", python(wait.format(1.5)), 1),
        gpu.Stage("endless", python(wait.format(60)), 100),
        gpu.Stage("late", python("print('never')"), 100),
    ]
    began = time.monotonic()
    status, summary = run(stages, "--budget", "5")
    assert time.monotonic() - began < 5 + 10
    assert status == 1
    assert [stage["status"] for stage in summary["stages"]] == ["passed", "passed", "timed out", "skipped"]
    assert summary["stages"][-1]["why"] == "no time was left"


def test_some_stages_can_be_chosen(gpu, run, capsys) -> None:
    stages = [gpu.Stage(name, python("pass"), 20) for name in ("first", "second", "third")]
    status, summary = run(stages, "--only", "third", "first")
    assert status == 0
    assert [stage["name"] for stage in summary["stages"]] == ["first", "third"]
    with pytest.raises(SystemExit, match="2"):
        run(stages, "--only", "fourth")
    assert "the stages are first, second, third" in capsys.readouterr().err


def test_the_interpreter_s_mode_and_the_path_do_not_reach_the_stages(gpu, run, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "import os, rmm_linear, rmm_linear_kernels; print(os.environ.get('TRITON_INTERPRET'))"
    status, summary = run([gpu.Stage("stage", python(code), 60)])
    assert status == 0
    assert summary["stages"][0]["tail"] == "None"


def test_what_is_not_installed_is_skipped_with_a_word(gpu, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "sanitizer", lambda: None)
    found = {stage.name: stage for stage in gpu.stages(tmp_path, tmp_path, ["pytest", "datasets", "evaluate"])}
    assert "pytest is not installed" in found["kernel tests"].skip
    assert "pytest is not installed" in found["gpu tests"].skip
    assert found["fine-tuning"].skip == "datasets, evaluate are not installed"
    assert "compute-sanitizer" in found["memcheck"].skip
    assert not found["layer"].skip
    monkeypatch.setattr(gpu, "sanitizer", lambda: "/opt/compute-sanitizer")
    found = {stage.name: stage for stage in gpu.stages(tmp_path, tmp_path, ["triton"])}
    needing = ("compile", "kernel tests", "kernels", "memcheck", "racecheck")
    assert all("triton" in found[name].skip for name in needing)
    found = {stage.name: stage for stage in gpu.stages(tmp_path, tmp_path, [])}
    assert not any(stage.skip for stage in found.values())
    for command in found["memcheck"].command.values():
        assert command[:3] == ["/opt/compute-sanitizer", "--tool", "memcheck"]
    assert found["memcheck"].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_the_stages_budgets_are_the_whole_s_and_their_files_exist(gpu, tmp_path) -> None:
    stages = gpu.stages(tmp_path, tmp_path, [])
    # The last one that hangs is ended within the budget, too.
    assert sum(stage.seconds for stage in stages) + gpu._GRACE_SECONDS <= gpu.BUDGET_SECONDS == 8 * 60
    named = [gpu.ROOT / part for command in commands(stages) for part in command if str(part).endswith(".py")]
    assert all(path.exists() for path in named)
    assert {path.name for path in named if "test_" not in path.name} == {
        "aims.py",
        "each_kernel.py",
        "layer.py",
        "memory_checks.py",
        "peak_memory.py",
    }


def test_each_file_of_the_kernels_tests_is_shared_by_processes_of_its_own(gpu, tmp_path) -> None:
    found = {stage.name: stage.command for stage in gpu.stages(tmp_path, tmp_path, [])}
    files = {path.stem for path in (ROOT / "tests/kernels/on_triton").glob("test_*.py")}
    assert files
    parts = found["kernel tests"]
    assert set(gpu._SHARES_OF_FILES) < files
    counts = dict.fromkeys(files, gpu._FILE_SHARES) | gpu._SHARES_OF_FILES
    assert set(parts) == {f"{name} {share}/{count}" for name, count in counts.items() for share in range(1, count + 1)}
    # what takes longest comes first
    assert [title.split()[0] in gpu._SHARES_OF_FILES for title in parts] == sorted(
        (title.split()[0] in gpu._SHARES_OF_FILES for title in parts), reverse=True
    )
    for title, command in parts.items():
        name, share = title.split()
        assert command[-3:] == ["--share", share, f"tests/kernels/on_triton/{name}.py"]
        assert {"--tb=short", "-rfE", "not slow"} <= set(command)


def collected(command: list[str], plugins: Path) -> str:
    """What pytest prints that collects with a plugin of a folder, without an error."""
    paths = map(str, (plugins, ROOT, ROOT / "kernels"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [*command, "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


def test_other_tests_are_those_of_the_files_that_ask_for_a_gpu(gpu, tmp_path) -> None:
    found = {stage.name: stage.command for stage in gpu.stages(tmp_path, tmp_path, [])}["gpu tests"]
    assert list(found) == [f"{number}/8" for number in range(1, 9)]
    # as pytest knows them: by the mark, and by the fixture's name
    (tmp_path / "noted.py").write_text(
        "from pathlib import Path\n"
        "def pytest_collection_modifyitems(items):\n"
        "    asking = {str(item.path) for item in items\n"
        "              if 'device' in item.fixturenames or item.get_closest_marker('gpu')}\n"
        "    Path(__file__).with_name('found').write_text('\\n'.join(sorted(asking)))\n"
    )
    collected([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-p", "noted"], tmp_path)
    asking = {path for path in (tmp_path / "found").read_text().splitlines() if "on_triton" not in path}
    assert asking
    for share, command in found.items():
        place = command.index("--share")
        assert command[place + 1] == share
        assert {str(ROOT / name) for name in command[place + 2 :]} == asking


def test_tests_for_a_gpu_need_no_package_that_the_kernels_do_not(gpu, tmp_path) -> None:
    command = next(stage.command for stage in gpu.stages(tmp_path, tmp_path, []) if stage.name == "gpu tests")["1/8"]
    lacking = ("transformers", "datasets", "evaluate", "accelerate", "peft", "matplotlib", "pandas", "scipy")
    (tmp_path / "lacking.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({lacking}))\n")
    assert "error" not in collected([*command, "-p", "lacking"], tmp_path).lower()


def test_what_is_launched_later_is_compiled_before_on_all_cores(gpu, tmp_path) -> None:
    """The same commands, for less long, and no table of theirs stays."""
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    first, *later = gpu.stages(results, scratch, [])
    parts = first.command
    assert first.name == "compile"
    found = {stage.name: stage.command for stage in later}
    assert parts["doctor"] == found["doctor"]
    for name, part in (("layer", "layer"), *(("kernels", f"kernels {share}/3") for share in (1, 2, 3))):
        early, late = parts[part], found[name]
        assert early[:2] == late[:2]
        assert part == name or early[early.index("--share") + 1] == part.split()[1]
        assert early[early.index("--repeats") + 1] == "1"
        assert early[-2:] == ["--results", str(scratch)]
        assert late[-2:] == ["--results", str(results)]
    for tool in ("memcheck", "racecheck"):
        assert all(command[-4:] == parts[name] for name, command in found[tool].items())


@pytest.mark.parametrize("name", ["each_kernel", "layer", "peak_memory"])
def test_the_stages_options_are_those_of_the_scripts(gpu, benchmark_script, name, tmp_path, monkeypatch) -> None:
    """Without a GPU each script must get as far as saying that there is none."""
    script = benchmark_script(name)
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    stages = gpu.stages(tmp_path, tmp_path, [])
    mine = [command[2:] for command in commands(stages) if str(command[1]).endswith(f"{name}.py")]
    assert mine
    errors = []
    monkeypatch.setattr(script.argparse.ArgumentParser, "error", lambda self, message: errors.append(message) or 1 / 0)
    for options in mine:
        with pytest.raises(ZeroDivisionError):
            script.main(options)
    assert len(errors) == len(mine)
    assert all("no CUDA device" in error for error in errors)


def test_aims_are_judged_after_they_are_measured_in_the_same_folder(gpu, benchmark_script, tmp_path, capsys) -> None:
    stages = gpu.stages(tmp_path, tmp_path / "scratch", [])
    names = [stage.name for stage in stages]
    # What is tuned last has only what is left.
    assert names[-2:] == ["aims", "fine-tuning"]
    assert {"layer", "kernels"} <= set(names[:-2])
    command = stages[-2].command
    assert Path(command[1]).name == "aims.py"
    assert benchmark_script("aims").main(command[2:]) == 2
    assert f"in {tmp_path} is no" in capsys.readouterr().err


def test_the_memory_checks_options_are_those_of_the_stages(gpu, benchmark_script, tmp_path, monkeypatch, capsys):
    script = benchmark_script("memory_checks")
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    (first, *_) = gpu.stages(tmp_path, tmp_path, [])
    shares = [command[2:] for name, command in first.command.items() if name.startswith("memory checks")]
    assert len(shares) == 4
    for options in shares:
        assert script.main(options) == 2
    for wrong in ("9/8", "0/8", "3", "a/b", "1/-1"):
        with pytest.raises(SystemExit, match="2"):
            script.main(["--share", wrong])
        assert f"--share: {wrong}: K/N is needed" in capsys.readouterr().err


def test_fine_tuning_has_options_of_the_harness_and_a_result_for_each_run(gpu, tmp_path) -> None:
    parser = pytest.importorskip("experiments.glue.run")._parser()
    (parts,) = [stage.command for stage in gpu.stages(tmp_path, tmp_path, []) if stage.name == "fine-tuning"]
    runs = [parser.parse_args(command[3:]) for command in parts.values()]
    assert all(command[1:3] == ["-m", "experiments.glue.run"] for command in parts.values())
    assert {(run.method, run.ratio, run.storage) for run in runs} == {
        ("exact", None, None),
        ("hadamard", 0.5, None),
        ("hadamard", 0.1, None),
        ("hadamard", 0.5, "int8"),
    }
    # a run's times mean nothing beside others'
    assert not any(run.timing or run.cpu for run in runs)
    assert {run.results for run in runs} == {tmp_path / "demo"}


@pytest.mark.parametrize("count", [1, 3, 7])
def test_processes_share_all_tests_and_each_runs_in_one(count) -> None:
    def collected(*options: str) -> list[str]:
        return [line for line in collecting(*options).stdout.splitlines() if line.startswith("tests/test_layout.py")]

    whole = collected()
    assert len(whole) >= 7
    shares = [collected("--share", f"{number}/{count}") for number in range(1, count + 1)]
    assert sorted(itertools.chain(*shares)) == sorted(whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def collecting(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *options]
    return subprocess.run([*command, "tests/test_layout.py"], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [["0/2"], ["3/2"], ["2"], ["a/b"], ["3/2", "-n", "2"]], ids=str)
def test_a_share_that_is_none_is_refused(options) -> None:
    done = collecting("--share", *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--share {options[0]}: K/N is needed" in done.stderr


def test_a_share_without_tests_is_no_failure() -> None:
    assert collecting("--share", "9998/9999").returncode == 0
    assert collecting("-k", "no_such_test").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_machine_without_a_gpu_is_told_in_one_line(gpu, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(gpu, "_PROBE", probed(gpu=""))
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "gpu.py: no CUDA device that torch 2 can use; nothing was run\n"
    monkeypatch.setattr(gpu, "_PROBE", "import no_such_package")
    assert gpu.main(["--results", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_such_package" in line
    assert list(tmp_path.iterdir()) == []


def test_memory_checks_tell_wrong_kernels_and_their_absence(benchmark_script, monkeypatch, capsys) -> None:
    checks = benchmark_script("memory_checks")
    device = torch.device("cpu")
    assert checks.check(device) == (0, [])
    each_kernel = sys.modules[checks.measured_errors.__module__]

    def wrong_norms(x, mean):
        return x.norm(dim=1) * 1.1

    def broken(x):
        raise RuntimeError("no such thing")

    kernels = {"row_norms": wrong_norms, "gather_rows": broken}
    for module in (checks, each_kernel):
        monkeypatch.setattr(module, "launcher_of", lambda case, device: kernels.get(case.function))
    launched, said = checks.check(device)
    assert launched == len(said) == len(checks.DTYPES) * len(checks.SHAPES) * (1 + len(each_kernel.RATIOS))
    assert said[3].startswith("row_norms, 128 x 64, torch.bfloat16: error 0.")
    assert said[0] == "gather_rows, ratio 0.5, 128 x 64, torch.bfloat16: RuntimeError: no such thing"
    # as it goes along, not at the end
    assert capsys.readouterr().out.splitlines() == said
    shares = [checks.check(device, (number, 3))[1] for number in (1, 2, 3)]
    # the draws are others
    in_turn = [shares[index % 3][index // 3] for index in range(launched)]
    assert [line.partition(": ")[0] for line in in_turn] == [line.partition(": ")[0] for line in said]
    capsys.readouterr()
    kernels["row_norms"] = lambda x, mean: x.norm(dim=1)
    checks.check(device)
    assert "row_norms, 203 x 37, torch.float32: right\n" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks.main([]) == 2
    assert "need a GPU" in capsys.readouterr().err


def commands_of(*arguments: str) -> str:
    """What make would run; without the variables of a make that runs this test."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PY"))}
    command = ["make", "-n", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_make_gpu_takes_a_given_interpreter_and_sets_nothing_up() -> None:
    assert commands_of("gpu", "PY=some/python").split() == ["some/python", "kernels/benchmarks/gpu.py"]
    assert commands_of("gpu").split()[-2:] == [".venv/bin/python", "kernels/benchmarks/gpu.py"]


@pytest.mark.parametrize("options", [["--budget", "0"], ["--budget", "soon"]], ids=str)
def test_bad_options_are_named(gpu, options, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(options)
    assert options[0] in capsys.readouterr().err
