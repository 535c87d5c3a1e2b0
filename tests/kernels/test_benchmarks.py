"""The benchmark scripts run: on a processor as far as they can, `make gpu` with commands that need no GPU."""

import csv
import json
import sys

import torch


def rows_of(folder, pattern):
    (path,) = folder.glob(pattern)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_layers_are_timed_and_their_kept_bytes_counted(benchmark_script, tmp_path, monkeypatch):
    layer = benchmark_script("layer")
    monkeypatch.setattr(layer, "SHAPES", ((256, 16, 24),))
    assert layer.main(["--device", "cpu", "--repeats", "2", "--results", str(tmp_path)]) == 0
    rows = rows_of(tmp_path, "layer-*-float32.csv")
    assert len(rows) == len(layer.VARIANTS) * len(layer.RATIOS)
    for row in rows:
        # to the byte: `saved_bytes` is all-in, and the benchmark counts what autograd really keeps
        assert int(row["kept_bytes"]) == int(row["said_bytes"])
        assert float(row["time_ratio_q20"]) <= float(row["time_ratio"]) <= float(row["time_ratio_q80"])


def test_references_are_timed_where_there_is_no_gpu(benchmark_script, tmp_path):
    each_kernel = benchmark_script("each_kernel")
    options = ["--device", "cpu", "--dtype", "float32", "--repeats", "1", "--results", str(tmp_path)]
    assert each_kernel.main(options) == 0
    rows = rows_of(tmp_path, "kernels-*-float32.csv")
    assert {row["op"] for row in rows} == {"hadamard", "low_bit", "projection"}
    assert all(float(row["reference_us"]) > 0 and row["kernel_us"] == "" for row in rows)


def test_stages_run_out_of_time_pass_fail_and_are_told(benchmark_script, tmp_path, monkeypatch):
    gpu = benchmark_script("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA Made-Up")
    codes = {"endless": "import time; time.sleep(99)", "good": "print('all is well')", "bad": "raise SystemExit(3)"}
    seconds = {"endless": 1, "good": 60, "bad": 60}
    made = [gpu.Stage(name, {"one": [sys.executable, "-c", code]}, seconds[name]) for name, code in codes.items()]
    real = gpu.stages(tmp_path)
    # the last one that hangs is ended within the budget, too
    assert sum(stage.seconds for stage in real) + gpu._GRACE_SECONDS <= gpu.BUDGET_SECONDS
    monkeypatch.setattr(gpu, "stages", lambda results: [*made, gpu.Stage("absent", {}, 3, ("no_such_package",))])
    assert gpu.main(["--results", str(tmp_path)]) == 1
    folder = tmp_path / "nvidia-made-up"
    found = json.loads((folder / "summary.json").read_text())["stages"]
    assert [(stage["status"], stage["why"]) for stage in found] == [
        ("failed", "one: its time was up"),
        ("passed", ""),
        ("failed", "one: exit status 3"),
        ("skipped", "not installed: no_such_package"),
    ]
    assert (folder / "output" / "good-one.txt").read_text() == "all is well\n"
