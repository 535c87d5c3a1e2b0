"""RMMCallback: sketched linear layers in a `transformers.Trainer`, with the saved bytes in its logs.

trainer = Trainer(model, args, callbacks=[RMMCallback(ratio=0.5)], ...)
"""

import contextlib
import inspect
import json
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError('RMMCallback needs transformers: pip install "rmm-linear[hf]"') from error

from rmm_linear.candidates import checked_noise
from rmm_linear.checkpointing.planned import PlannedStep, is_planned, refuse_planned, remove_checkpointing
from rmm_linear.compiler.backend import Options
from rmm_linear.config import RMMConfig, config_for
from rmm_linear.convert import convert_linears
from rmm_linear.fitting import Fit
from rmm_linear.integrations.fitted_loss import FittedLoss
from rmm_linear.memory import MeasuredSaving
from rmm_linear.variance import VarianceMonitor
from rmm_linear.variance.probe import is_compiled

KEPT_KEY = "rmm/kept_mib"
EXACT_KEY = "rmm/exact_mib"
FREED_KEY = "rmm/freed"
VARIANCE_KEY = "rmm/relative_variance"
NOISE_KEY = "rmm/noise_ratio"
SNR_KEY = "rmm/snr"
CLIP_KEY = "rmm/clip_fraction"
# The monitor's file in the trainer's output folder.
NOISE_FILE = "rmm_noise.jsonl"
# The state's key in a checkpoint's trainer_state.json; the trainer would make a new callback for a class's name.
_STATE_KEY = "rmm_linear"
_EVERY, _EVERY_FIT = 50, 1000
# One of this many steps is checked for clipping, since the norm of all gradients takes time.
_CLIP_EVERY = 10
# Clipping leaves a norm of max_norm * norm / (norm + 1e-6), rounded in the gradients' dtype.
_CLIPPED = 1 - 1e-2
_NOISE_LIMIT = 0.01
# A log with one of these keys is a training log: a step's, or the run's at its end.
_TRAINING_LOGS = {"loss", "train_loss"}
# Part of the promised saving below which the callback warns.
_EXPECTED_SHARE = 0.5


