"""RMMCallback in a real Trainer: converted at the right moment, measured to the byte, logged for everybody."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from tiny_trainer import Reporter, make_data, make_model, make_trainer
from transformers import TrainingArguments

from rmm_linear import RMMCallback, RMMConfig, RMMLinear, convert_linears, revert_linears
from rmm_linear.memory import SavedTensors

KEYS = {"rmm/kept_mib", "rmm/exact_mib", "rmm/freed"}
LAYERS = 2 * 6


def converted(model):
    return sum(isinstance(module, RMMLinear) for module in model.modules())


@pytest.fixture(autouse=True)
def no_needless_warnings():
    """A ratio this small saves more than half of what it promises: a warning would be a wrong one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*promise.*")
        yield


def test_a_model_that_model_init_makes_anew_is_converted(tmp_path):
    made = []

    def init():
        made.append(make_model())
        return made[-1]

    trainer = make_trainer(tmp_path, RMMCallback(ratio=0.1), model_init=init)
    trainer.train()
    assert len(made) == 2
    assert [converted(model) for model in made] == [LAYERS, LAYERS]
    assert trainer.model is made[1]
    optimized = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in made[1].parameters()}
    assert [step for step, _ in trainer_rows(trainer)] == [1, 2, 3, 4, 4]


def trainer_rows(trainer):
    return [(row["step"], row) for row in trainer.state.log_history if row.keys() >= KEYS]


def test_a_callback_that_is_added_late_converts_when_training_begins(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(RMMCallback(ratio=0.1))
    assert converted(trainer.model) == 0
    trainer.train()
    assert converted(trainer.model) == LAYERS
    assert len(trainer_rows(trainer)) == 5


def test_every_reporter_gets_every_log_whatever_its_place_and_other_logs_are_as_without_the_callback(tmp_path):
    # a trainer takes two callbacks of one class for a mistake
    early, late = (type(name, (Reporter,), {})() for name in ("Early", "Late"))
    callback = RMMCallback(ratio=0.1)
    plain = make_trainer(tmp_path)
    convert_linears(plain.model, 0.1)
    plain.train()
    trainer = make_trainer(tmp_path, early, callback, late)
    trainer.train()
    # four steps, and the summary of the run
    assert [step for step, _ in early.rows(KEYS)] == [1, 2, 3, 4, 4]
    assert [logs for _, logs in early.rows(KEYS)] == [logs for _, logs in late.rows(KEYS)]
    assert [row for _, row in trainer_rows(trainer)] == [{**logs, "step": step} for step, logs in early.rows(KEYS)]
    values = early.rows(KEYS)[0][1]
    assert values["rmm/kept_mib"] == callback.kept_bytes / 2**20
    assert values["rmm/exact_mib"] == callback.exact_bytes / 2**20
    assert 0 < values["rmm/kept_mib"] < values["rmm/exact_mib"]
    assert values["rmm/freed"] == 1 - callback.kept_bytes / callback.exact_bytes
    found, expected = (
        [
            {name: row[name] for name in row if "per_second" not in name and "runtime" not in name}
            for row in each.state.log_history
            if not row.keys() >= KEYS
        ]
        for each in (trainer, plain)
    )
    assert found == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_logged_bytes_are_those_of_the_exact_and_the_sketched_model(tmp_path, attention):
    callback = RMMCallback(ratio=0.1)
    trainer = make_trainer(tmp_path, callback, model=make_model(attention=attention))
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    with SavedTensors(model) as sketched:
        model(**batch)
    with SavedTensors(revert_linears(model)) as exact:
        model(**batch)
    assert callback.kept_bytes == sketched.bytes
    assert callback.exact_bytes == exact.bytes
    assert [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks] == []


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_with_checkpointing_the_truth_is_logged_and_told(tmp_path, name):
    if name not in TrainingArguments.__dataclass_fields__:
        pytest.skip(f"this version of transformers has no {name}")
    callback = RMMCallback(ratio=0.1)
    trainer = make_trainer(tmp_path, callback, **{name: True})
    with pytest.warns(UserWarning, match="calls lie in checkpointed blocks"):
        trainer.train()
    assert callback.kept_bytes == callback.exact_bytes
    assert len(trainer_rows(trainer)) == 5


def test_a_saving_that_is_not_measured_is_warned_about_once(tmp_path):
    trainer = make_trainer(tmp_path, RMMCallback(config=RMMConfig(ratio=0.5, share_sketch=False)))
    with pytest.warns(UserWarning, match="promise") as caught:
        [trainer.train() for _ in range(2)]
    messages = [str(warning.message) for warning in caught if "promise" in str(warning.message)]
    assert len(messages) == 1
    # two of query, key and value in each of two layers
    assert "4 calls share their input" in messages[0]


def test_two_callbacks_of_one_trainer_log_the_same_bytes(tmp_path):
    reporter = Reporter()
    callbacks = RMMCallback(ratio=0.1), RMMCallback(ratio=0.2, target_modules=["query"])
    make_trainer(tmp_path, *callbacks, reporter, max_steps=1).train()
    first, second = (logs for step, logs in reporter.rows(KEYS)[:2])
    assert first == second
    assert first["rmm/freed"] > 0


def test_a_failing_forward_leaves_no_hook_active_and_the_next_one_is_measured(tmp_path):
    callback = RMMCallback(ratio=0.1)
    trainer = make_trainer(tmp_path, callback)
    fail = trainer.model.roberta.embeddings.register_forward_hook(lambda *_: {}["missing"])
    with pytest.raises(KeyError):
        trainer.train()
    fail.remove()
    x = torch.ones(4, requires_grad=True)
    (x * x).sum().backward()
    assert callback.kept_bytes is None
    trainer.train()
    assert callback.kept_bytes < callback.exact_bytes


def test_evaluation_is_bitwise_that_of_exact_layers(tmp_path):
    trainer = make_trainer(tmp_path, RMMCallback(ratio=0.1))
    trainer.train()
    reporter = Reporter()
    trainer.add_callback(reporter)
    sketched = trainer.predict(make_data(16))
    trainer.evaluate()
    # only the evaluation's own log: the kept bytes are about training
    assert [logs.keys() >= KEYS for _, logs in reporter.logs] == [False]
    revert_linears(trainer.model)
    exact = trainer.predict(make_data(16))
    assert (sketched.predictions == exact.predictions).all()


@pytest.mark.parametrize("is_plain", [pytest.param(True, marks=pytest.mark.grid), False])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, is_plain):
    saving = {"save_strategy": "steps", "save_steps": 2}
    if not is_plain:
        saving |= {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
        saving |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    whole = make_trainer(tmp_path / "parts", RMMCallback(ratio=0.1), model=make_model(dropout=0.1), **saving)
    callback = RMMCallback(ratio=0.1)
    second = make_trainer(tmp_path / "parts", callback, model=make_model(dropout=0.1), **saving)
    with warnings.catch_warnings():
        # checkpointed blocks save nothing, and the callback says so
        warnings.simplefilter("ignore")
        whole.train()
        second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert converted(second.model) == LAYERS
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.model.state_dict().items())
    # measured again, and logged for the steps that were run again
    assert callback.kept_bytes is not None
    assert [step for step, _ in trainer_rows(second)][-3:] == [3, 4, 4]


