"""A cache of gradient norms through a real Trainer: numbers of samples in, tables in the checkpoints, runs resumed."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_trainer
from tiny_trainer import make_data, make_model

from rmm_linear import NormCache, RMMConfig, convert_linears
from rmm_linear.integrations.norm_cache_callback import NormCacheCallback
from rmm_linear.integrations.replaced_loss import ReplacedLoss

SAMPLES = 16
CONFIG = RMMConfig(ratio=0.2, sketch="wta_crs", center=False, min_rows=1)


def make_trainer(folder, *, column="number", has_cache=True, **changes):
    model = convert_linears(make_model(), config=CONFIG)
    cache = NormCache(model, SAMPLES)
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "remove_unused_columns": False}
    arguments |= {"eval_strategy": "steps", "eval_steps": 2}
    callbacks = [NormCacheCallback(cache, column)] if has_cache else []
    trainer = tiny_trainer.make_trainer(folder, *callbacks, model=model, **arguments | changes)
    trainer.train_dataset = [{**row, "number": number} for number, row in enumerate(make_data(SAMPLES))]
    if not has_cache:
        trainer.train_dataset = make_data(SAMPLES)
    return trainer, cache


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(tmp_path):
    trainer, cache = make_trainer(tmp_path / "whole")
    own = trainer.compute_loss
    trainer.train()
    assert trainer.compute_loss == own
    # three epochs of two steps: each layer that sees tokens knows each sample's positions
    tables = cache.state_dict()["tables"]
    assert {table.shape for table in tables.values()} == {(SAMPLES, 32)}
    # a layer of each block reads the output of a fused attention, which is kept anyway, and three have one table
    assert len(tables) == 6
    assert all((table >= 0).all() for table in tables.values())
    resumed, again = make_trainer(tmp_path / "whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(weights(resumed), weights(trainer))
    assert all(torch.equal(table, tables[name]) for name, table in again.state_dict()["tables"].items())
    # without its tables the run goes on otherwise, and says so
    (tmp_path / "whole" / "checkpoint-3" / "rmm_norm_cache_0.pt").unlink()
    forgetful, _ = make_trainer(tmp_path / "whole")
    with pytest.warns(UserWarning, match=r"norms are not in .*rmm_norm_cache_0\.pt: they begin anew"):
        forgetful.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert not torch.equal(weights(forgetful), weights(trainer))


def test_the_first_epoch_is_that_of_a_run_without_a_cache(tmp_path):
    trained = {}
    for steps in (2, 4):
        for has_cache in (True, False):
            trainer, _ = make_trainer(tmp_path, has_cache=has_cache, max_steps=steps, save_strategy="no")
            trainer.train()
            trained[steps, has_cache] = weights(trainer)
    assert torch.equal(trained[2, True], trained[2, False])
    assert not torch.equal(trained[4, True], trained[4, False])


def test_the_norms_of_another_run_are_not_taken_over(tmp_path):
    for name in ("one", "other"):
        make_trainer(tmp_path / name, max_steps=3)[0].train()
    trainer, cache = make_trainer(tmp_path / "other", max_steps=3)
    with pytest.warns(UserWarning, match="they begin anew"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))
    # the other run's tables knew all samples, and nothing is left of them
    assert all((table < 0).any() for table in cache.state_dict()["tables"].values())


def test_a_loss_that_stands_in_for_another_outlives_it():
    trainer = SimpleNamespace(compute_loss=lambda: "own")

    class Loss(ReplacedLoss):
        def __call__(self):
            return f"{type(self).__name__} of {self._loss_of()}"

    first, second, third = (Loss(trainer) for _ in range(3))
    second.remove()
    assert trainer.compute_loss() == "Loss of Loss of own"
    first.remove()
    assert trainer.compute_loss() == "Loss of own"
    third.remove()
    assert trainer.compute_loss() == "own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_checkpointing": True}, "not used in checkpointed blocks"),
        ({"column": "idx"}, "the batch has no 'idx', only .*remove_unused_columns=False"),
    ],
)
def test_checkpoints_and_batches_without_numbers_are_refused(tmp_path, changes, message):
    trainer, _ = make_trainer(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        trainer.train()
