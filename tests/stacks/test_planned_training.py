"""Planned models under the trainers that people use: planned steps run, and the weights are the plain model's bits."""

import copy
import inspect

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import CONFIG, batch_of, gpt2, roberta
from tiny_text import sft_trainer
from tiny_transformers import trainer_options
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from rmm_linear import RMMCallback
from rmm_linear.checkpointing import checkpoint_model
from rmm_linear.checkpointing.planned import is_planned
from tests.checkpointing.planned_models import assert_equal, planned_runs
from tests.checkpointing.planned_models import planned as planned_for

PLAN = {"budget": "100%", "strategy": "chen2016_sqrt"}
COMPILE = {**PLAN, "executor": "exact"}


def planned(kind):
    return planned_for(kind(layers=1), batch_of(kind))


@pytest.fixture(scope="module")
def planned_roberta():
    """To be looked at: a plan takes a second."""
    return planned(roberta)


def rows_of(kind, batches=1):
    rows = []
    for number in range(batches):
        batch = batch_of(kind, number)
        rows += [{name: value[row] for name, value in batch.items()} for row in range(4)]
    return rows


def assert_same_training(plain, model):
    assert_equal(model.parameters(), plain.parameters())


def test_a_planned_model_keeps_its_forward(planned_roberta):
    assert inspect.signature(planned_roberta.forward) == inspect.signature(roberta(layers=1).forward)
    assert inspect.ismethod(planned_roberta.forward)
    assert "forward" not in vars(planned_roberta)


TRAININGS = {
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "resumed": {"save_strategy": "steps", "save_steps": 1},
}
QUICK = {("bf16", True)}


def trained_by_transformers(model, folder, callbacks=(), resume=False, kind=None, **changes):
    from transformers import Trainer, TrainingArguments

    options = trainer_options(folder, per_device_train_batch_size=4, max_steps=2, **changes)
    data = rows_of(roberta, batches=4)
    trainer = (kind or Trainer)(model, TrainingArguments(**options), train_dataset=data, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if resume else None)
    return model


@pytest.mark.parametrize(
    ("name", "by_callback"),
    [
        pytest.param(name, by_callback, marks=[] if (name, by_callback) in QUICK else pytest.mark.slow)
        for name in TRAININGS
        for by_callback in (False, True)
    ],
)
def test_steps_of_a_trainer_of_transformers_run_by_plan(tmp_path, name, by_callback):
    options = TRAININGS[name]
    plain = trained_by_transformers(roberta(layers=1), tmp_path, **options)
    callback = RMMCallback(compile=COMPILE) if by_callback else None
    model = trained_by_transformers(
        roberta(layers=1) if by_callback else planned(roberta),
        tmp_path,
        [callback] if by_callback else [],
        resume=name == "resumed",
        **options,
    )
    assert_same_training(plain, model)
    runs = callback.planned.planned_runs if by_callback else planned_runs(model)
    assert runs == {"accumulation": 4, "resumed": 1}.get(name, 2)
    assert is_planned(model) is not by_callback
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_the_callback_sketches_planned_models_as_compiled_ones(tmp_path):
    compiled = roberta(layers=1)
    # layers of one graph share a sketch, which torch's own backends do not do
    compiled.compile(backend="rmm_linear", options=COMPILE)
    with pytest.warns(UserWarning, match="not measured under torch.compile"):
        trained_by_transformers(compiled, tmp_path, [RMMCallback(config=CONFIG)])
    with pytest.warns(UserWarning, match="a planned model's kept bytes are in its plan"):
        model = trained_by_transformers(planned(roberta), tmp_path, [RMMCallback(config=CONFIG)])
    assert planned_runs(model) == 2
    assert_same_training(compiled, model)
    callback = RMMCallback(config=CONFIG, compile=COMPILE)
    assert_same_training(compiled, trained_by_transformers(roberta(layers=1), tmp_path, [callback]))
    assert callback.planned.planned_runs == 2


