"""`fit` takes the fastest step within a byte budget and a noise limit."""

import copy
import json
import math
import pickle
import sys

import pytest
import torch
import transformers
from assert_unchanged import assert_unchanged
from model_of import ModelOf
from torch import nn

from rmm_linear import fit, fitting
from rmm_linear.checkpointing import capture, checkpoint_model
from rmm_linear.checkpointing.planned import is_planned
from rmm_linear.compiler import backend, costs, partial_coding, plans
from rmm_linear.compiler.backend import rmm_linear
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.coding import Bits
from tests.checkpointing.planned_models import assert_equal

ROWS, WIDTH = 2048, 96
# Of the exact step's peak: 8 bits fit, and the exact step has to compute so much twice that it takes longer.
CODES = "33%"
_PAGING = {"allow": ["recompute", "page"], "executor": "exact", "page_to": "/tmp"}


class Classifier(nn.Module):
    """Norms, GELUs, linear layers, and dropout where it is asked for; returns the loss."""

    def __init__(self, dropout=0.0):
        super().__init__()
        blocks = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        ]
        self.blocks, self.dropout, self.head = nn.ModuleList(blocks), nn.Dropout(dropout), nn.Linear(WIDTH, 5)

    def forward(self, x, y):
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), y.flatten())


def _model(dropout=0.0, blocks=4):
    torch.manual_seed(0)
    model = Classifier(dropout).train()
    del model.blocks[blocks:]
    return model


def _small_model():
    """One block, whose 26 ops are planned in seconds, also by a solver, to the end."""
    return _model(0.1, blocks=1)


@pytest.fixture
def batch():
    return torch.randn(ROWS, WIDTH), torch.randint(0, 5, (ROWS,))


def _gradients(model, batch):
    model.zero_grad()
    model(*batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_step_that_fits_stays_exact(batch):
    model = _model()
    expected = _gradients(copy.deepcopy(model), batch)
    found = fit(model, batch, "100%", executor="exact")
    assert found.chosen.name == "exact"
    assert found.chosen.time == 1.0
    assert len(found.candidates) == 1
    assert "gradients: exact" in found.card()
    assert_equal(_gradients(model, batch), expected)


def test_codes_are_taken_where_they_cost_less_than_computing_twice(batch):
    found = fit(_model(), batch, CODES)
    # hardly anything is computed twice in place of a code
    assert found.chosen.name.startswith("8 bits")
    assert found.plan.planned.extra_cost < 0.01 * found.plan.planned.cost
    assert found.plan.peak_bytes <= found.budget_bytes == int(0.33 * found.plain_bytes)
    assert 0 < found.chosen.noise_ratio < 0.01
    # fewer bits were not tried, and computing twice takes longer
    assert {candidate.name[:6] for candidate in found.candidates} == {"8 bits", "exact"}
    assert found.least_time <= found.candidates[0].time < min(each.time for each in found.candidates[1:])
    for part in (f"{found.chosen.name}: peak", "noise over minibatch noise", "codes of"):
        assert part in str(found)
    card = found.card()
    for part in ("gradients: estimates", "codes of", f"add to a gradient: {found.chosen.noise_ratio:.2g} of"):
        assert part in card
    # as the first line of the fit: from the exact step's peak
    assert str(found).split("peak ")[1].split(",")[0] == card.split("batch: ")[1].split("\n")[0]


def _without_memory(*activations):
    """A model whose blocks have these activations, and its batch."""
    with torch.device("meta"):
        model, batch = _model(), (torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64))
        for block, activation in zip(model.blocks, activations, strict=False):
            block[2] = activation
    return model, batch


@pytest.mark.slow
def test_bits_that_code_the_same_tensors_alike_are_planned_once(monkeypatch):
    planned, add = [], fitting._Trials.add
    monkeypatch.setattr(
        fitting._Trials, "add", lambda self, name, *rest: planned.append(name) or add(self, name, *rest)
    )
    # with 4 bits its bias would be above 1 %, so that it has 8
    model, batch = _without_memory(*(ModelOf(lambda it, x: x / (1 + torch.exp(-x))) for _ in range(4)))
    with pytest.raises(InfeasibleBudgetError):
        fit(model, batch, "50%", allow="code", executor="exact")
    assert planned == ["exact", "8 bits", "4 bits"]


