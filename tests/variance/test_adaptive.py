"""AdaptiveRatios: the bytes it is given, the noise it is held to, the same decisions again."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rmm_linear import RMMConfig, RMMLinear, convert_linears
from rmm_linear.variance import AdaptiveRatios, ProfileBuilder

CONFIG = RMMConfig(ratio=0.25, min_rows=1)
LAYERS = 6


def make_model(config: RMMConfig = CONFIG) -> nn.Module:
    """Layers whose gradients differ a hundredfold."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for number in range(LAYERS):
        layer = nn.Linear(24, 24)
        nn.init.normal_(layer.weight, std=0.4 if number % 2 else 0.1)
        blocks += [layer, nn.Softsign()]
    return convert_linears(nn.Sequential(*blocks), config=config)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 32, 24, generator=generator) + torch.randn(8, 1, 24, generator=generator)


def train(model: nn.Module, ratios: AdaptiveRatios, first: int, last: int) -> list[list[object]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    made: list[list[object]] = []
    for step in range(first, last):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(batch(step))[..., :4].square().mean() * 100).backward()
        optimizer.step()
        made.append(list(ratios.step()))
    return made


def configs(model: nn.Module) -> list[RMMConfig]:
    return [layer.rmm_config for layer in model.modules() if isinstance(layer, RMMLinear)]


def test_auto_spends_what_the_uniform_ratio_spends_and_has_less_variance() -> None:
    model = make_model()
    ratios = AdaptiveRatios(model, measure_steps=6, recheck_steps=100)
    assert ratios.step() == []
    ratios = AdaptiveRatios(model, measure_steps=6, recheck_steps=10)
    made = train(model, ratios, 0, 30)
    # within the target nothing is changed for a trifle
    assert [bool(changes) for changes in made] == [False] * 5 + [True] + [False] * 24
    assert ratios.budget_bytes == LAYERS * CONFIG.saved_bytes(256, 24, torch.float32)
    assert ratios.allocation is not None
    assert ratios.allocation.saved_bytes <= ratios.budget_bytes
    assert len({config.ratio for config in configs(model)}) > 1
    # by measurements of batches that it has not seen
    builder = ProfileBuilder()
    probe = AdaptiveRatios(model, measure_steps=2, recheck_steps=100)
    train(model, probe, 50, 51)
    builder = probe._builder
    profile = builder.build()
    chosen = profile.allocation({layer.name: ratios.allocation.configs[layer.name] for layer in profile.layers})
    assert chosen.variance < 0.8 * profile.uniform(CONFIG).variance