def test_the_callback_tells_that_no_step_ran_by_plan(tmp_path):
    transformers = pytest.importorskip("transformers")

    class CallsForward(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model.forward(**inputs).loss

    callback = RMMCallback(compile=COMPILE)
    with pytest.warns(UserWarning, match="no training step ran by plan: the model's forward method is called"):
        trained_by_transformers(roberta(layers=1), tmp_path, [callback], kind=CallsForward)
    assert callback.planned.planned_runs == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": COMPILE}, "checkpointed already"),
        ({"config": CONFIG, "monitor": True}, "records nothing .* in a planned model"),
    ],
)
def test_plans_and_a_monitor_are_refused_on_a_planned_model(tmp_path, planned_roberta, options, message):
    with pytest.raises(ValueError, match=message):
        trained_by_transformers(planned_roberta, tmp_path, [RMMCallback(**options)])


@pytest.mark.parametrize("order", ["before prepare", pytest.param("after prepare", marks=pytest.mark.slow)])
def test_steps_under_accelerate_in_bf16_run_by_plan_and_leave_autocast_off(order):
    accelerate = pytest.importorskip("accelerate")
    # which another test may have made for fp32
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    trained = []
    for is_planned_one in (False, True):
        model = gpt2(layers=1)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        if is_planned_one and order == "before prepare":
            checkpoint_model(model, batch_of(gpt2), **PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(rows_of(gpt2, batches=2), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if is_planned_one and order == "after prepare":
            checkpoint_model(model, batch_of(gpt2), **PLAN)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                assert not torch.is_autocast_enabled("cpu")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        trained.append(accelerator.unwrap_model(model))
    assert_same_training(*trained)
    assert planned_runs(trained[1]) == 2
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bf16": True, "packing": True}])
@pytest.mark.filterwarnings("error:a gradient arrived at a result beside the loss", "ignore:the step checkpoints")
def test_steps_under_trl_run_by_plan_in_the_parts_that_its_loss_leaves(tmp_path, options):
    def train(model, callbacks=()):
        sft_trainer(model, tmp_path, callbacks, {"per_device_train_batch_size": 4, **options}).train()
        return model

    plain, model = train(gpt2(layers=1)), planned(gpt2)
    with pytest.warns(UserWarning, match="no longer one graph, and its parts are planned one by one: .*out="):
        assert_same_training(plain, train(model))
    # two graphs a step, of which the first is planned for the gradients of all its results
    assert planned_runs(model) == 4
    callback = RMMCallback(compile=COMPILE)
    assert_same_training(plain, train(gpt2(layers=1), [callback]))
    assert callback.planned.planned_runs == 4


@pytest.mark.slow
def test_adapters_of_peft_are_trained_by_plan_while_they_are_switched_and_merged():
    peft = pytest.importorskip("peft")

    def train(plan):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["query", "value"])
        model = peft.get_peft_model(roberta(layers=1), config)
        model.add_adapter("other", config)
        model.train()
        if plan:
            checkpoint_model(model, batch_of(roberta), **PLAN)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for adapter in ("default", "other", "default"):
            model.set_adapter(adapter)
            optimizer.zero_grad()
            losses.append(model(**batch_of(roberta)).loss)
            losses[-1].backward()
            optimizer.step()
        model.merge_adapter()
        with torch.no_grad():
            losses.append(model(**batch_of(roberta)).loss)
        return losses, model

    (expected, plain), (found, model) = train(False), train(True)
    assert all(torch.equal(*each) for each in zip(expected, found, strict=True))
    assert_same_training(plain, model)
    assert planned_runs(model) == 3
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch_of(roberta)).loss, found[-1])


def test_copies_of_a_planned_model_run_as_written_with_weights_of_their_own():
    plain, model = roberta(layers=1), planned(roberta)
    average, expected = AveragedModel(model), AveragedModel(plain)
    for each, ema in ((plain, expected), (model, average)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            each(**batch_of(roberta, number)).loss.backward()
            optimizer.step()
            ema.update_parameters(each)
    assert planned_runs(model) == 2
    assert_same_training(expected, average)
    copied = copy.deepcopy(model)
    assert not is_planned(copied)
    assert not is_planned(average)
    losses = [each(**batch_of(roberta)).loss for each in (copied, model, average, expected)]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[2], losses[3])
    assert not torch.equal(losses[0], losses[2])
