"""`fit(..., executor=None)`: whole modules are converted or checkpointed, by measurement."""

import copy
import inspect
from functools import partial

import pytest
import torch
import transformers
from assert_unchanged import assert_unchanged
from model_of import ModelOf
from tiny_transformers import tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert_linears, fit, module_fitting
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.layer import SketchedLayer
from tests.checkpointing.measured_peak import MeasuredPeak
from tests.checkpointing.planned_models import assert_equal

ROWS, WIDTH = 2048, 32


def _stack(*inner):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH), *inner)
        for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 5)).train()


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


fit_stack = partial(fit, loss_fn=_loss, executor=None)


@pytest.fixture
def batch():
    return torch.randn(ROWS, WIDTH), torch.randint(0, 5, (ROWS,))


@pytest.fixture
def times(monkeypatch):
    """Milliseconds that steps seem to take, by name; 9 for others."""
    found = {}
    monkeypatch.setattr(module_fitting._Trials, "_time", lambda _, *means: found.get(module_fitting._name(*means), 9.0))
    return found


def _gradients(model, batch):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**batch).loss if isinstance(batch, dict) else _loss(model, batch)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _attributes(model):
    def described(value):
        return {key: id(each) for key, each in value.items()} if isinstance(value, dict) else id(value)

    return [
        (type(module), {name: described(each) for name, each in vars(module).items()}) for module in model.modules()
    ]


def _peak_of(model, batch):
    model.zero_grad()
    with MeasuredPeak() as measured:
        _loss(model, batch).backward()
    return measured.peak


def test_as_few_blocks_are_checkpointed_as_the_budget_allows_and_gradients_have_the_bits_of_eager_mode(batch):
    model = _stack()
    given, expected = _attributes(model), _gradients(model, batch)
    plain = _peak_of(model, batch)
    found = fit_stack(model, batch, "60%", noise=0)
    count = found.chosen.checkpoints
    assert found.plain_bytes == pytest.approx(plain, rel=0.01)
    assert _peak_of(model, batch) == pytest.approx(found.chosen.least_bytes, rel=0.01)
    assert found.chosen.least_bytes <= found.budget_bytes == int(0.6 * found.plain_bytes)
    assert_equal(_gradients(model, batch), expected)
    assert {each.name for each in found.candidates} == {"unchanged", f"{count} checkpoints"}
    for part in ("no compiler was used", "time, ms", f"{found.chosen.time:.1f}"):
        assert part in str(found)
    (line,) = (line for line in str(found).splitlines() if "does not fit" in line)
    name, peak, _, *rest = line.split()
    assert (name, peak, rest) == ("unchanged", f"{found.plain_bytes / 2**20:.2f}", ["does", "not", "fit"])
    found.remove()
    assert _attributes(model) == given
    for block in model[: count - 1]:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    assert _peak_of(model, batch) > found.budget_bytes


def test_a_transformer_is_converted_and_checkpointed_and_stays_as_it_was(times):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 256}
    model = tiny("BertForSequenceClassification", dropout=0.1, **sizes)
    model.register_buffer("average", torch.zeros(()))
    # parts of T5's blocks have the flag of blocks
    model.bert.encoder.layer[0].attention.gradient_checkpointing = False
    model.register_forward_hook(lambda module, args, output: (module.average.add_(1), None)[1])
    ids = torch.randint(0, 50, (64, 16))
    batch = {"input_ids": ids, "labels": torch.randint(0, 2, (64,))}
    expected = _gradients(model, batch)
    model.average.zero_()
    given = _attributes(model)
    times["int8 + 2 checkpoints"] = 1.0
    with assert_unchanged(model):
        found = fit(model, batch, "50%", noise=0.05, executor=None)
    assert found.chosen.name == "int8 + 2 checkpoints"
    assert 0 < found.chosen.noise_ratio < 0.05
    layers = model.bert.encoder.layer
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, False]
    assert isinstance(layers[0].output.dense, SketchedLayer)
    noisy = _gradients(model, batch)
    assert any(not torch.equal(one, other) for one, other in zip(noisy, expected, strict=True))
    assert found.remove() is model
    assert _attributes(model) == given
    assert_equal(_gradients(model, batch), expected)