BYTES = 0.4 * LAYERS * RMMConfig(ratio=1.0).saved_bytes(256, 24, torch.float32)
COARSE = CONFIG.replace(storage="int2", ratio=1.0)
# configuration, options, a condition on the allocation's bytes and noise, and the warning
FIRST = {
    "bytes": (CONFIG, {"budget": BYTES}, lambda kept, noise, budget: 0.9 * BYTES < kept <= BYTES == budget, ""),
    "a target": (
        CONFIG,
        {"budget": None, "noise_target": 0.2},
        lambda kept, noise, budget: 0.1 < noise <= 0.2 and budget is None,
        "",
    ),
    "bytes that break the target": (
        CONFIG,
        {"budget": "auto", "noise_target": 1e-3},
        lambda kept, noise, budget: noise <= 1e-3 and kept > budget,
        "above the target of 0.001; the target goes before",
    ),
    "a target out of reach": (
        CONFIG.replace(storage="int2"),
        {"budget": None, "noise_target": 1e-6},
        lambda kept, noise, budget: kept == LAYERS * COARSE.saved_bytes(256, 24, torch.float32),
        "take a finer storage",
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_first_allocation(case: str, caplog: pytest.LogCaptureFixture) -> None:
    config, options, holds, said = FIRST[case]
    model = make_model(config)
    with caplog.at_level(logging.WARNING, "rmm_linear"), AdaptiveRatios(model, measure_steps=6, **options) as ratios:  # type: ignore[arg-type]
        train(model, ratios, 0, 6)
    assert ratios.allocation is not None
    assert holds(ratios.allocation.saved_bytes, ratios.allocation.noise_ratio, ratios.budget_bytes)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_a_broken_target_raises_ratios_and_lowers_none(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    ratios = AdaptiveRatios(model, budget=None, noise_target=0.2, measure_steps=6, recheck_steps=10)
    train(model, ratios, 0, 6)
    before = configs(model)
    ratios._noise_target = 0.02
    with caplog.at_level(logging.INFO, "rmm_linear"):
        made = train(model, ratios, 6, 20)
    assert [bool(changes) for changes in made] == [False] * 9 + [True] + [False] * 4
    for old, new in zip(before, configs(model), strict=True):
        assert new.ratio >= old.ratio
    assert ratios.allocation is not None
    assert ratios.allocation.noise_ratio <= 0.02
    assert "step 16: " in caplog.text
    assert "goes from ratio" in caplog.text


def test_a_budget_too_small_is_an_error_that_says_the_least() -> None:
    model = make_model()
    ratios = AdaptiveRatios(model, budget=1000, measure_steps=6)
    with pytest.raises(ValueError, match=r"budget_bytes=1000.* is below the least possible"):
        train(model, ratios, 0, 6)


@pytest.mark.parametrize("stop", [3, 6, 17])
def test_a_resumed_run_does_what_it_would_have_done(stop: int) -> None:
    options = {"measure_steps": 6, "recheck_steps": 10, "noise_target": 0.3}
    whole = make_model()
    straight = AdaptiveRatios(whole, **options)  # type: ignore[arg-type]
    train(whole, straight, 0, 30)
    first = make_model()
    ratios = AdaptiveRatios(first, **options)  # type: ignore[arg-type]
    train(first, ratios, 0, stop)
    state, weights = json.loads(json.dumps(ratios.state_dict(), allow_nan=False)), first.state_dict()
    second = make_model()
    second.load_state_dict(weights)
    resumed = AdaptiveRatios(second, **options)  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    train(second, resumed, stop, 30)
    assert configs(second) == configs(whole)
    assert resumed.changes == straight.changes
    assert resumed.allocation == straight.allocation
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_states_of_others_are_refused() -> None:
    ratios = AdaptiveRatios(make_model())
    with pytest.raises(ValueError, match="no state of AdaptiveRatios"):
        ratios.load_state_dict({"steps": 1})
    state = ratios.state_dict()
    state["configs"]["other"] = CONFIG.to_dict()
    with pytest.raises(ValueError, match="'other', which is no sketched layer"):
        ratios.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None}, "neither budget nor noise_target"),
        ({"budget": math.nan}, "budget=nan"),
        ({"budget": -1}, "budget=-1"),
        ({"budget": "most"}, "budget='most'"),
        ({"budget": True}, "budget=True"),
        ({"noise_target": 0}, "noise_target=0"),
        ({"noise_target": math.inf}, "noise_target=inf"),
        ({"measure_steps": 0}, "measure_steps=0"),
        ({"recheck_steps": 1.5}, "recheck_steps=1.5"),
        ({"measure_steps": 20, "recheck_steps": 10}, "a measurement must end before the next one begins"),
        ({"ratios": [0.5, 2.0]}, "ratio=2.0"),
    ],
)
def test_bad_values_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveRatios(make_model(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["auto", "number"])
def test_batches_that_grow_are_brought_back_to_the_budget(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_first = float(LAYERS * CONFIG.saved_bytes(256, 24, torch.float32))
    model = make_model()
    ratios = AdaptiveRatios(model, budget="auto" if budget == "auto" else at_first, measure_steps=6, recheck_steps=10)
    train(model, ratios, 0, 6)
    usual = batch
    monkeypatch.setattr("test_adaptive.batch", lambda step: torch.cat([usual(step), usual(step + 1000)[:, :16]], 1))
    train(model, ratios, 6, 16)
    assert ratios.allocation is not None
    assert ratios.budget_bytes is not None
    if budget == "auto":
        assert 1.3 * at_first < ratios.budget_bytes < 1.7 * at_first
    else:
        assert ratios.budget_bytes == at_first
        assert any(change.step == 16 for change in ratios.changes)
    assert 0.85 * ratios.budget_bytes < ratios.allocation.saved_bytes <= 1.02 * ratios.budget_bytes


def test_a_budget_that_batches_have_outgrown_is_said_and_the_least_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    ratios = AdaptiveRatios(model, budget=16_000, ratios=(0.1, 0.5, 1.0), measure_steps=6, recheck_steps=10)
    train(model, ratios, 0, 6)
    usual = batch
    monkeypatch.setattr("test_adaptive.batch", lambda step: usual(step).repeat(1, 4, 1))
    with caplog.at_level(logging.WARNING, "rmm_linear"):
        train(model, ratios, 6, 16)
    assert "the batches have grown" in caplog.text
    assert {config.ratio for config in configs(model)} == {0.1}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = make_model()
    with AdaptiveRatios(model, measure_steps=6) as ratios:
        for step in range(6):
            # what a rank measures is its own; the second one's gradients overflow
            loss = model(batch(step + 100 * rank))[..., :4].square().mean() * (100 if rank == 0 else float("inf"))
            loss.backward()
            ratios.step()
        kept = [config.to_dict() for config in configs(model)]
        assert ratios.allocation is not None
        Path(folder, f"{rank}.json").write_text(json.dumps([kept, ratios.allocation.saved_bytes]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_keep_what_the_first_decides(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len({config["ratio"] for config in first[0]}) > 1
