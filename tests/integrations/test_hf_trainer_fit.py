"""`RMMCallback(fit=...)`: the model is fitted to the trainer's first batch, and trains as it would have."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from tiny_trainer import make_data, make_model, make_trainer
from tiny_transformers import tiny
from transformers import TrainerCallback

from rmm_linear import RMMCallback, RMMConfig, RMMLinear
from rmm_linear.checkpointing.planned import is_planned
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.fitting import Fit

# Plans of the whole peak are found at once, and have eager mode's bits.
WHOLE = {"fit": "100%", "noise": 0, "executor": "exact"}


def bert():
    changes = {"hidden_size": 64, "intermediate_size": 256, "problem_type": "single_label_classification"}
    return tiny("BertForSequenceClassification", seed=1, **changes)


def trained(folder, *callbacks, resume=None, examples=48, model=None, **changes):
    trainer = make_trainer(folder, *callbacks, model=make_model() if model is None else model, **changes)
    trainer.train_dataset = make_data(examples)
    trainer.train(resume_from_checkpoint=resume)
    assert not is_planned(trainer.model)
    assert "compute_loss" not in vars(trainer)
    return trainer


def assert_same_training(first, second):
    for expected, found in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"bf16": True}, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exact_plans_train_the_same_weights_also_with_a_last_smaller_batch(tmp_path, options, capsys):
    callback = RMMCallback(**WHOLE)
    # batches of 8, 8, 8 and 4
    plain, planned = (
        trained(tmp_path, *each, examples=28, model=make_model(layers=1), **options) for each in ((), (callback,))
    )
    assert_same_training(plain, planned)
    assert callback.planned.planned_runs == 4 * options.get("gradient_accumulation_steps", 1)
    assert callback.fitted.chosen.name == "exact"
    assert "fit: exact: peak" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_is_fitted_anew_and_ends_with_the_same_weights(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    plain = trained(tmp_path, **options)
    callback = RMMCallback(**WHOLE)
    assert_same_training(plain, trained(tmp_path, callback, resume=str(tmp_path / "checkpoint-2"), **options))
    assert callback.planned.planned_runs == 2


@pytest.mark.slow
def test_the_noise_is_measured_on_the_first_batch_with_the_loss_of_the_trainer(tmp_path):
    losses = []

    def loss_of(outputs, labels, num_items_in_batch):
        losses.append(len(labels))
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    callback = RMMCallback(fit="100%", noise=0.5, executor="exact")
    trainer = make_trainer(tmp_path, callback, model=bert(), per_device_train_batch_size=64, max_steps=2)
    trainer.train_dataset, trainer.compute_loss_func = make_data(128), loss_of
    trainer.train()
    assert callback.fitted.chosen.name == "sketches"
    assert 0 < callback.fitted.chosen.noise_ratio < 0.5
    # four of eight parts twice, since the noise is less than a tenth of the limit; and two steps
    assert callback.fitted.chosen.noise_ratio < 0.05
    assert losses == [8] * 8 + [64] * 2
    assert callback.planned.planned_runs == 2


@pytest.mark.slow
def test_a_later_batch_that_has_no_plan_is_fitted_in_its_turn(tmp_path, capsys):
    callback = RMMCallback(**WHOLE)
    rows = make_data(16)
    short = [{name: value[:8] if name != "labels" else value for name, value in row.items()} for row in rows[:8]]
    plain, planned = (
        make_trainer(tmp_path, *each, model=make_model(), max_steps=2, train_sampling_strategy="sequential")
        for each in ((), (callback,))
    )
    for trainer in (plain, planned):
        trainer.train_dataset = short + rows[8:]
        trainer.train()
    assert_same_training(plain, planned)
    assert capsys.readouterr().out.count("fit: exact: peak") == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [WHOLE, {"compile": {"budget": "100%", "executor": "exact"}}], ids=str)
def test_after_a_training_that_failed_the_next_one_runs_by_its_plan(tmp_path, capsys, options):
    class Failing(RMMCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and self.fails:
                raise RuntimeError("the disk is full")

    callback = Failing(**options)
    callback.fails = True
    trainer = make_trainer(tmp_path, callback, model=make_model())
    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer.train()
    assert is_planned(trainer.model)
    callback.fails = False
    trainer.train()
    assert callback.planned.planned_runs == 2 + 4
    assert capsys.readouterr().out.count("fit: exact: peak") == ("fit" in options)
    assert not is_planned(trainer.model)
    assert "compute_loss" not in vars(trainer)


def test_a_callback_keeps_no_trainer_alive_with_its_optimizer(tmp_path):
    callback = RMMCallback(compile={"budget": "100%", "executor": "exact"})
    trainer = weakref.ref(trained(tmp_path, callback, examples=8, model=make_model(layers=1)))
    gc.collect()
    assert trainer() is None
    assert callback.planned.planned_runs == 4


@pytest.mark.parametrize("options", [WHOLE, {"compile": {"budget": "100%", "executor": "exact"}}], ids=str)
def test_after_a_training_that_failed_another_trainer_makes_a_plan_of_its_own(tmp_path, options):
    class Failing(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls_left = inner, 2

        def forward(self, *args, **kwargs):
            if self.calls_left == 0:
                raise ValueError("a bad batch")
            return self.inner(*args, **kwargs)

    class Counting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            model.roberta.encoder.calls_left -= 1

    model, callback = make_model(layers=1), RMMCallback(**options)
    model.roberta.encoder = Failing(model.roberta.encoder)
    with pytest.raises(ValueError, match="a bad batch"):
        make_trainer(tmp_path, callback, Counting(), model=model).train()
    model.roberta.encoder.calls_left, failed = -1, callback.planned
    trainer = make_trainer(tmp_path, callback, model=model)
    trainer.train()
    assert callback.planned is not failed
    # each step is one graph
    assert callback.planned.planned_runs == 4
    assert not is_planned(model)
    assert "compute_loss" not in vars(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.1}, "no layer was converted: the callback was added"),
        (WHOLE, "the callback was added too late"),
        ({"compile": {"budget": "100%"}}, "the callback was added too late"),
    ],
)
def test_a_callback_that_is_added_in_training_is_told(tmp_path, options, message):
    class Adding(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.add_callback(RMMCallback(**options))

    trainer = make_trainer(tmp_path, Adding(), model=make_model(layers=1))
    with pytest.warns(UserWarning, match=message):
        trainer.train()
    assert not any(isinstance(module, RMMLinear) for module in trainer.model.modules())


@pytest.mark.parametrize("options", [WHOLE, {"compile": {"budget": "100%"}}], ids=str)
def test_a_training_without_a_step_tells_of_no_missing_plan(tmp_path, options, recwarn):
    changes = {"max_steps": -1, "num_train_epochs": 0}
    make_trainer(tmp_path, RMMCallback(**options), model=make_model(layers=1), **changes).train()
    assert not [each for each in recwarn if "no training step ran by plan" in str(each.message)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"fit": "1%", "noise": None, "executor": "exact"}, marks=pytest.mark.slow),
        {"compile": {"budget": "1%", "executor": "exact"}},
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_met_is_told_at_the_first_step(tmp_path, options):
    trainer = make_trainer(tmp_path, RMMCallback(**options), model=make_model(layers=1))
    with pytest.raises(InfeasibleBudgetError, match="found no schedule within 1%"):
        trainer.train()
    assert not is_planned(trainer.model)
    assert "compute_loss" not in vars(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"ratio": 0.5, "config": RMMConfig()}, "both ratio=0.5 and config"),
        ({"monitor": -1}, "monitor=-1"),
        ({"monitor": "yes"}, "monitor='yes'"),
        (WHOLE | {"ratio": 0.5}, "leave out ratio, or leave out fit"),
        (WHOLE | {"config": RMMConfig(), "min_rows": 1}, "leave out config, min_rows, or"),
        (WHOLE | {"compile": {"bits": 8}, "ratio": 0.1}, "leave out ratio, compile, or"),
        (WHOLE | {"sample": {}, "target_modules": ["query"]}, "leave out sample, target_modules, or"),
        (WHOLE | {"fit": "7 apples"}, "is no budget"),
        (WHOLE | {"noise": -1}, "noise=-1 is no share"),
        (WHOLE | {"executor": "fast"}, "executor='fast' is unknown"),
        (WHOLE | {"fit": None}, "noise and executor belong to fit"),
        ({"compile": {"stratgey": "auto"}}, "option 'stratgey' is unknown; choose among budget, strategy"),
        ({"compile": {"budget": "60%"}, "monitor": True}, "records nothing in a planned model"),
        *(({"ratio": 0.5, name: 0.5}, f"RMMCallback has no argument {name}") for name in ("noise_target", "model")),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(TypeError if "no argument" in message else ValueError, match=message):
        RMMCallback(**options)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"ratio": 0.2, "monitor": True}, {"torch_compile": True}, "records nothing under torch.compile"),
        (WHOLE, {"torch_compile": True}, "fit plans the model's calls, which torch_compile=True compiles in another"),
        ({"compile": {"budget": "100%"}}, {"torch_compile": True}, "which torch_compile=True compiles in another way"),
        (WHOLE, {"world_size": 2}, "fit plans for one process, and 2 train together: .*RMMCallback.compile=options"),
    ],
)
def test_what_sees_or_plans_nothing_is_refused_when_training_begins(tmp_path, options, arguments, message, monkeypatch):
    for name in set(arguments) & {"world_size"}:
        monkeypatch.setattr("transformers.TrainingArguments.world_size", arguments.pop(name))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, RMMCallback(**options), model=make_model(layers=1), **arguments).train()


@pytest.mark.slow
def test_noise_that_grows_is_logged_and_the_model_is_fitted_anew(tmp_path, capsys, monkeypatch):
    callback = RMMCallback(fit="50%", monitor=2, noise=0.5)
    model = bert()
    limits = []
    measured = Fit.measure

    def measure(fitted, *args):
        noise = measured(fitted, *args)
        limits.append(noise.noise_ratio)
        # as if the first one had been above the limit
        step = replace(noise.step, value=1e6 * noise.step.value) if len(limits) == 1 else noise.step
        return replace(noise, step=step)

    monkeypatch.setattr(Fit, "measure", measure)
    trainer = trained(tmp_path, callback, model=model, per_device_train_batch_size=64, examples=384, max_steps=5)
    assert callback.fitted.chosen.options
    # of batches 3 and 5; the first one is fitted, and not measured again
    assert len(limits) == 2
    assert all(0 < limit < 0.5 for limit in limits)
    printed = capsys.readouterr().out
    assert printed.count("fit: the noise has grown to") == 1
    assert printed.count(": peak") == 2
    logged = [log["rmm/noise_ratio"] for log in trainer.state.log_history if "rmm/noise_ratio" in log]
    assert logged
    assert all(0 < each < 0.5 for each in logged)