@pytest.mark.slow
def test_prices_of_codes_of_several_bits_are_those_of_each_alone():
    model, batch = _without_memory(nn.ReLU())
    exact = capture(model, batch)
    shared, alone = {}, 0
    for given in fitting._CODES.values():
        bits, own = Bits.of(given), {}
        coded = exact.rewritten(bits, None)
        prices = partial_coding._prices(exact, coded, bits, own)
        assert min(prices.values()) > 0
        assert partial_coding._prices(exact, coded, bits, shared) == prices
        alone += len(own)
    assert len(shared) < alone


@pytest.mark.slow
def test_tensors_are_coded_computed_again_or_kept_as_is_fastest(batch):
    pytest.importorskip("scipy")
    model = _model()
    found = fit(model, batch, "50%", executor="inductor")
    exact = next(candidate for candidate in found.candidates if not candidate.options)
    assert found.least_time <= found.chosen.time < exact.time
    names = [tensor.name for tensor in found.plan.coding.coded]
    assert sorted(names) == found.chosen.options["bits"]["only"]
    # two of each block can be coded, and one at the end
    assert 0 < len(names) < 8
    assert found.plan.planned.extra_cost > 0
    assert found.plan.peak_bytes <= found.budget_bytes
    # the options name the tensors
    model = _model()
    # op by op, readings take more memory
    options = json.loads(found.to_json()) | {"executor": "exact", "budget": "100%"}
    torch.compile(model, backend=rmm_linear, options=options)(*batch).backward()
    assert [tensor.name for tensor in plans(model)[0].coding.coded] == names


def test_without_noise_the_gradients_are_those_of_eager_mode_and_the_options_run_the_same_plan_elsewhere(batch):
    model = _model(blocks=2)
    expected = _gradients(copy.deepcopy(model), batch)
    found = fit(model, batch, "60%", noise=0, executor="exact")
    assert found.chosen.name == "exact"
    assert found.plan.planned.extra_cost > 0
    assert_equal(_gradients(model, batch), expected)
    other = _model(blocks=2)
    torch.compile(other, backend=rmm_linear, options=json.loads(found.to_json()))(*batch).backward()
    assert plans(other)[0].schedule == found.plan.schedule


def test_a_fit_with_timed_ops_tells_the_predicted_and_the_measured_time(batch, monkeypatch):
    monkeypatch.setattr(backend, "measured_ms", lambda *_: 12.5)
    monkeypatch.setattr(backend, "_APART", math.inf)
    model = _model(blocks=2)
    found = fit(model, batch, "60%", noise=0, executor="exact", costs="ms")
    predicted = f"predicted time of a step {found.plan.planned.cost:.4g} ms"
    assert found.options["costs"] == "ms"
    assert f"{predicted}, not yet measured" in str(found)
    model(*batch).backward()
    assert f"{predicted}, measured 12.5 ms" in str(found)
    found.remove()
    # ops take less time at the first step than at the planning: the step is planned once more
    monkeypatch.setattr(backend, "_APART", 0.15)
    monkeypatch.setattr(costs, "_measured_ms", lambda *_: 1000.0)
    found = fit(model, batch, "60%", noise=0, executor="exact", costs="ms")
    monkeypatch.setattr(costs, "_measured_ms", lambda *_: 1.0)
    model(*batch).backward()
    assert found.plan.planned.cost < found.chosen.plan.planned.cost / 500
    assert found.plan.measured_ms == 12.5


@pytest.mark.slow
def test_a_noise_limit_that_codes_exceed_leaves_the_step_exact(batch):
    found = fit(_model(), batch, CODES, noise=1e-9)
    assert found.chosen.name == "exact"
    assert found.candidates[0].name.startswith("8 bits")
    assert found.candidates[0].noise_ratio > 1e-9


@pytest.mark.slow
def test_the_noise_is_that_of_codes_and_not_of_dropout(batch):
    with_dropout = fit(_model(0.5), batch, "50%", allow=["code"]).chosen
    without = fit(_model(), batch, "50%", allow=["code"]).chosen
    assert with_dropout.name == without.name == "8 bits"
    # masks double what a row adds to both variances
    assert with_dropout.noise_ratio < 10 * without.noise_ratio


@pytest.mark.slow
def test_the_measured_noise_is_that_of_the_steps(batch):
    """The variance over draws of the whole step, from 24 of them, is an eighth of that of the eight parts."""
    model = _model()
    noise = fit(model, batch, CODES, allow="code").chosen.noise
    model = _model()
    step = torch.compile(model, backend=rmm_linear, options={"bits": 8, "executor": "exact"})
    draws = torch.stack([torch.cat([g.flatten() for g in _gradients(step, batch)]) for _ in range(24)])
    variance = draws.var(0, unbiased=True).sum()
    # over 300,000 parameters the standard error of either is a few percent
    assert float(variance) == pytest.approx(noise.step.value / 8, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"allow": "code"}], ids=str)