def test_under_a_compiler_nothing_is_measured_and_that_is_said(tmp_path):
    callback = RMMCallback(ratio=0.1)
    model = make_model()
    model.classifier.compile(backend="eager")
    trainer = make_trainer(tmp_path, callback, model=model)
    with pytest.warns(UserWarning, match=r"not measured under torch\.compile"):
        trainer.train()
    assert converted(trainer.model) == LAYERS
    assert trainer_rows(trainer) == []


@pytest.mark.parametrize("order", [1, -1])
def test_a_callback_that_plans_gets_one_graph_beside_a_callback_that_measures(tmp_path, order):
    planning = RMMCallback(compile={"budget": "100%", "executor": "exact"})
    callbacks = (RMMCallback(ratio=0.1), planning)[::order]
    with pytest.warns(UserWarning, match="a planned model's kept bytes are in its plan"):
        make_trainer(tmp_path, *callbacks, model=make_model(layers=1), max_steps=2).train()
    # one graph a step
    assert planning.planned.planned_runs == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copied_callback_converts_and_plans_the_model_of_its_own_trainer(tmp_path, duplicate):
    callback = RMMCallback(ratio=0.1, compile={"budget": "100%", "executor": "exact"})
    make_trainer(tmp_path, callback, model=make_model(layers=1), max_steps=1).train()
    assert callback.planned.planned_runs == 1
    second = duplicate(callback)
    assert second.planned is None
    trainer = make_trainer(tmp_path, second, model=make_model(layers=1), max_steps=1)
    assert converted(trainer.model) == LAYERS // 2
    trainer.train()
    assert second.planned.planned_runs == callback.planned.planned_runs == 1


def collated():
    return transformers.default_data_collator(make_data(8))


def left_exact(model):
    return {name.rpartition("layer.")[2] for name, module in model.named_modules() if type(module) is nn.Linear}


def test_a_sample_leaves_exact_what_frees_nothing(tmp_path):
    trainer = make_trainer(tmp_path, RMMCallback(config=RMMConfig(ratio=0.25), sample=collated()), bf16=True)
    exact = {f"{layer}.attention.output.dense" for layer in range(2)}
    assert exact < left_exact(trainer.model)
    assert converted(trainer.model) == LAYERS - 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train()
    assert trainer.state.log_history[1]["rmm/kept_mib"] < trainer.state.log_history[1]["rmm/exact_mib"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_sample_runs_with_the_checkpoints_of_an_adapted_model(tmp_path):
    peft, config = pytest.importorskip("peft"), RMMConfig(ratio=0.25)
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    adapted = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="checkpointed: keeps nothing"):
        make_trainer(
            tmp_path, RMMCallback(config=config, target_modules=["lora_A"], sample=collated()), model=adapted, **given
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_sample_runs_with_the_checkpoints_of_some_layers(tmp_path):
    enable = getattr(transformers.PreTrainedModel, "activation_checkpointing_enable", None)
    if enable is None or "every_n_layers" not in inspect.signature(enable).parameters:
        pytest.skip("this transformers checkpoints all layers or none")
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    trainer = make_trainer(tmp_path, RMMCallback(config=RMMConfig(ratio=0.25), sample=collated()), **given)
    exact = left_exact(trainer.model)
    # the first of two layers is checkpointed, and of the other one attention's output is kept anyway
    assert {name for name in exact if name.startswith("1.")} == {"1.attention.output.dense"}
    assert converted(trainer.model) == 5