def test_noise_buys_time_as_far_as_the_limit_goes_and_more_than_measurements_vary_by(batch, times):
    times.update({"ratio 0.1": 1.0, "ratio 0.25": 2.0, "ratio 0.5": 3.0})
    loud = fit_stack(_stack(), batch, noise=1e9).chosen
    assert loud.name == "ratio 0.1"
    found = fit_stack(_stack(), batch, noise=0.9 * loud.noise_ratio)
    assert found.chosen.name == "ratio 0.25"
    assert [each.name for each in found.candidates if each.noise] == ["ratio 0.1", "ratio 0.25"]
    # the default allows no sketches
    assert [each.name for each in fit_stack(_stack(), batch).candidates] == ["unchanged"]
    # measurements vary
    for ms, chosen in ((8.6, "unchanged"), (8.5, "ratio 0.1")):
        times.update({"ratio 0.1": ms, "ratio 0.25": 9.0, "ratio 0.5": 9.0})
        assert fit_stack(_stack(), batch, noise=1e9).chosen.name == chosen


def test_what_can_not_be_met_names_the_least(batch, times):
    model = _stack()
    given = _attributes(model)
    with pytest.raises(
        InfeasibleBudgetError, match=r"found no means within 5% = .*takes [\d.]+% = .*; the unchanged step takes .*$"
    ) as told:
        fit_stack(model, batch, "5%")
    assert _attributes(model) == given
    found = fit_stack(model, batch, told.value.least_bytes)
    assert found.chosen.least_bytes <= told.value.least_bytes
    with pytest.raises(
        InfeasibleBudgetError, match="noisier than noise=1e-09: the least is .*exact gradients take .* at the least$"
    ):
        fit_stack(_stack(), batch, "85%", noise=1e-9, allow="code")


def _replacing(it, x):
    it.count = it.count + 1
    return x * it.count


def _writing(it, x):
    # no version tells of it
    it.count.data.add_(1)
    return x * it.count


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.BatchNorm1d, WIDTH),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        *(lambda run=run: ModelOf(run, count=torch.zeros(())) for run in (_replacing, _writing)),
    ],
)
@pytest.mark.parametrize("is_short_of_memory", [False, pytest.param(True, marks=pytest.mark.grid)])
def test_blocks_that_change_their_buffers_are_not_checkpointed(batch, times, monkeypatch, make, is_short_of_memory):
    def loss_of(model, batch, loss_fn):
        is_first = inspect.currentframe().f_back.f_code.co_name == "_find_blocks" and torch.is_grad_enabled()
        if is_short_of_memory and is_first:
            raise torch.OutOfMemoryError("out of memory")
        return loss_fn(model, batch)

    monkeypatch.setattr(module_fitting, "loss_of", loss_of)
    model = _stack()
    model[0].append(make())
    assert fit_stack(model, batch, "85%", noise=0, allow="recompute").chosen.checkpoints
    assert "forward" not in vars(model[0])
    assert "forward" in vars(model[1])
    # a norm without averages changes nothing
    model = _stack(nn.BatchNorm1d(WIDTH, track_running_stats=False))
    assert fit_stack(model, batch, "60%", noise=0).chosen.checkpoints
    with pytest.raises(InfeasibleBudgetError, match="4 blocks are not checkpointed"):
        fit_stack(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), make()) for _ in range(4))), batch, "60%", 0)


def test_what_others_change_after_the_fit_stays(batch, times):
    model = _stack()
    found = fit_stack(model, batch, "60%", noise=0)
    ours = model[1].forward
    model.forward, model[0].forward = partial(model.forward), partial(model[0].forward)
    others = model.forward, model[0].forward
    assert "forward" in vars(model[1])
    found.remove()
    assert (model.forward, model[0].forward) == others
    assert "forward" not in vars(model[1])
    model[1].forward = ours
    found.remove()
    assert model[1].forward is ours
    del model[1].forward, model.forward, model[0].forward
    assert fit_stack(model, batch, noise=0).chosen.name == "unchanged"


