"""One run: settings in, one result file out, through `transformers.Trainer`.

The result is a function of the settings alone. A run that was interrupted goes on from its last checkpoint and ends
with the very same numbers: `Trainer` restores weights, optimizer, schedule, random state and its log, and everything
that this module records about a step comes from that log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import evaluate
import numpy as np
import torch
import transformers
from datasets import DatasetDict, disable_progress_bars
from torch import nn
from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from experiments import provenance
from experiments.command_line import HarnessError
from rmm_linear import RMMCallback, SketchedLayer, convert_linears, revert_linears
from rmm_linear.integrations.hf_trainer import NOISE_KEY
from rmm_linear.memory import SavedTensors
from rmm_linear.variance import measure_step_noise

from . import fingerprints
from .demo import demo_model, demo_splits, demo_tokenizer
from .demo_pretraining import pretrained_weights
from .result_file import COMPLETE, DIVERGED, FAILED, FORMAT, RUNNING, read_result, write_result
from .settings import CHECKPOINTING, FIT, IRRELEVANT, RunSettings
from .tasks import load_task

METRIC_FOLDER = Path(__file__).parent / "glue_metric"
# batches that the noise of a step's gradient is measured on
_NOISE_BATCHES = 8
_CHECKPOINTING: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
_STEP_COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "seconds")


def result_path(settings: RunSettings, results: Path) -> Path:
    return results / f"{settings.name}.json"


def finished_result(settings: RunSettings, results: Path) -> dict[str, Any] | None:
    """The result of a run that is complete, or has diverged, which another attempt would do as well."""
    path = result_path(settings, results)
    previous = read_result(path)
    if previous is None:
        return None
    found, sources = previous["config"], previous.get("sources", {})
    changed = {key: (found.get(key), now) for key, now in settings.recorded().items() if key not in IRRELEVANT}
    changed |= {key: (sources[key], now) for key, now in fingerprints.sources(settings).items() if key in sources}
    _refuse(path, changed)
    return previous if previous["status"] in (COMPLETE, DIVERGED) else None


def _refuse(path: Path, changed: dict[str, tuple[Any, Any]]) -> None:
    """Raise if a value of a result file differs from the present one."""

    def short(value: Any) -> str:
        # a digest's first digits tell as much as all of them
        return repr(value[:12] if isinstance(value, str) and len(value) == 64 else value)

    if changes := [f"{key} {short(was)} instead of {short(now)}" for key, (was, now) in changed.items() if was != now]:
        raise HarnessError(
            f"{path} holds a run with other settings ({', '.join(changes)}); pass --force to replace it or another"
            " --results"
        )


def execute(settings: RunSettings, results: Path, *, force: bool = False) -> dict[str, Any]:
    """Do, or finish, a run that is not complete, and return its result; `force` throws an earlier result away."""
    path = result_path(settings, results)
    if not force and (finished := finished_result(settings, results)):
        return finished
    began = time.perf_counter()
    prepared = PreparedRun(settings)
    checkpoints = results / ".checkpoints" / settings.name
    previous = None if force else read_result(path)
    result = prepared.describe()
    if previous is None:
        # checkpoints without a result file belong to nothing
        shutil.rmtree(checkpoints, ignore_errors=True)
    else:
        keys = [("data", "sha256"), ("model", "initial_weights_sha256"), ("hardware", "device")]
        keys += [("versions", package) for package in ("rmm_linear", "torch", "transformers")]
        _refuse(path, {f"{part} {key}": (previous[part][key], result[part][key]) for part, key in keys})
    result["attempts"] = previous["attempts"] if previous else []
    attempt = {"from_step": 0, "wall_seconds": 0.0} | provenance.commit()
    result["attempts"].append(attempt)

    def write(status: str, **more: Any) -> None:
        attempt["wall_seconds"] = time.perf_counter() - began
        result.update(more, status=status)
        result["wall_seconds"] = sum(each["wall_seconds"] for each in result["attempts"])
        write_result(path, result)

    write(RUNNING)
    try:
        outcome = prepared.train(
            checkpoints, on_start=lambda step: attempt.update(from_step=step), on_save=lambda: write(RUNNING)
        )
    except KeyboardInterrupt:
        # still resumable; the time since the last checkpoint is lost work, but spent
        write(RUNNING)
        raise
    except Exception as error:
        write(FAILED, error=f"{type(error).__name__}: {error}")
        raise
    if lost := not_finite(outcome):
        outcome["error"] = f"{lost} is not finite at the end"
    write(DIVERGED if lost else COMPLETE, **outcome)
    shutil.rmtree(checkpoints, ignore_errors=True)
    with contextlib.suppress(OSError):
        # only if no other run has checkpoints in it
        checkpoints.parent.rmdir()
    return result


def not_finite(outcome: dict[str, Any]) -> str | None:
    """Name the first number of an outcome that shows that training has gone astray."""
    last = outcome["epochs"][-1]
    numbers = {"the training loss": outcome["steps"]["loss"][-1], "the validation loss": last["loss"]}
    numbers |= outcome["final"]
    return next((name for name, value in numbers.items() if value is None or not math.isfinite(value)), None)


def sketched_layers(model: nn.Module, name: str, **options: Any) -> dict[str, Any]:
    """Convert a model and undo it; return the layers that had sketches, by name."""
    try:
        with warnings.catch_warnings():
            # RMMCallback says it again when the trainer is made
            warnings.simplefilter("ignore")
            convert_linears(model, **options)
    except ValueError as error:
        raise HarnessError(
            f"the model {name!r} can't have sketched layers ({error}); pass --method exact, another model, or other"
            " --exclude-modules"
        ) from error
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SketchedLayer)}
    revert_linears(model)
    return layers


class PreparedRun:
    """A run whose data, tokenizer and model are loaded: the user's mistakes have been found."""

    def __init__(self, settings: RunSettings, *, cpu: bool = False) -> None:
        self.settings = settings
        self.task = settings.task_description
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            # transformers.Trainer would spread each batch over all of them: another batch size, and another experiment
            raise HarnessError(
                f"{torch.cuda.device_count()} GPUs are visible, and a run uses one; set CUDA_VISIBLE_DEVICES=0"
            )
        disable_progress_bars()
        transformers.logging.disable_progress_bar()
        # the note that the classification head is new says nothing here: it always is
        transformers.logging.set_verbosity_error()
        splits = demo_splits() if settings.data == "demo" else load_task(self.task, settings.data)
        self.tokenizer, self.model = self._load(splits)
        # an error of the conversion comes before a file is written
        if settings.uses_sketch:
            excluded = settings.exclude_modules
            sketched_layers(self.model, settings.model, config=settings.rmm_config, exclude_modules=excluded)
        self.splits = self._tokenize(splits)
        self.collate = transformers.DataCollatorWithPadding(
            self.tokenizer, pad_to_multiple_of=settings.pad_multiple or None
        )
        self._data_fingerprint = fingerprints.data_fingerprint(splits)

    def _load(self, splits: DatasetDict) -> tuple[transformers.PreTrainedTokenizerBase, transformers.PreTrainedModel]:
        settings, task = self.settings, self.task
        if settings.model == "demo":
            tokenizer: Any = demo_tokenizer([text for key in task.text_keys for text in splits["train"][key]])
            transformers.set_seed(settings.seed)
            model = demo_model(len(tokenizer), num_outputs=task.num_outputs, is_regression=task.is_regression)
            # a tokenizer of the demo's grammar is of no use for other texts
            if settings.data == "demo":
                model.roberta.load_state_dict(pretrained_weights(tokenizer))
            return tokenizer, model
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
            transformers.set_seed(settings.seed)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                settings.model,
                num_labels=task.num_outputs,
                problem_type="regression" if task.is_regression else "single_label_classification",
            )
        # OSError, ValueError, and several types of the hub client
        except Exception as error:
            raise HarnessError(
                f"the model {settings.model!r} could not be loaded ({error}); pass --model demo, a folder that"
                " from_pretrained reads, or a name on the hub with the network up"
            ) from error
        if tokenizer.pad_token is None:
            raise HarnessError(f"the tokenizer of the model {settings.model!r} has no padding token: batches need one")
        return tokenizer, model

    def _tokenize(self, splits: DatasetDict) -> DatasetDict:
        # locals, for `datasets` hashes the objects that a function refers to: the run itself would never hit the cache
        tokenizer, keys = self.tokenizer, self.task.text_keys
        longest = min(self.settings.max_length, tokenizer.model_max_length)
        return splits.map(
            lambda batch: tokenizer(*(batch[key] for key in keys), truncation=True, max_length=longest),
            batched=True,
            remove_columns=list(keys),
        )

    def describe(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.settings.name,
            "status": RUNNING,
            "config": self.settings.recorded(),
            "sources": fingerprints.sources(self.settings),
            "metrics": list(self.task.metrics),
            "model": {
                "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
                "initial_weights_sha256": fingerprints.weights_fingerprint(self.model),
            },
            "data": {
                "train_rows": len(self.splits["train"]),
                "validation_rows": len(self.splits["validation"]),
                "sha256": self._data_fingerprint,
            },
            "versions": provenance.versions(),
            "hardware": provenance.hardware(self.device),
            **provenance.commit(),
        }

    def train(
        self,
        checkpoints: Path,
        *,
        on_start: Callable[[int], None] = lambda step: None,
        on_save: Callable[[], None] = lambda: None,
        callbacks: tuple[transformers.TrainerCallback, ...] = (),
    ) -> dict[str, Any]:
        """Train from the last checkpoint, if there is one, to the end; `on_start` gets the first step's number."""
        settings = self.settings
        exact_bytes = self._kept_bytes()
        transformers.set_seed(settings.seed)
        conversion = self._conversion()
        trainer = self._trainer(checkpoints, on_save, conversion, callbacks)
        if settings.method == CHECKPOINTING:
            self.model.gradient_checkpointing_enable(_CHECKPOINTING["gradient_checkpointing_kwargs"])
        is_planned = settings.plan_options is not None
        if is_planned:
            # before the training begins, so that the measurement runs by the training's plan
            trainer.begin(conversion[0])
        gradient_noise = self._gradient_noise(trainer)
        if is_planned:
            with self._training() as batch_at:
                self._loss(trainer)(self.model, batch_at(0))
            assert conversion[0].planned is not None
            # the bytes that the same step has in memory when its forward pass ends
            kept_bytes = conversion[0].planned.plans[-1].planned.forward_bytes
        else:
            kept_bytes = self._kept_bytes()
        checkpoint = _last_whole_checkpoint(checkpoints)
        on_start(int(checkpoint.rpartition("-")[2]) if checkpoint else 0)
        # data order and dropout must not depend on draws of the set-up; a checkpoint brings its own random state
        transformers.set_seed(settings.seed)
        with _peak_memory(self.device) as peak:
            trainer.train(resume_from_checkpoint=checkpoint)
        steps, epochs = _split_log(trainer.state.log_history, self.task.metrics)
        for planned in (callback.planned for callback in conversion if callback.planned is not None):
            if planned.reason is not None:
                raise RuntimeError(f"a step did not run by plan: {planned.reason}")
        found: dict[str, Any] = {}
        if settings.method == FIT:
            fitted = conversion[0].fitted
            assert fitted is not None
            found["fitted"] = {
                "chosen": fitted.chosen.name,
                "peak_bytes": fitted.plan.measured_peak_bytes or fitted.plan.peak_bytes,
                "exact_peak_bytes": fitted.plain_bytes,
                "report": str(fitted).partition("\n\n")[0],
            }
        if noise := [entry[NOISE_KEY] for entry in trainer.state.log_history if NOISE_KEY in entry]:
            found["noise_ratio"] = statistics.fmean(noise)
        if gradient_noise:
            found["gradient_noise"] = gradient_noise
        batch = "the first batch of the training split, in its order on disk"
        return found | {
            "kept_bytes": {"model": kept_bytes, "exact_model": exact_bytes, "batch": batch},
            "peak_memory": peak,
            "final": {key: epochs[-1][key] for key in ("score", *self.task.metrics)},
            "train_seconds": sum(steps["seconds"]),
            "epochs": epochs,
            "steps": steps,
            "final_weights_sha256": fingerprints.weights_fingerprint(self.model),
        }

    def _kept_bytes(self) -> int:
        """Bytes that one training step on a fixed batch keeps for its backward pass, parameters excluded."""
        with self._training() as batch_at, SavedTensors(self.model) as kept:
            # the loss must live until the count is taken: without it, autograd frees the tensors
            loss = self.model(**batch_at(0)).loss
        assert loss.requires_grad
        return int(kept.bytes)

    def _loss(self, trainer: transformers.Trainer) -> Callable[[nn.Module, Any], torch.Tensor]:
        """The loss of the training: with other arguments, a model would be compiled twice."""
        count = torch.tensor(self.settings.batch_size, device=self.device)
        return functools.partial(cast(Callable[..., torch.Tensor], trainer.compute_loss), num_items_in_batch=count)

    def _gradient_noise(self, trainer: transformers.Trainer) -> dict[str, float] | None:
        """Variances of the initial gradient; None if there are too few batches."""
        if len(self.splits["train"]) < _NOISE_BATCHES * self.settings.batch_size:
            return None
        with self._training() as batch_at:
            batches = [batch_at(number) for number in range(_NOISE_BATCHES)]
            noise = measure_step_noise(self.model, batches, loss_fn=self._loss(trainer))
        found = {"gradient_squared": noise.gradient_squared, "step_variance": noise.step.value}
        return found | {"minibatch_variance": noise.minibatch.value, "batches": _NOISE_BATCHES}

    @contextlib.contextmanager
    def _training(self) -> Iterator[Callable[[int], dict[str, torch.Tensor]]]:
        """Put the model into training mode, and yield a function from a number to a batch of the training split."""
        split, size = self.splits["train"], self.settings.batch_size
        model: nn.Module = self.model
        model.to(self.device)
        was_training = model.training
        model.train()

        def batch_at(number: int) -> dict[str, torch.Tensor]:
            rows = [split[at] for at in range(number * size, min((number + 1) * size, len(split)))]
            return {key: value.to(self.device) for key, value in self.collate(rows).items()}

        is_bfloat16 = self.settings.precision == "bfloat16"
        with torch.random.fork_rng(), torch.autocast(self.device.type, torch.bfloat16, enabled=is_bfloat16):
            yield batch_at
        model.train(was_training)

    def _conversion(self) -> tuple[RMMCallback, ...]:
        settings = self.settings
        if settings.plan_options is not None:
            return (RMMCallback(**settings.plan_options),)
        if not settings.uses_sketch:
            return ()
        options: dict[str, Any] = {"monitor": settings.monitor, "exclude_modules": settings.exclude_modules}
        return (RMMCallback(config=settings.rmm_config, **options),)

    def _trainer(
        self,
        checkpoints: Path,
        on_save: Callable[[], None],
        conversion: tuple[RMMCallback, ...],
        callbacks: tuple[transformers.TrainerCallback, ...],
    ) -> _RecordingTrainer:
        settings = self.settings
        sampler = None
        if settings.group_lengths:
            lengths = [len(tokens) for tokens in self.splits["train"]["input_ids"]]
            sampler = _GroupedByLength(lengths, settings.batch_size, settings.seed)
        return _RecordingTrainer(
            _Steps(self.device, settings.save_steps, on_save),
            sampler,
            model=self.model,
            args=self._arguments(checkpoints),
            train_dataset=self.splits["train"],
            eval_dataset=self.splits["validation"],
            data_collator=self.collate,
            processing_class=self.tokenizer,
            compute_metrics=self._metrics(),
            callbacks=[*conversion, *callbacks],
        )

    def _arguments(self, checkpoints: Path) -> transformers.TrainingArguments:
        settings = self.settings
        steps_per_epoch = math.ceil(len(self.splits["train"]) / settings.batch_size)
        total_steps = settings.max_steps or math.ceil(steps_per_epoch * settings.epochs)
        schedule = {"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule)
        return transformers.TrainingArguments(
            output_dir=str(checkpoints),
            seed=settings.seed,
            data_seed=settings.seed,
            num_train_epochs=settings.epochs,
            max_steps=settings.max_steps or -1,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.eval_batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type=schedule,
            lr_scheduler_kwargs={"lr_end": 0.0, "power": 1.0} if schedule == "polynomial" else {},
            # a schedule that only warms up has no length to fall over
            warmup_steps=min(math.ceil(total_steps * settings.warmup), total_steps - 1),
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_epsilon=settings.epsilon,
            max_grad_norm=settings.max_grad_norm,
            bf16=settings.precision == "bfloat16",
            use_cpu=self.device.type == "cpu",
            eval_strategy="epoch",
            # _Steps decides when to save
            save_strategy="no",
            save_total_limit=1,
            logging_steps=1,
            logging_nan_inf_filter=False,
            report_to="none",
            disable_tqdm=True,
            # nothing to pin on a machine without an accelerator, and torch warns about it
            dataloader_pin_memory=self.device.type == "cuda",
            **(_CHECKPOINTING if settings.method == CHECKPOINTING else {}),
        )

    def _metrics(self) -> Callable[[transformers.EvalPrediction], dict[str, float]]:
        metric = evaluate.load(str(METRIC_FOLDER), self.task.name, keep_in_memory=True)
        is_regression = self.task.is_regression

        def compute(prediction: transformers.EvalPrediction) -> dict[str, float]:
            outputs = np.asarray(prediction.predictions)
            guesses = outputs.reshape(-1) if is_regression else outputs.argmax(axis=-1)
            return dict(metric.compute(predictions=guesses, references=prediction.label_ids))

        return compute


def _last_whole_checkpoint(folder: Path) -> str | None:
    """Find where to go on from; a checkpoint whose writing was broken off is deleted.

    `Trainer` writes its state after everything else, and deletes the checkpoint before only then.
    """
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))) is not None:
        try:
            json.loads((Path(last) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            return last
        except (OSError, ValueError):
            shutil.rmtree(last)
    return None


def _split_log(log: list[dict[str, Any]], metrics: Sequence[str]) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """Sort `Trainer`'s log into columns over steps and rows over epochs."""
    steps = {column: [entry.get(column) for entry in log if "loss" in entry] for column in _STEP_COLUMNS}
    epochs = []
    for entry in (entry for entry in log if "eval_loss" in entry):
        values = {name: entry[f"eval_{name}"] for name in metrics}
        epoch = {"epoch": entry["epoch"], "step": entry["step"], "loss": entry["eval_loss"]}
        epochs.append(epoch | {"score": sum(values.values()) / len(values), **values})
    return steps, epochs


@contextlib.contextmanager
def _peak_memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a dict that has the block's peak afterwards: `bytes` (None if not measurable), and `what` was measured."""
    report: dict[str, Any] = {"bytes": None, "what": "not measurable here"}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield report
        report.update(bytes=torch.cuda.max_memory_allocated(device), what="tensors, by the CUDA allocator")
        return
    status = ""
    with contextlib.suppress(OSError):
        # 5 resets VmHWM, see proc(5)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = "/proc/self/status"
    yield report
    if status and (found := re.search(r"^VmHWM:\s+(\d+) kB", Path(status).read_text("ascii"), re.MULTILINE)):
        report.update(bytes=int(found[1]) * 1024, what="resident set of the whole process")


class _GroupedByLength(Sampler[int]):
    """Sort pools of 16 random batches by length, and shuffle the batches that this makes.

    `Trainer`'s order depends on what a method draws, and on where a run is resumed; this one on seed and epoch alone.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths, self._batch_size, self._seed, self._epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        # a factor, so that one seed's second epoch is not the next seed's first
        generator = torch.Generator().manual_seed(1000 * self._seed + self._epoch)
        rows, size = torch.randperm(len(self), generator=generator).tolist(), self._batch_size
        pools = (rows[at : at + 16 * size] for at in range(0, len(rows), 16 * size))
        by_length = [row for pool in pools for row in sorted(pool, key=self._lengths.__getitem__)]
        # a pool is a whole number of batches: only the last of all can be short, and has to stay the last
        batches = [by_length[at : at + size] for at in range(0, len(rows), size)]
        full = len(rows) // size
        order = torch.randperm(full, generator=generator).tolist()
        for at in (*order, *range(full, len(batches))):
            yield from batches[at]


class _RecordingTrainer(transformers.Trainer):
    """A `Trainer` whose log, and so every checkpoint, holds the time of each step as well."""

    def __init__(self, steps: _Steps, sampler: Sampler[int] | None, **arguments: Any) -> None:
        self._steps, self._sampler = steps, sampler
        super().__init__(**arguments)
        self.add_callback(steps)
        # it prints every log, which is a line a step here
        self.remove_callback(transformers.PrinterCallback)

    def _get_train_sampler(self, *arguments: Any) -> Sampler[int] | None:
        return self._sampler or super()._get_train_sampler(*arguments)

    def begin(self, callback: transformers.TrainerCallback) -> None:
        """Let a callback begin the training now: it looks for the trainer that calls it."""
        callback.on_train_begin(self.args, self.state, self.control, model=self.model)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        # not in a callback's on_log: that comes after the log has been kept
        if "loss" in logs:
            logs = {**logs, "seconds": self._steps.seconds}
        super().log(logs, *arguments, **keywords)


class _Steps(transformers.TrainerCallback):
    """Times each step, and asks for a checkpoint after each epoch's evaluation and every so many steps within.

    A step is forward, backward, clipping and the optimizer; neither data, evaluation nor saving. `Trainer`'s own
    strategies can't do both kinds of checkpoints. One at an epoch's last step, before its evaluation, would lose that
    evaluation on resuming; one after the last step of all would train one step too many.
    """

    def __init__(self, device: torch.device, save_steps: int, on_saved: Callable[[], None]) -> None:
        self._device, self._save_steps, self._on_saved = device, save_steps, on_saved
        self._began = self.seconds = 0.0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds = self._now() - self._began
        assert state.epoch is not None
        due = self._save_steps > 0 and state.global_step % self._save_steps == 0
        if due and not float(state.epoch).is_integer() and state.global_step < state.max_steps:
            control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step < state.max_steps:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_saved()