class RMMCallback(TrainerCallback):
    """Convert the trainer's model before the training, and log the bytes and the noise of its sketches.

    The model is converted when the trainer is made, before the optimizer and before any wrapping; a model that
    `model_init` makes anew is converted when its training begins. Each training run (a resumed one too) measures one
    forward pass and logs, for all reporters:

    - `rmm/kept_mib`: MiB that the model kept for the backward pass in that forward,
    - `rmm/exact_mib`: MiB that the same forward would have kept with exact layers,
    - `rmm/freed`: 1 - kept / exact; below 0 where sketches cost memory.

    The callback logs these three values right after each training log. It neither measures nor logs the values under
    `torch.compile`, which would compile the measurement, under `DataParallel`, and in a planned model
    (`checkpoint_model`), whose plan has the kept bytes. If the measured saving is less than half of the sum of the
    layers' own savings, a warning states the reasons.

    With `monitor`, each layer's noise is sampled at that interval of steps (`rmm_linear.variance.VarianceMonitor`),
    records go to `rmm_noise.jsonl` in the output folder, the monitor's state is part of the trainer's checkpoints (and
    restored for any `restore_callback_states_from_checkpoint`; if that is set, the trainer reports that it ignores
    "rmm_linear"), and the logs have, over all layers:

    - `rmm/relative_variance`: the sketches' variance over the squared gradient,
    - `rmm/noise_ratio`: the sketches' variance over the minibatch's, of the sketched weights alone,
    - `rmm/snr`: the squared norm of the expected gradient over the variance of both,
    - `rmm/clip_fraction`: the part of the steps (of every tenth step) whose gradient was clipped to `max_grad_norm`.
      The sketches' noise inflates the norm, and a clipped gradient is not unbiased.

    With `compile`, training steps run by plan, within a byte budget: `compile={"budget": "60%"}` is equivalent to
    `torch.compile(backend="rmm_linear", options=...)`, whose name `TrainingArguments(torch_compile_backend=...)`
    refuses. The backend is installed from the beginning of the training to its end; if a step runs as written, a
    warning states the reason.

    With `fit`, the model is fitted (`rmm_linear.fit`) to the first training batch, with the loss that the trainer
    computes, and the first line of the plan is printed. Batches of other shapes get plans of as many bytes; a batch
    without such a plan is fitted itself. A resumed run is fitted anew, except by the trainer whose run failed. With
    `monitor`, the noise of codes and sketches is measured on a batch at that interval of (micro-)batches
    (`rmm_linear.fitting.Fit.measure`), and logged as `rmm/noise_ratio`; if it exceeds `noise`, the model is fitted
    anew, to that batch. Processes that train together (DDP) are refused: call `fit` in a separate process, and pass its
    `options` as `compile` in all training processes.

    Examples:
        >>> from rmm_linear import RMMCallback
        >>> callback = RMMCallback(ratio=0.5, monitor=True, exclude_modules=["attention.output.dense"])

        Pass it to the trainer: `Trainer(model, args, train_dataset=data, callbacks=[callback]).train()`.

    Args:
        ratio: Rows kept over rows, short for `config=RMMConfig(ratio=ratio)`. 0.5 if neither is given; with `fit`, or
            with `compile` and no argument for sketches, all layers stay exact.
        config: The settings of the sketches.
        monitor: Whether to measure the noise: steps from one sample of a layer to the next, or True for 50; with `fit`,
            batches from one measurement to the next, or True for 1000.
        compile: Options of the backend (`rmm_linear.compiler.backend.Options`): `budget`, `strategy`, `executor` and so
            on. None for steps without a plan.
        fit: The byte budget of a step, as `rmm_linear.fit` takes it: bytes, "8GiB", or "60%" of the exact step's peak;
            None for no plan.
        noise: With `fit`: limit of the gradient's variance over the step's draws, as a share of the minibatch's
            variance; 0 or None for exact gradients.
        executor: With `fit`: "inductor" compiles the step; "exact" runs it op by op.
        sample: A batch as the trainer's data collator makes it: layers in which a sketch frees nothing are left exact
            (see `convert_linears`). The sample runs on the model's device, in the precision and with the checkpoints of
            the trainer's arguments.
        **convert_kwargs: Further arguments of `convert_linears`: `target_modules`, `overrides` and so on.

    Attributes:
        kept_bytes: Bytes that the measured forward pass kept; None before the measurement.
        exact_bytes: Bytes that the same pass would have kept with exact layers; None before the measurement.
        promised_bytes: Sum over the layers of the bytes that each saves of its own input; None before the measurement.
        monitor: The `VarianceMonitor` of the last training run, or None.
        planned: The planned step of the last training run (see its `plans` and `planned_runs`), or None.
        fitted: The result of `fit` in the last training run (print it), or None.

    Raises:
        ValueError: If both `ratio` and `config` are given, or `fit` and an option of another way to save memory, or a
            value is bad; when training begins, if `monitor`, `compile` or `fit` is used under `torch.compile` or
            `DataParallel`, or with a planned model.
        TypeError: If `convert_linears` has no argument of a given name.
    """

    def __init__(
        self,
        ratio: float | None = None,
        *,
        config: RMMConfig | None = None,
        monitor: bool | int = False,
        compile: Mapping[str, Any] | None = None,
        fit: int | float | str | None = None,
        noise: float | None = _NOISE_LIMIT,
        executor: str = Options.executor,
        sample: object = None,
        **convert_kwargs: Any,
    ) -> None:
        self._fit_options: dict[str, Any] | None = None
        if fit is not None:
            others = {"ratio": ratio, "config": config, "sample": sample, "compile": compile, **convert_kwargs}
            if given := [name for name, value in others.items() if value is not None]:
                raise ValueError(f"fit chooses by itself how steps run: leave out {', '.join(given)}, or leave out fit")
            # the constructor checks the options
            Options(budget=fit, executor=executor)
            self._fit_options = {"budget": fit, "noise": checked_noise(noise or 0), "executor": executor}
        elif (noise, executor) != (_NOISE_LIMIT, Options.executor):
            raise ValueError('noise and executor belong to fit: pass fit="8GiB", or leave them out')
        if unknown := convert_kwargs.keys() - list(inspect.signature(convert_linears).parameters)[1:]:
            raise TypeError(f"RMMCallback has no argument {', '.join(sorted(unknown))}; leave it out")
        self._options = None if compile is None else Options.of(compile)
        self._sketches = any((ratio is not None, config is not None, convert_kwargs))
        self._sketches |= self._options is None and fit is None
        config = config_for(ratio, config)
        if not isinstance(monitor, int) or monitor < 0:
            raise ValueError(f"monitor={monitor!r} is not a number of steps; pass a positive int, True or False")
        self._convert_kwargs = {"config": config, **convert_kwargs}
        self._sample = sample
        self._every = (_EVERY if fit is None else _EVERY_FIT) if monitor is True else int(monitor)
        if self._options is not None and self._every:
            raise ValueError("monitor records nothing in a planned model; leave it out, or leave out compile")
        self._converted: weakref.ref[nn.Module] | None = None
        self._measurement: _OneForward | None = None
        self._warned = False
        self.kept_bytes: int | None = None
        self.exact_bytes: int | None = None
        self.promised_bytes: int | None = None
        self.monitor: VarianceMonitor | None = None
        self._planned: PlannedStep | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._loss: FittedLoss | None = None

    def __getstate__(self) -> dict[str, Any]:
        # the results of a training belong to its model: a copied callback converts, measures and plans another model
        return vars(self) | dict.fromkeys(("_converted", "_measurement", "_planned", "_trainer", "_loss"))

    @property
    def _plans(self) -> bool:
        return self._options is not None or self._fit_options is not None

    @property
    def fitted(self) -> Fit | None:
        return None if self._loss is None else self._loss.fitted

    @property
    def planned(self) -> PlannedStep | None:
        return self._planned if self.fitted is None else self.fitted.step

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model before the optimizer is made and before the model is wrapped."""
        self._convert(kwargs["model"], args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model if `model_init` made a new model, and install the measurement and the plan."""
        model = kwargs["model"]
        self._convert(model, args)
        self._stop_measuring()
        self.kept_bytes = self.exact_bytes = self.promised_bytes = None
        if self._plans:
            self._plan(model, args)
            return
        trainer = trainer_of(self)
        others = [] if trainer is None else trainer.callback_handler.callbacks
        # a later callback may plan the model, and hooks of a measurement would cut its graph
        is_in_plan = is_planned(model) or any(isinstance(each, RMMCallback) and each._plans for each in others)
        is_hidden = args.torch_compile or is_compiled(model) or args.n_gpu > 1 or is_in_plan
        if is_hidden and self._every:
            raise ValueError(
                "monitor records nothing under torch.compile, under DataParallel and in a planned model; leave it"
                " out, or train in eager mode with one process a device and without checkpoint_model"
            )
        if is_hidden:
            why = "not measured under torch.compile or DataParallel, and not logged"
            if is_in_plan:
                why = "not logged: a planned model's kept bytes are in its plan"
            warnings.warn(f"{KEPT_KEY} and {EXACT_KEY} are {why}", UserWarning, stacklevel=2)
            return
        if self._every:
            self._watch(model, args, state)
        self._measurement = _OneForward(model, self._measured)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record whether the gradients were clipped."""
        model = kwargs["model"]
        # FSDP1 has local shards alone, whose norm is not the gradient's, and clips by its own method
        is_sharded = hasattr(model, "clip_grad_norm_")
        if self.monitor is None or not args.max_grad_norm or state.global_step % _CLIP_EVERY or is_sharded:
            return
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        if gradients:
            # float32, since neighbouring bfloat16 numbers differ by 0.4 %
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
            # norms of sharded gradients are DTensors
            norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
            self.monitor.observe_gradient_norm(nn.utils.get_total_norm(norms), _CLIPPED * args.max_grad_norm)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step."""
        if self.monitor is not None:
            self.monitor.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks and the plan from the model."""
        self._stop_measuring()
        if self._loss is not None:
            self._loss.remove()
        if self._sketches and self._converted is None:
            why = "the callback was added to the trainer after the training had begun"
            warnings.warn(f"no layer was converted: {why}", UserWarning, stacklevel=2)
        if not self._plans:
            return
        if self.planned is not None:
            remove_checkpointing(kwargs["model"])
        has_tried = self.planned is not None and (self.planned.planned_runs or self.planned.reason is not None)
        if state.global_step and not has_tried:
            why = "the model's forward method is called in place of the model, or the callback was added too late"
            warnings.warn(f"no training step ran by plan: {why}", UserWarning, stacklevel=2)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the measurements after each training log, by `Trainer.log`, which reaches every reporter."""
        logs = kwargs["logs"]
        values = self._values()
        if not values or not _TRAINING_LOGS.intersection(logs):
            return
        trainer = trainer_of(self)
        if trainer is None:
            # Without a Trainer, values added to `logs` reach the callbacks after this callback.
            logs.update(values)
        else:
            trainer.log(values)

    def _values(self) -> dict[str, float]:
        """The values to log now, in the order of the class's docstring."""
        values: dict[str, float] = {}
        if self.kept_bytes is not None and self.exact_bytes is not None:
            values |= {KEPT_KEY: self.kept_bytes / 2**20, EXACT_KEY: self.exact_bytes / 2**20}
            if self.exact_bytes:
                values[FREED_KEY] = 1 - self.kept_bytes / self.exact_bytes
        noise = self.monitor.noise() if self.monitor is not None else None
        if noise is not None:
            values |= {VARIANCE_KEY: noise.relative_variance, NOISE_KEY: noise.noise_ratio, SNR_KEY: noise.snr}
        if self._loss is not None and self._loss.noise is not None:
            values[NOISE_KEY] = self._loss.noise
        if self.monitor is not None and self.monitor.clip_fraction is not None:
            values[CLIP_KEY] = self.monitor.clip_fraction
        return {key: value for key, value in values.items() if math.isfinite(value)}

    def _watch(self, model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
        """Start the monitor, with the state of a resumed run."""
        path = Path(args.output_dir or ".") / NOISE_FILE
        _begin_file(path, state.global_step, is_first=state.is_world_process_zero)
        self.monitor = monitor = VarianceMonitor(model, every=self._every, path=path)
        saved = callback_states(state).get(_STATE_KEY, {})
        if state.global_step and "monitor" in saved:
            monitor.load_state_dict(saved["monitor"])
        elif state.global_step:
            warnings.warn(
                f"the checkpoint of step {state.global_step} has no state of the monitor, which begins anew",
                UserWarning,
                stacklevel=3,
            )
        states = callback_states(state)[_STATE_KEY] = _MadeWhenSaved()
        states.make = lambda: {"monitor": monitor.state_dict()}

    def _plan(self, model: nn.Module, args: TrainingArguments) -> None:
        """Let the model's calls run by plan; with `fit`, the trainer's first loss makes the plan."""
        if args.torch_compile or args.n_gpu > 1:
            raise ValueError(
                f"{'fit' if self._options is None else 'compile'} plans the model's calls, which torch_compile=True"
                " compiles in another way, and DataParallel runs on replicas: leave out one of these options, or train"
                " with one process a device"
            )
        trainer = trainer_of(self)
        if self._fit_options is not None and args.world_size > 1:
            raise ValueError(
                f"fit plans for one process, and {args.world_size} train together: call rmm_linear.fit(model, batch,"
                " ...) in a separate process, and pass its `options` to all processes: RMMCallback(compile=options)"
            )
        if self._fit_options is not None and trainer is None:
            raise ValueError("fit needs the batches of a Trainer; without one, call rmm_linear.fit(model, batch)")
        if self.planned is not None and model._compiled_call_impl is self.planned:
            # an earlier training run failed before `on_train_end`
            if self._trainer is not None and self._trainer() is trainer:
                return
            remove_checkpointing(model)
        if self._loss is not None:
            self._loss.remove()
        refuse_planned(model)
        self._trainer = None if trainer is None else weakref.ref(trainer)
        if self._options is not None:
            self._planned = PlannedStep(model._call_impl, model, self._options, fullgraph=False)
            model._compiled_call_impl = self._planned
        elif self._fit_options is not None and trainer is not None:
            self._loss = FittedLoss(trainer, model, self._fit_options, self._every)

    def _convert(self, model: nn.Module, args: TrainingArguments) -> None:
        if not self._sketches or (self._converted is not None and self._converted() is model):
            return
        if self._sample is None:
            convert_linears(model, **self._convert_kwargs)
        else:
            # as the trainer does when training begins
            former = getattr(model, "gradient_checkpointing_enable", None)
            enable: Any = getattr(model, "activation_checkpointing_enable", former)
            if args.gradient_checkpointing and enable is not None:
                keywords = dict(args.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]
                choice = {name: keywords.pop(name) for name in ("every_n_layers", "offload") if name in keywords}
                enable(keywords or None, **choice)
            device = next(model.parameters()).device
            sample = tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, self._sample)
            with torch.autocast(device.type, torch.bfloat16 if args.bf16 else torch.float16, args.bf16 or args.fp16):
                convert_linears(model, **self._convert_kwargs, sample=sample)
        self._converted = weakref.ref(model)

    def _stop_measuring(self) -> None:
        if self._measurement is not None:
            self._measurement.close()
            self._measurement = None
        if self.monitor is not None:
            self.monitor.close()

    def _measured(self, saving: MeasuredSaving) -> None:
        self.kept_bytes = saving.kept_bytes
        self.exact_bytes = saving.exact_bytes
        self.promised_bytes = saving.promised_bytes
        short = saving.saving_bytes <= 0 or saving.saving_bytes < _EXPECTED_SHARE * saving.promised_bytes
        if not short or self._warned or not saving.sketches_anything:
            return
        self._warned = True
        warnings.warn(
            f"the sketched layers promise {saving.promised_bytes / 2**20:.2f} MiB one by one, but the model saves only"
            f" {saving.saving_bytes / 2**20:.2f} of {saving.exact_bytes / 2**20:.2f} MiB: "
            + ("; ".join(saving.reasons()) or "no reason found")
            + ". Leave such layers exact (exclude_modules), or lower the ratio",
            UserWarning,
            stacklevel=2,
        )