def test_what_cannot_be_met_names_the_least(batch, options):
    model = _model()
    with pytest.raises(InfeasibleBudgetError, match="fit found no schedule within 5%") as error:
        fit(model, batch, "5%", **options)
    assert not is_planned(model)
    found = fit(model, batch, error.value.least_bytes, noise=1.0, **options)
    assert found.plan.peak_bytes <= error.value.least_bytes
    assert found.plan.planned.extra_cost == 0 or not options


@pytest.mark.slow
def test_noise_and_budget_that_exclude_each_other_are_told(batch):
    model = _model()
    with pytest.raises(InfeasibleBudgetError) as least:
        fit(model, batch, "5%", noise=0)
    budget = int(0.95 * least.value.least_bytes)
    with pytest.raises(InfeasibleBudgetError, match=r"noisier than noise=1e-12.*exact gradients take"):
        fit(model, batch, budget, noise=1e-12)
    assert not is_planned(model)


@pytest.mark.slow
def test_a_fitted_model_trains_compiled_and_runs_as_written_afterwards(batch):
    model = _model()
    expected = _gradients(copy.deepcopy(model), batch)
    found = fit(model, batch, CODES)
    gradients = _gradients(model, batch)
    for one, other in zip(gradients, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.1
    assert not all(map(torch.equal, gradients, expected))
    found.remove()
    assert not is_planned(model)
    assert_equal(_gradients(model, batch), expected)


def test_the_plan_of_a_fit_is_of_the_samples_shapes(batch):
    model = _small_model()
    shorter, shortest = (tuple(tensor[:rows] for tensor in batch) for rows in (1000, 500))
    # Dynamo makes one graph for all sizes where it has seen two
    fit(model, shorter, noise=0, executor="exact").remove()
    found = fit(model, batch, noise=0, executor="exact")
    for each in (batch, shortest, batch):
        model(*each).backward()
        assert found.plan.peak_bytes == found.plain_bytes


@pytest.mark.slow
def test_recomputing_and_codes_can_each_be_left_out(batch):
    assert fit(_model(), batch, "60%", allow=["recompute"]).chosen.name == "exact"
    found = fit(_model(), batch, CODES, allow=["code"])
    assert found.chosen.name == "8 bits"
    # the exact step would have to compute twice
    assert [each.plan is None for each in found.candidates] == [False, True]
    # also for other shapes
    assert found.step.group.options.budget == found.budget_bytes == found.options["budget"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "7 apples"}, "is no budget"),
        ({"noise": -0.1}, "noise=-0.1 is no share"),
        ({"noise": float("nan")}, "noise=nan is no share"),
        ({"noise": True}, "noise=True is no share"),
        ({"allow": ["pages"]}, "'pages' is unknown; choose among recompute, code, sketch, page"),
        ({"allow": None}, "allow=None is no collection of names"),
        ({"loss_fn": "cross_entropy"}, "loss_fn='cross_entropy' can't be called"),
        ({"executor": "fast"}, "executor='fast' is unknown"),
        ({"executor": "exact", "costs": "seconds"}, "costs='seconds' is unknown"),
        ({"executor": None, "costs": "seconds"}, "costs='seconds' is unknown"),
        ({"allow": ["recompute", "page"], "executor": "exact"}, 'pass page_to="host", or a folder'),
        ({"page_to": "host"}, 'add "page" to allow, or leave page_to out'),
        ({"allow": ["recompute", "page"], "page_to": "/tmp"}, "executor='inductor' was given"),
        ({"allow": "page", "page_to": "/tmp", "executor": "exact"}, '"page" needs "recompute"'),
        ({**_PAGING, "page_to": "no such folder", "budget": "100%"}, 'neither "host" nor a folder that exists'),
        ({**_PAGING, "page_to": 5}, "page_to=5 is neither"),
        ({**_PAGING, "budget": None}, 'allow: "page" needs a budget'),
        ({**_PAGING, "model": None}, "model is a NoneType"),
        ({**_PAGING, "model": nn.Identity(), "sample": torch.randn(8, WIDTH)}, "nothing that the step"),
    ],
)
def test_bad_arguments_are_refused(batch, change, message):
    if "page" in (change.get("allow") or ()):
        pytest.importorskip("scipy")
    given = {"model": _model(), "sample": batch, "budget": "50%", **change}
    with pytest.raises(ValueError, match=message):
        fit(**given)
    assert given["model"] is None or not is_planned(given["model"])


