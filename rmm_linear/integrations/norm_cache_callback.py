"""A `NormCache` in a `transformers.Trainer`: sample numbers from its batches, tables in its checkpoints."""

import copy
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rmm_linear.integrations.hf_trainer import callback_states, trainer_of
from rmm_linear.integrations.replaced_loss import ReplacedLoss
from rmm_linear.norm_cache import NormCache

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError('NormCacheCallback needs transformers: pip install "rmm-linear[hf]"') from error


# In a checkpoint's trainer_state.json.
_STATE_KEY = "rmm_norm_cache"


class _AnnouncedLoss(ReplacedLoss):
    """A trainer's `compute_loss` that tells a cache which samples it is of."""

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
    """Tell a `NormCache` which samples the trainer's losses are of, and keep its tables with the checkpoints.

    The training data needs a column of sample numbers, which the loss takes out before the model is called, and the
    trainer has to leave it there: `TrainingArguments(remove_unused_columns=False)`, so that columns of text have to be
    removed by hand. Data that is evaluated needs no such column, and must not have it where the model takes no other
    keywords. Each process that trains writes a file of its own, `rmm_norm_cache_0.pt`, into each checkpoint. A run that
    is resumed from a checkpoint in its own output folder goes on bit for bit; elsewhere the norms begin anew, and a
    warning says so.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from rmm_linear import NormCache, RMMConfig, convert_linears
        >>> from rmm_linear.integrations.norm_cache_callback import NormCacheCallback
        >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> model = convert_linears(model, config=RMMConfig(ratio=0.3, sketch="wta_crs", center=False))
        >>> callback = NormCacheCallback(NormCache(model, samples=3668), column="idx")

        which goes to the trainer: `Trainer(model, args, train_dataset=data, callbacks=[callback])`.

    Args:
        cache: The cache of the trainer's model.
        column: The column that has the sample's number.

    Raises:
        ValueError: In training, if a batch does not have the column, or blocks are checkpointed, compiled or copied
            (`DataParallel`), whose layers would draw by the input alone.
    """

    def __init__(self, cache: NormCache, column: str) -> None:
        self.cache, self.column = cache, column
        self._run = ""
        self._loss: _AnnouncedLoss | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the trainer's loss announce its samples; load the tables of the checkpoint that is resumed."""
        self.on_train_end(args, state, control)
        if args.gradient_checkpointing or args.torch_compile or args.n_gpu > 1:
            raise ValueError(
                "a NormCache is not used in checkpointed blocks, under torch.compile and in DataParallel: leave out"
                " gradient_checkpointing and torch_compile, and train with one process a device"
            )
        states = callback_states(state)
        if state.global_step:
            self._load(self._path(args, state), states.get(_STATE_KEY, {}).get("run"))
        # by which a checkpoint, whose state the first process writes, knows the files of all
        run = [uuid.uuid4().hex]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(run)
        self._run = run[0]
        states[_STATE_KEY] = {"run": self._run}
        trainer = trainer_of(self)
        if trainer is None:
            raise ValueError("NormCacheCallback needs a Trainer, whose losses it announces; elsewhere use its cache")
        self._loss = _AnnouncedLoss(trainer, self.cache, self.column)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the tables into the checkpoint."""
        path = self._path(args, state)
        # another process may be the one that makes the folder
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"run": self._run, **self.cache.state_dict()}, path)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the trainer its own loss back."""
        if self._loss is not None:
            self._loss.remove()

    def _load(self, path: Path, run: str | None) -> None:
        """Load the tables of the run that the checkpoint is of."""
        saved = torch.load(path, weights_only=True) if path.is_file() else {}
        if run is None or saved.get("run") != run:
            text = f"the checkpoint's norms are not in {path}: they begin anew"
            warnings.warn(text, UserWarning, stacklevel=3)
            saved = {}
        self.cache.load_state_dict(saved)

    def _path(self, args: TrainingArguments, state: TrainerState) -> Path:
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        return folder / f"rmm_norm_cache_{args.process_index}.pt"
