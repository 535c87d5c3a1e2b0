"""A `NormCache` in a `transformers.Trainer`: sample numbers from its batches, tables in its checkpoints."""

import copy
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rmm_linear.integrations.hf_trainer import callback_states, trainer_of
from rmm_linear.integrations.replaced_loss import ReplacedLoss
from rmm_linear.norm_cache import NormCache

# The state's key in a checkpoint's trainer_state.json.
_STATE_KEY = "rmm_norm_cache"


class _AnnouncedLoss(ReplacedLoss):
    """A trainer's `compute_loss` that announces the batch's samples to a cache."""

    def __init__(self, trainer: Trainer, cache: NormCache, column: str) -> None:
        super().__init__(trainer)
        self._cache, self._column = cache, column

    def __call__(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        inputs = copy.copy(inputs)
        samples = inputs.pop(self._column, None)
        if not model.training:
            return self._loss_of(model, inputs, *arguments, **keywords)
        if samples is None:
            raise ValueError(
                f"the batch has no {self._column!r}, only {', '.join(inputs)}; name the column of sample numbers, and"
                " train with TrainingArguments(remove_unused_columns=False)"
            )
        with self._cache.samples(samples):
            return self._loss_of(model, inputs, *arguments, **keywords)


class NormCacheCallback(TrainerCallback):
    """Announce the samples of the trainer's batches to a `NormCache`, and save its tables with the checkpoints.

    The training data needs a column of sample numbers, which the loss removes before the model is called. The trainer
    must keep the column: set `TrainingArguments(remove_unused_columns=False)`, and remove columns of text by hand.
    Evaluation data needs no such column, and must not have it if the model accepts no unknown keywords. Each training
    process writes its own file, such as `rmm_norm_cache_0.pt`, into each checkpoint. A run that is resumed from a
    checkpoint in its own output folder continues bit for bit; otherwise the norms begin anew, with a warning.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from rmm_linear import NormCache, RMMConfig, convert_linears
        >>> from rmm_linear.integrations.norm_cache_callback import NormCacheCallback
        >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> model = convert_linears(model, config=RMMConfig(ratio=0.3, sketch="wta_crs", center=False))
        >>> callback = NormCacheCallback(NormCache(model, samples=3668), column="idx")

        Pass it to the trainer: `Trainer(model, args, train_dataset=data, callbacks=[callback])`.

    Args:
        cache: The cache of the trainer's model.
        column: The column of sample numbers.

    Raises:
        ValueError: In training, if a batch does not have the column, or blocks are checkpointed, compiled or replicated
            (`DataParallel`), so that their layers would draw by the input alone.
    """

    def __init__(self, cache: NormCache, column: str) -> None:
        self.cache, self.column = cache, column
        self._run = ""
        self._loss: _AnnouncedLoss | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the trainer's loss announce its samples; load the tables of a resumed checkpoint."""
        self.on_train_end(args, state, control)
        if args.gradient_checkpointing or args.torch_compile or args.n_gpu > 1:
            raise ValueError(
                "a NormCache is not used in checkpointed blocks, under torch.compile and in DataParallel: leave out"
                " gradient_checkpointing and torch_compile, and train with one process a device"
            )
        states = callback_states(state)
        if state.global_step:
            self._load(self._path(args, state), states.get(_STATE_KEY, {}).get("run"))
        # identifies the files of all processes in a checkpoint, whose state the first process writes
        run = [uuid.uuid4().hex]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(run)
        self._run = run[0]
        states[_STATE_KEY] = {"run": self._run}
        trainer = trainer_of(self)
        if trainer is None:
            raise ValueError("NormCacheCallback needs a Trainer; without one, use `with cache.samples(numbers):`")
        self._loss = _AnnouncedLoss(trainer, self.cache, self.column)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the tables into the checkpoint."""
        path = self._path(args, state)
        # another process may not have made the folder yet
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"run": self._run, **self.cache.state_dict()}, path)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the trainer's own loss."""
        if self._loss is not None:
            self._loss.remove()

    def _load(self, path: Path, run: str | None) -> None:
        """Load the tables if they were saved in the checkpoint's run."""
        saved = torch.load(path, weights_only=True) if path.is_file() else {}
        if run is None or saved.get("run") != run:
            text = f"the checkpoint's norms are not in {path}: they begin anew"
            warnings.warn(text, UserWarning, stacklevel=3)
            saved = {}
        self.cache.load_state_dict(saved)

    def _path(self, args: TrainingArguments, state: TrainerState) -> Path:
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        return folder / f"rmm_norm_cache_{args.process_index}.pt"