@pytest.mark.slow
def test_where_noise_cannot_be_measured_an_exact_plan_is_taken_or_the_reason_is_told(batch):
    model, one_example = _model(), tuple(tensor[None] for tensor in batch)
    not_finite = torch.where(torch.arange(ROWS)[:, None] % 5 == 0, float("nan"), batch[0]), batch[1]
    for sample, message in (
        (not_finite, "the gradient of the sample is not finite"),
        (one_example, "the sample has 1 examples"),
    ):
        found = fit(_model(), sample, CODES)
        assert found.chosen.name == "exact"
        assert message in str(found)
    with pytest.raises(ValueError, match="has 1 examples .*; pass 4 or more; the budget .*, and exact gradients take"):
        fit(model, one_example, CODES, allow="code")
    with pytest.raises(ValueError, match="which may have too few rows"):
        fit(model, tuple(tensor[:256] for tensor in batch), "60%", allow="code")

    logits = nn.Sequential(*model.blocks, model.head)
    with pytest.raises(ValueError, match=r"pass loss_fn\(model, batch\)"):
        fit(logits, batch[0], CODES, allow="code")


@pytest.mark.slow
def test_a_loss_function_may_keep_the_labels_from_the_model(batch):
    model = _model()
    logits = nn.Sequential(*model.blocks, nn.GELU(), model.head).train()

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    found = fit(logits, batch, CODES, loss_fn=loss_fn, allow="code")
    assert 0 < found.chosen.noise_ratio < 0.01
    with pytest.raises(ValueError, match="loss_fn does not call the model"):
        fit(_model(), batch, CODES, loss_fn=lambda model, batch: batch[0].sum())


def test_a_loss_function_may_enable_autocast(batch):
    found = []
    for is_inside in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)).train()

        def loss_fn(model, x, is_inside=is_inside):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_inside or torch.is_autocast_enabled("cpu")):
                return model(x).float().square().mean()

        with torch.autocast("cpu", torch.bfloat16, enabled=not is_inside):
            found.append(fit(model, batch[0], "100%", 0, loss_fn=loss_fn, executor="exact").plain_bytes)
    assert found[0] == found[1]


def test_names_that_no_tensor_has_are_told():
    model = _model()
    options = {"bits": {"norm": 8, "only": ["no_such"]}, "budget": "100%", "executor": "exact"}
    step = torch.compile(model, backend=rmm_linear, options=options)
    step(torch.randn(256, WIDTH), torch.randint(0, 5, (256,)))
    with pytest.warns(UserWarning, match="1 of 1 tensors that \"only\" names are not coded, such as 'no_such'"):
        step(torch.randn(256, WIDTH), torch.randint(0, 5, (256,)))


@pytest.mark.slow
def test_a_batch_of_a_tokenizer_of_any_size_and_a_mask_that_all_examples_share_are_taken(batch):
    class Masked(Classifier):
        def forward(self, x, mask, y):
            return super().forward(x * mask, y)

    # 8 parts of 255, two rows left out
    x, y = (tensor[:2046] for tensor in batch)
    names = transformers.BatchEncoding({"x": x, "mask": torch.ones(1, WIDTH), "y": y})
    found = fit(Masked().train(), names, CODES, allow="code")
    assert found.chosen.name == "8 bits"
    assert 0 < found.chosen.noise_ratio < 0.01


@pytest.mark.slow
def test_the_model_keeps_its_state_and_no_plan_of_a_trial(batch):
    def averaging(it, x, y):
        loss = it.model(x, y)
        it.average = 0.9 * it.average + 0.1 * loss.detach()
        return loss

    model = ModelOf(averaging, model=_model(), average=torch.zeros(()))
    with assert_unchanged(model):
        found = fit(model, batch, CODES)
    assert found.chosen.name.startswith("8 bits")
    assert [plan.schedule for plan in plans(model)] == [found.plan.schedule]


def test_models_in_eval_mode_and_planned_models_are_refused(batch):
    model = _small_model()
    with pytest.raises(ValueError, match=r"call model.train\(\) first"):
        fit(model.eval(), batch, "50%")
    model.train()
    checkpoint_model(model, batch, budget="100%")
    with pytest.raises(ValueError, match=r"checkpointed already.*or plan.remove"):
        fit(model, batch, "50%")


