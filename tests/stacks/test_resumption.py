"""A resumed run is the uninterrupted one to the bit, with everything on that draws or replays random numbers."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import CONFIG, LENGTH, VOCABULARY, roberta, sketched_weights

from rmm_linear import RMMCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:the sketched layers promise.*"),
]


def make_trainer(folder, *, checkpointing: bool, bf16: bool):
    model = roberta()
    # dropout and sketches draw from one generator
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, VOCABULARY, (48, LENGTH), generator=generator)
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0] > 30)} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        bf16=bf16,
        max_steps=5,
        save_strategy="steps",
        save_steps=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-3,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=[RMMCallback(config=CONFIG)])


@pytest.mark.parametrize(
    ("checkpointing", "bf16"), [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_a_run_resumed_within_an_epoch_is_the_uninterrupted_one(tmp_path, checkpointing, bf16):
    whole = make_trainer(tmp_path, checkpointing=checkpointing, bf16=bf16)
    whole.train()
    resumed = make_trainer(tmp_path, checkpointing=checkpointing, bf16=bf16)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(sketched_weights(resumed.model)) == 10
    want = whole.model.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in resumed.model.state_dict().items())