def test_checkpoints_of_transformers_stay_where_the_user_enables_them_after_the_fit(times):
    model = tiny("BertForSequenceClassification", dropout=0.1, hidden_size=64, intermediate_size=256)
    batch = {"input_ids": torch.randint(0, 50, (64, 16)), "labels": torch.randint(0, 2, (64,))}
    found = fit(model, batch, "80%", noise=0, executor=None)
    assert found.chosen.checkpoints
    model.gradient_checkpointing_enable()
    found.remove()
    assert all(layer.gradient_checkpointing for layer in model.bert.encoder.layer)


def test_of_nested_blocks_the_inner_ones_are_checkpointed(batch, times):
    class Stage(nn.Sequential):
        pass

    # neither its stages nor single modules or leaves are blocks
    blocks = list(_stack(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)))))[:4]
    model = nn.Sequential(Stage(*blocks[:2]), Stage(*blocks[2:], blocks[0]), nn.Linear(WIDTH, 5)).train()
    assert module_fitting._blocks(model) == blocks
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    blocks = module_fitting._blocks(transformers.SwinForImageClassification(config))
    assert [type(block).__name__ for block in blocks] == ["SwinLayer"] * 4


def test_the_plain_step_need_not_run_where_noise_is_measured(batch, times):
    def check(model, args):
        if not isinstance(model[0][0], SketchedLayer) and len(args[0]) in rows:
            raise torch.OutOfMemoryError("out of memory\nTraceback")

    rows, model = [ROWS], _stack()
    model.register_forward_pre_hook(check)
    assert fit_stack(model, batch, "12MiB", noise=1e9, allow="code").remove() is model
    model.register_forward_pre_hook(lambda model, args: check([[None]], args))
    rows[0] = ROWS // 8
    with pytest.raises(
        InfeasibleBudgetError, match="the noise can't be measured: out of memory; the budget is 12.00 MiB, and exact"
    ):
        fit_stack(model, batch, "12MiB", noise=1e9, allow="code")


def test_a_fitted_model_and_its_copies_are_not_fitted_again(batch):
    model = _stack()
    removed = fit_stack(model, batch, "60%", noise=0)
    removed.remove()
    found = fit_stack(model, batch, "60%", noise=0)
    removed.remove()
    for fitted in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"fitted already, or a copy of a fitted model: call remove\(\)"):
            fit_stack(fitted, batch, "60%", noise=0)
    fit_stack(found.remove(), batch, "60%", noise=0)