@pytest.mark.parametrize("executor", ["exact", pytest.param("inductor", marks=pytest.mark.slow)])
def test_noise_buys_time_without_a_budget(batch, executor):
    found = fit(_small_model(), batch, noise=100.0, executor=executor)
    assert found.chosen.name == "sketches"
    assert found.chosen.time < 1
    assert found.chosen.noise_ratio > 0.05
    assert found.budget_bytes is None
    assert "no budget" in str(found)
    # the default limit leaves no room for sketches
    assert fit(_small_model(), batch, executor=executor).chosen.name == "exact"
    alone = fit(_small_model(), batch, noise=100.0, allow="sketch", executor=executor)
    assert {each.name for each in alone.candidates} == {"exact", "sketches"}


@pytest.fixture
def page_time(monkeypatch):
    """Sets the time in which a byte is paged."""
    pytest.importorskip("scipy")
    return lambda rate: monkeypatch.setattr(backend, "page_cost", lambda *_: rate)


def _gradients_after_seed(model, batch):
    torch.manual_seed(3)
    return _gradients(model, batch)


def test_pages_take_the_place_of_second_computations_where_they_take_less_time(batch, page_time, tmp_path):
    page_time(0.01)
    model = _small_model()
    expected = _gradients_after_seed(copy.deepcopy(model), batch)
    found = fit(model, batch, "90%", noise=0, **{**_PAGING, "page_to": tmp_path})
    assert found.chosen.name == "exact, paged"
    assert found.plan.peak_bytes <= found.budget_bytes
    assert found.plan.schedule.loads(found.plan.graph)
    assert found.chosen.time < found.candidates[1].time
    assert "paged out and back" in str(found)
    assert_equal(_gradients_after_seed(model, batch), expected)
    assert list(tmp_path.iterdir()) == []
    assert found.measure(batch).step.value == 0
    more = {"strategy": "patil2022_poet", "page_to": str(tmp_path)}
    assert found.options == {"budget": found.budget_bytes, "executor": "exact", "costs": "roofline", **more}


def test_pages_without_scipy_are_refused_before_anything_is_captured(batch, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setattr(fitting.PlannedStep, "capture", None)
    with pytest.raises(ImportError, match=r'"page" needs scipy: pip install rmm-linear\[plan\]'):
        fit(_small_model(), batch, "90%", **_PAGING)


@pytest.mark.slow
def test_pages_that_take_long_or_are_not_needed_are_not_taken(batch, page_time, monkeypatch):
    page_time(1e9)
    model = _small_model()
    found = fit(model, batch, "90%", noise=0, **_PAGING)
    assert [each.name for each in found.candidates] == ["exact", "exact, paged"]
    assert len(fit(found.remove(), batch, "100%", **_PAGING).candidates) == 1
    monkeypatch.setattr(fitting, "_MOST_OPS_OF_PAGER", 10)
    with pytest.warns(UserWarning, match="would take minutes for the step's [0-9]+ ops"):
        assert len(fit(found.remove(), batch, "90%", noise=0, **_PAGING).candidates) == 1


@pytest.mark.parametrize("executor", ["exact", None])
def test_a_loss_may_take_the_labels_out_of_its_batch(batch, executor):
    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch.pop("x")), batch.pop("y"))

    model = nn.Sequential(*_model().blocks, nn.Linear(WIDTH, 5))
    found = fit(
        model, dict(zip("xy", batch, strict=True)), "85%", 1e3, loss_fn=loss_fn, allow="code", executor=executor
    )
    assert found.chosen.noise.step.value > 0


def test_a_captured_step_is_not_copied_and_noise_is_not_measured_in_eval_mode(batch):
    found = fit(_small_model(), batch, executor="exact")
    for copied in (copy.deepcopy, pickle.dumps):
        # a copy of its tensors corrupted the process's memory
        for each in (found, found.step, next(iter(found.step.group.variants())).capture):
            with pytest.raises(TypeError, match="a captured step can't be copied"):
                copied(each)
        assert copied(found.model)
    found.model.eval()
    with pytest.raises(ValueError, match="the model is in eval mode"):
        found.measure(batch)


def test_a_measurement_after_remove_leaves_plans_of_blocks_and_no_attribute(batch):
    model = _model(blocks=2)
    found = fit(model, batch, executor="exact")
    attributes = vars(found.remove()).keys() - {"_compiled_call_impl"}
    checkpoint_model(model.blocks[0], torch.randn(ROWS, WIDTH), budget="100%")
    assert found.measure(batch).step.value == 0
    assert vars(model).keys() == attributes
    assert is_planned(model.blocks[0])
    assert not any(map(is_planned, (model.blocks[1], model.head)))
