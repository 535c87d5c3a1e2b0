"""VarianceMonitor: its numbers on a real training step, its turns, its file, and that training does not notice it."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from captured import captured
from model_of import ModelOf
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert_linears, ops
from rmm_linear.padding import valid_rows
from rmm_linear.variance import gradient_noise
from rmm_linear.variance.monitor import DRAWS, VarianceMonitor

CONFIG = RMMConfig(ratio=0.4, min_rows=1)
SEQUENCES, TOKENS, WIDTH = 6, 11, 16


def exact():
    """Six residual blocks of two layers, and a layer on the first token."""

    def run(it, x):
        for block in it.blocks:
            x = x + block(it.norm(x))
        return it.labels(it.norm(x[:, 0]))

    def block():
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    blocks = nn.ModuleList(block() for _ in range(6))
    return ModelOf(run, norm=nn.LayerNorm(WIDTH), blocks=blocks, labels=nn.Linear(WIDTH, 3))


def converted(config=CONFIG):
    torch.manual_seed(0)
    return convert_linears(exact(), config=config)


def train_step(network, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator)
    loss = nn.functional.cross_entropy(network(x), torch.randint(3, (SEQUENCES,), generator=generator))
    loss.backward()
    return loss.detach()


def sketched(network):
    return [name for name, layer in network.named_modules() if isinstance(layer, RMMLinear)]


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(storage="int4"), CONFIG.replace(sketch="gaussian")], ids=str)
def test_records_are_the_noise_of_what_the_layers_saw(config):
    network = converted(config)
    state = torch.get_rng_state()
    expected = captured(copy.deepcopy(network), train_step)
    torch.set_rng_state(state)
    with VarianceMonitor(network, every=1) as monitor:
        train_step(network)
        assert set(expected) == set(sketched(network))
        for name, (x, g) in expected.items():
            noise = gradient_noise(x, g, config, draws=DRAWS)
            record = monitor.latest[name]
            # the last layer's rows are its sequences
            minibatch = noise.row_variance if x.dim() == 2 else noise.sequence_variance
            assert (record.step, record.layer, record.rows) == (0, name, x.numel() // x.shape[-1])
            c, v = noise.gradient_squared, noise.sketch_variance
            ratios = v / c, v / minibatch, max(c - minibatch, 0) / (minibatch + v)
            expected = (c, v, minibatch, *ratios, noise.alpha)
            assert list(vars(record).values())[3:] == pytest.approx(expected)


def test_the_summary_adds_up_the_layers():
    network = converted()
    monitor = VarianceMonitor(network, every=2)
    assert monitor.noise() is None
    train_step(network)
    assert len(monitor.latest) == 6
    monitor.step()
    train_step(network)
    records = list(monitor.latest.values())
    c, v, m = (
        sum(getattr(record, name) for record in records)
        for name in ("gradient_squared", "sketch_variance", "minibatch_variance")
    )
    found = monitor.noise()
    assert found.relative_variance == pytest.approx(v / c)
    assert found.noise_ratio == pytest.approx(v / m)
    assert found.snr == pytest.approx(max(c - m, 0) / (m + v))
    # records that are not finite stay out
    whole, nan = found, float("nan")
    name = next(iter(monitor.latest))
    monitor.latest[name] = replace(monitor.latest[name], gradient_squared=nan, sketch_variance=nan)
    assert math.isfinite(monitor.noise().relative_variance)
    name = list(monitor.latest)[-1]
    monitor.latest[name] = replace(monitor.latest[name], minibatch_variance=nan)
    assert math.isfinite(monitor.noise().noise_ratio)
    monitor.latest = {name: replace(record, minibatch_variance=nan) for name, record in monitor.latest.items()}
    assert math.isnan(monitor.noise().snr)
    assert math.isnan(monitor.noise().noise_ratio)
    assert monitor.noise().relative_variance != whole.relative_variance


@pytest.mark.parametrize("every", [1, 2, 5, 13, 50])
def test_layers_take_turns(every):
    """Each once in `every` steps, evenly, and no more than their inputs are held."""
    network = converted()
    names, most = sketched(network), -(-13 // every)
    with VarianceMonitor(network, every=every) as monitor:
        # with a tiny loop in place of training: every layer of the model on its own
        held, seen = [], []
        measure = monitor._measure
        monitor._probe._measure = lambda name, *rest: (seen.append((monitor._steps, name)), measure(name, *rest))
        layers = [module for module in network.modules() if isinstance(module, RMMLinear)]
        for _ in range(2 * every):
            loss = sum(layer(torch.randn(4, 3, layer.in_features)).square().sum() for layer in layers)
            held.append(len(monitor._probe._held))
            loss.backward()
            monitor.step()
    assert max(held) == most
    assert min(held) == 13 // every
    assert Counter(name for _, name in seen) == dict.fromkeys(names, 2)
    steps = {name: [step for step, found in seen if found == name] for name in names}
    assert all(second - first == every for first, second in steps.values())


def test_the_file_has_one_strict_json_object_a_record_and_the_first_rank_writes_it(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "noise.jsonl"
    network = converted()
    with VarianceMonitor(network, every=1, path=path) as monitor:
        train_step(network)
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        assert records == [vars(record) for record in monitor.latest.values()]
    # appended to, by another monitor
    layer = RMMLinear(4, 4, config=CONFIG)
    with VarianceMonitor(layer, every=1, path=path):
        layer(torch.randn(1, 5, 4)).square().sum().backward()
    *before, last = path.read_text(encoding="utf-8").splitlines()
    assert before == lines

    def refuse(literal):
        raise AssertionError(literal)

    record = json.loads(last, parse_constant=refuse)
    assert record["layer"] == ""
    # one sequence tells nothing about the others
    assert record["minibatch_variance"] is record["noise_ratio"] is record["snr"] is None
    assert record["relative_variance"] > 0
    monkeypatch.setattr(ops, "data_parallel_rank", lambda: 1)
    with VarianceMonitor(network, every=1, path=tmp_path / "others" / "noise.jsonl") as monitor:
        train_step(network)
    assert len(monitor.latest) == 13
    assert not (tmp_path / "others").exists()


def test_padding_that_is_left_out_does_not_count():
    config = CONFIG.replace(skip_padding=True)
    layer, x = RMMLinear(WIDTH, WIDTH, config=config), torch.randn(SEQUENCES, TOKENS, WIDTH)
    mask = torch.arange(TOKENS) < torch.tensor([[11], [4], [7], [1], [9], [11]])
    with VarianceMonitor(layer, every=1) as monitor:
        with valid_rows(mask):
            y = layer(x)
        (y * mask.unsqueeze(-1)).square().sum().backward()
    record = monitor.latest[""]
    g = 2 * y.detach() * mask.unsqueeze(-1)
    valid = gradient_noise(x[mask], g[mask], config)
    assert record.rows == int(mask.sum())
    assert record.sketch_variance == pytest.approx(valid.sketch_variance)
    assert record.gradient_squared == pytest.approx(valid.gradient_squared)
    whole = gradient_noise(x, g, config)
    assert record.minibatch_variance == pytest.approx(whole.sequence_variance)
    assert record.sketch_variance < whole.sketch_variance


def test_a_resumed_run_goes_on():
    network = converted()
    with VarianceMonitor(network, every=4) as monitor:
        for _ in range(3):
            train_step(network)
            monitor.observe_gradient_norm(2.0, 1.0)
            monitor.step()
        # through JSON, as a trainer's state goes
        state = json.loads(json.dumps(monitor.state_dict(), allow_nan=False))
        train_step(network)
        whole = set(monitor.latest)
    other = converted()
    with VarianceMonitor(other, every=4) as resumed:
        resumed.load_state_dict(state)
        assert len(resumed.latest) == 9
        train_step(other)
        assert set(resumed.latest) == whole == set(sketched(network))
        assert resumed.latest["labels"].step == 3
        assert resumed.clip_fraction == 1.0
    # what is nan comes back as nan
    layer = RMMLinear(4, 4, config=CONFIG)
    with VarianceMonitor(layer, every=1) as monitor:
        layer(torch.randn(1, 5, 4)).sum().backward()
        state = json.loads(json.dumps(monitor.state_dict(), allow_nan=False))
        monitor.load_state_dict(state)
        assert math.isnan(monitor.latest[""].snr)


def test_clipped_steps_are_counted():
    monitor = VarianceMonitor(converted())
    assert monitor.clip_fraction is None
    for norm in (0.5, 1.0, 1.5, float("inf"), float("nan"), torch.tensor(3.0), torch.tensor(float("nan"))):
        monitor.observe_gradient_norm(norm, 1.0)
    assert monitor.clip_fraction == 0.5
    assert (monitor.state_dict()["observed"], monitor.state_dict()["clipped"]) == (4, 2)


def test_bad_arguments_and_states_are_refused(tmp_path):
    for every in (0, True, 2.0, "50"):
        with pytest.raises(ValueError, match="every=.* is not a positive int; pass the steps"):
            VarianceMonitor(converted(), every=every)
    with pytest.raises(ValueError, match="is a folder; pass the path of a file in it"):
        VarianceMonitor(converted(), path=tmp_path)
    with pytest.raises(ValueError, match="the ModelOf has no sketched layer.*an unconverted model"):
        VarianceMonitor(exact())
    monitor = VarianceMonitor(network := converted(), every=1)
    train_step(network)
    monitor.close()
    assert all(not module._forward_hooks for module in network.modules())
    with pytest.raises(ValueError, match="record of 'labels', which is no sketched layer of this model"):
        VarianceMonitor(RMMLinear(4, 4)).load_state_dict(monitor.state_dict())
    for state in ({}, {"steps": "many", "observed": 0, "clipped": 0, "latest": []}):
        with pytest.raises(ValueError, match="no state of VarianceMonitor"):
            monitor.load_state_dict(state)