class _InBackward(nn.GELU):
    """A GELU, in whose place another function runs in a backward pass."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if torch._C._current_graph_task_id() >= 0 else super().forward(x)


def test_errors_of_the_step_are_notes_or_the_users_own(batch, monkeypatch):
    def fails(run, devices):
        raise torch.OutOfMemoryError("out of memory\nTraceback")

    with monkeypatch.context() as patch:
        patch.setattr(module_fitting, "median_ms", fails)
        with pytest.raises(ValueError, match="unchanged: out of memory; .*[34] checkpoints: out of memory$"):
            fit_stack(_stack(), batch, "8MiB", noise=0)

    def refuse(x):
        raise ValueError("not twice")

    with pytest.raises(ValueError, match="not twice"):
        fit_stack(_stack(_InBackward(refuse)), batch, "60%", noise=0)
    model = nn.Sequential(nn.Embedding(9, 8)).train()
    tokens = torch.randint(0, 9, (ROWS,)), torch.randint(0, 8, (ROWS,))
    with pytest.raises(InfeasibleBudgetError, match="has no linear layers"):
        fit_stack(model, tokens, "50%")


def test_caches_of_the_first_step_are_not_in_the_peak(batch):
    class Caching(nn.Sequential):
        cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.zeros(2 * 2**20)
            return super().forward(x)

    assert fit_stack(Caching(_stack()).train(), batch, noise=0).plain_bytes < 16 * 2**20


def _calling(make, call):
    """Three blocks, each called by a function."""

    def run(it, x):
        x = x.clone()
        for block in it.blocks:
            x = call(block, x)
        return x

    return ModelOf(run, blocks=nn.ModuleList(make(*_stack()[0]) for _ in range(3)))


def test_blocks_may_have_keywords_of_checkpoints(batch, times):
    class Block(nn.Sequential):
        def forward(self, x, debug=False, forward=1):
            return super().forward(x) * (3 if debug else 1) * forward

    model = _calling(Block, lambda block, x: block(x, debug=True, forward=2)).train()
    expected = _gradients(model, batch)
    assert fit_stack(model, batch, "70%", noise=0).chosen.checkpoints
    assert_equal(_gradients(model, batch), expected)


@pytest.mark.parametrize("has_keywords", [False, True])
def test_blocks_that_change_their_inputs_are_not_checkpointed(batch, times, has_keywords):
    class Adds(nn.Sequential):
        def forward(self, x):
            x += 1
            return super().forward(x)

    model = _calling(Adds, lambda block, x: block(x=x) if has_keywords else block(x)).train()
    with pytest.raises(InfeasibleBudgetError, match="modified by an inplace operation"):
        fit_stack(model, batch, "70%", noise=0)


def test_random_states_of_the_devices_of_all_arguments_are_kept(monkeypatch):
    seen = []
    monkeypatch.setattr(module_fitting, "checkpoint", lambda function, *args, **_: (seen.extend(args), function(*args)))
    module_fitting._checkpointed(lambda x, mask: x + mask, 1, mask=2)
    assert seen == [1, 2]


def test_a_fit_looks_at_gradients_and_warns_once_of_layers_that_stay_exact(batch, times):
    times["int8"] = 1.0
    model = _stack()
    nn.utils.parametrizations.weight_norm(model[4])
    with torch.no_grad(), pytest.warns(UserWarning, match="parametrized") as told:
        assert fit_stack(model, batch, "95%", noise=0.5, allow="code").chosen.name == "int8"
    assert len(told) == 1


def test_what_can_not_be_tried_is_told(batch, times, monkeypatch):
    times["int8"] = 1.0
    found = fit_stack(_stack(_InBackward(lambda x: x)), batch, "90%", noise=0.01, allow=["recompute", "code"])
    assert "\n4 checkpoints: torch.utils.checkpoint: A different number of tensors" in str(found)
    assert found.chosen.name == "int8"
    found = fit_stack(convert_linears(_stack(), 0.5), batch, "90%", noise=0)
    assert "that are converted already stay so, and their noise is not counted" in str(found)
    assert isinstance(found.remove()[0][0], SketchedLayer)
    measured = module_fitting.measure_peak_bytes

    def measure(run, device):
        peak = measured(run, device)
        if peak > 13 * 2**20:
            raise torch.OutOfMemoryError("out of memory")
        return peak

    monkeypatch.setattr(module_fitting, "measure_peak_bytes", measure)
    found = fit_stack(_stack(), batch, "8MiB", noise=0)
    assert "unchanged: out of memory" in str(found)
    assert found.chosen.least_bytes <= 8 * 2**20
    with pytest.raises(InfeasibleBudgetError, match=r"noisier than .*, or a larger budget; the budget is [^;,]+$"):
        fit_stack(_stack(), batch, "12MiB", noise=1e-9, allow="code")
    with pytest.raises(ValueError, match="pass a budget in bytes"):
        fit_stack(_stack(), batch, "50%")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": _stack().to("meta")}, "executor=None measures steps on one device, .* are on meta: "),
        ({"model": nn.Sequential(_stack(), nn.Linear(5, 5, device="meta"))}, "are on cpu, meta: "),
        ({"model": _stack().requires_grad_(False)}, "nothing that the step returns depends on a parameter"),
        ({"loss_fn": None, "sample": torch.randn(8, WIDTH)}, r"pass loss_fn\(model, batch\)"),
        ({"loss_fn": lambda model, batch: _loss(model, batch).item()}, "returns no loss with a graph"),
        ({"loss_fn": lambda model, batch: _loss(model, batch).detach()}, "returns no loss with a graph"),
        ({"allow": ("recompute", "page"), "page_to": "host"}, "executor=None was given"),
        ({"sample": (torch.randn(256, WIDTH), torch.randint(0, 5, (256,)))}, "too few rows"),
    ],
)
def test_bad_arguments_are_refused(batch, change, message):
    given = {"model": _stack(), "sample": batch, "budget": "95%", "loss_fn": _loss, "allow": "code", **change}
    with pytest.raises(ValueError, match=message):
        fit(**given, executor=None)
