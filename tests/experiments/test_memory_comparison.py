"""The comparison of bytes kept: predictions are measurements, known layer figures, and a report made of the results."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

for package in ("transformers", "datasets", "matplotlib"):
    pytest.importorskip(package)

from experiments.memory.models import Workload
from experiments.memory.report import ALONE, CHECKPOINTING, EXACT, FILE, OURS, RESULTS, write_report
from experiments.memory.report import main as report_main
from experiments.memory.run import METHODS, Method, main, measured_rows
from experiments.rows import read_rows
from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.memory import measure_kept_bytes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:left exact")

_LAYER = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
TINY: dict[str, tuple[Workload, dict[str, Any]]] = {
    "roberta": (Workload("roberta", "roberta-base", 4, 64), {**_LAYER, "vocab_size": 50}),
    "fused": (
        Workload("fused", "roberta-base", 4, 64, changes={"attention_probs_dropout_prob": 0.0}),
        {**_LAYER, "vocab_size": 50},
    ),
    "llama": (
        Workload("llama", "llama-1b", 4, 64, dtype=torch.bfloat16),
        {**_LAYER, "vocab_size": 50, "num_key_value_heads": 1, "head_dim": 32, "bos_token_id": 0, "eos_token_id": 1},
    ),
}
TINY["lora"] = (replace(TINY["llama"][0], name="lora", lora=True), TINY["llama"][1])


def _built(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    workload, sizes = TINY[name]
    if workload.lora:
        pytest.importorskip("peft")
    model = workload.build(layers=1, **{**sizes, **changes})
    return model, workload.sample(model)


@pytest.mark.parametrize("name", TINY)
def test_what_is_predicted_is_what_is_measured(name: str) -> None:
    workload, sizes = TINY[name]
    if workload.lora:
        pytest.importorskip("peft")
    rows = list(measured_rows(workload, layers=1, **sizes))
    assert len(rows) == len(METHODS)
    exact = rows[0]["kept_bytes"]
    for row in rows:
        assert row["exact_bytes"] == exact
        assert row["predicted_bytes"] == (None if row["method"] == CHECKPOINTING else row["kept_bytes"]), row
        # the least that any sketch of these layers can leave
        assert row["method"] == CHECKPOINTING or row["kept_bytes"] > exact - row["own_bytes"], row
        assert row["method"] != OURS or (row["sketched_layers"] > 0 and row["kept_bytes"] < exact), row


class _Alive(TorchDispatchMode):
    """Storages that operations made and that are still there: told by their lifetimes, without autograd's hooks."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in before}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                known = self._made.get(storage._cdata)
                if storage._cdata not in self._known and (known is None or known[0].expired()):
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def _alive_bytes(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    with _Alive([*model.parameters(), *model.buffers(), *batch.values()]) as alive:
        loss = model(**batch).loss
    # the graph hangs on the loss alone, which is not the backward pass's
    return alive.bytes - loss.untyped_storage().nbytes()


@pytest.mark.parametrize("name", ["fused", "llama"])
def test_what_is_counted_is_what_lives_on(name: str) -> None:
    model, batch = _built(name)
    for method in (METHODS[0], METHODS[1], METHODS[2], METHODS[5], METHODS[9]):
        with method.applied(model, batch):
            kept = measure_kept_bytes(model, exclude=batch.values(), **batch)
            alive = _alive_bytes(model, batch)
        if method.family == CHECKPOINTING:
            # random states and what blocks were called with by name are kept beside the saved tensors
            assert kept <= alive < 1.1 * kept
        else:
            assert alive == kept, method


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.125])
def test_a_roberta_layer_keeps_10_plus_6_r_and_alone_10_plus_8_r(ratio: float) -> None:
    workload, sizes = TINY["fused"]
    plain = RMMConfig(ratio=ratio, center=False)
    methods = {
        16.0: Method(EXACT),
        10 + 6 * ratio: Method(OURS, plain),
        10 + 8 * ratio: Method(ALONE, plain.replace(share_sketch=False)),
    }
    for figure, method in methods.items():
        kept = []
        for layers in (1, 2):
            model = workload.build(layers=layers, hidden_dropout_prob=0.0, **sizes)
            batch = workload.sample(model)
            with method.applied(model, batch):
                kept.append(measure_kept_bytes(model, **batch))
        unit = 4 * 4 * 64 * 64
        # two numbers a LayerNorm and row, one a head and row, and the seeds come on top
        assert figure <= (kept[1] - kept[0]) / unit < figure + 0.15


@pytest.mark.parametrize("name", ["fused", "lora"])
def test_a_method_leaves_the_model_as_it_was(name: str) -> None:
    model, batch = _built(name)
    exact = measure_kept_bytes(model, **batch)
    for method in METHODS:
        with method.applied(model, batch):
            pass
        assert not any(isinstance(module, RMMLinear) for module in model.modules())
        assert measure_kept_bytes(model, **batch) == exact


def test_every_committed_prediction_is_what_was_measured(tmp_path: Path) -> None:
    shutil.copy(RESULTS / FILE, tmp_path)
    assert write_report(tmp_path).startswith("| of exact | roberta-base |")
    assert (tmp_path / "figure.png").stat().st_size > 0
    predicted = [row for row in read_rows(RESULTS / FILE) if row["predicted_bytes"] is not None]
    assert len({row["model"] for row in predicted}) == 7
    assert [row["predicted_bytes"] for row in predicted] == [row["kept_bytes"] for row in predicted]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "bert"]) == 2
    assert "invalid choice: 'bert'" in capsys.readouterr().err
    (tmp_path / FILE).write_text("a,b\n1,2\n")
    assert report_main([str(tmp_path)]) == 2
    assert "python -m experiments.memory.run makes it anew" in capsys.readouterr().err