class _OneForward:
    """Measures the next training forward of a model, and removes its hooks after that forward, or after its failure."""

    def __init__(self, model: nn.Module, report: Callable[[MeasuredSaving], None]) -> None:
        self._report = report
        self._saving = MeasuredSaving(model)
        self._is_running = False
        self._handles = [
            model.register_forward_pre_hook(self._start),
            # always_call: an exception in the forward must not leave the measurement active
            model.register_forward_hook(self._stop, always_call=True),
        ]

    def _start(self, model: nn.Module, args: object) -> None:
        if model.training and torch.is_grad_enabled() and not self._is_running:
            self._is_running = True
            self._saving.__enter__()

    def _stop(self, model: nn.Module, args: object, output: object) -> None:
        if not self._is_running:
            return
        self.close()
        # the output is None if the forward raised
        if output is not None:
            self._report(self._saving)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._is_running:
            self._is_running = False
            self._saving.__exit__(None, None, None)


class _MadeWhenSaved(dict[str, Any]):
    """A dictionary that computes its items when they are read: when the trainer saves a checkpoint."""

    make: Callable[[], dict[str, Any]] | None = None

    def items(self) -> Any:
        if self.make is not None:
            self.update(self.make())
        return super().items()


def callback_states(state: TrainerState) -> dict[str, Any]:
    """The states of callbacks in a checkpoint: declared as a list, but a dictionary at run time."""
    states: Any = state.stateful_callbacks
    assert isinstance(states, dict)
    return states


def _begin_file(path: Path, step: int, *, is_first: bool) -> None:
    """Drop the lines of a JSON-lines file from this step on: all lines at step 0."""
    if not is_first or not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if step else ():
        # the last line of a killed run may be incomplete
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
    whole = path.with_suffix(".part")
    whole.write_text("".join(kept), encoding="utf-8")
    whole.replace(path)


def trainer_of(callback: TrainerCallback) -> Trainer | None:
    """Return the trainer that is calling this callback.

    A trainer does not pass itself to its callbacks, and values that a callback adds to `logs` reach neither the log
    history nor the reporters, which are called first. So this function finds the trainer in the calling frames.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None
