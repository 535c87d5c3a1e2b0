"""The settings of a run, the named configurations in `configs/`, and the grid of runs of a configuration."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.command_line import HarnessError
from rmm_linear import RMMConfig
from rmm_linear.compiler.backend import Options
from rmm_linear.sketches import available_sketches

from .tasks import DEMO_TASK, TASKS, Task

CONFIG_FOLDER = Path(__file__).parent / "configs"
EXACT = "exact"
CHECKPOINTING = "checkpointing"
BUDGET, CODES, FIT = "budget", "codes", "fit"
# bits of codes -> the option of the backend of torch.compile
BITS: dict[str, Any] = {"8": 8, "4/8": {"norm": 8, "activation": 4, "attention": 8, "linear": 8}, "4": 4}
_METHODS = (EXACT, CHECKPOINTING, BUDGET, CODES, FIT)
# tests of a setting, by the words of its error
_BOUNDS: dict[str, Callable[[Any], bool]] = {
    "a finite number above 0": lambda value: 0 < value < math.inf,
    "a finite number of at least 0": lambda value: 0 <= value < math.inf,
    "in [0, 2**32)": lambda value: 0 <= value < 2**32,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "one of polynomial, linear, constant": lambda value: value in ("polynomial", "linear", "constant"),
    "one of float32, bfloat16": lambda value: value in ("float32", "bfloat16"),
    f"one of {', '.join(BITS)}": lambda value: value in (None, *BITS),
}
_POSITIVE, _NOT_NEGATIVE, _SEED, _SHARE, _BELOW_1, _SCHEDULE, _PRECISION, _BITS = _BOUNDS
# settings that leave every number of a result as it is
IRRELEVANT = ("save_steps", "timing")
# switches of a sketch that are off by default, and recorded only where they are on -> their word in a run's name
VARIANTS = {"skip_padding": "unpadded", "keep_first": "first-token"}
# settings of methods
KNOBS = ("ratio", "center", "storage", "bits", "budget", *VARIANTS)
_RECORDED_WHERE_ON = (*VARIANTS, "group_lengths", "monitor", "bits", "budget", "executor", "pad_multiple")


def _setting(default: Any, words: str, bounds: str | None = None) -> Any:
    return field(default=default, metadata={"help": words, "bounds": bounds})


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides the outcome of one run; written into its result file.

    A setting of other methods than the run's is None.
    """

    task: str = _setting("demo", "cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli or demo")
    data: str = _setting("demo", "hub, demo, or a folder in the official GLUE layout")
    model: str = _setting("demo", "demo, a name on the hub, or a folder that from_pretrained reads")
    method: str = _setting(EXACT, "exact, checkpointing, budget, codes, fit, or a sketch: gaussian, hadamard, ...")
    ratio: float | None = _setting(None, "rows kept over rows; in (0, 1]")
    center: bool | None = _setting(None, "keep the column mean of the input apart")
    bits: str | None = _setting(None, "of codes: 8, 4, or 4/8 for 4 of activation functions and 8 of all else", _BITS)
    budget: str | None = _setting(None, "of a step's peak, for budget and fit: such as 50%% or 200MiB")
    executor: str | None = _setting(None, "of codes, budget and fit: inductor (the default), or exact, op by op")
    storage: str | None = _setting(None, "hold what is kept in int8, int4 or int2")
    skip_padding: bool = _setting(False, "leave out rows that the attention mask marks as padding")
    keep_first: bool = _setting(False, "keep the rows of each sequence's first token beside the sketch")
    min_rows: int = _setting(128, "inputs with fewer rows stay exact", _NOT_NEGATIVE)
    exclude_modules: tuple[str, ...] = _setting((), "linear layers that stay exact, by name or end of a name")
    seed: int = _setting(0, "seed of the classification head, the order of the data, dropout and the sketches", _SEED)
    epochs: float = _setting(3, "passes over the training split", _POSITIVE)
    max_steps: int = _setting(0, "stop after so many steps, where the schedule ends too; 0 for all", _NOT_NEGATIVE)
    batch_size: int = _setting(16, "sequences a training step", _POSITIVE)
    eval_batch_size: int = _setting(64, "sequences an evaluation step", _POSITIVE)
    max_length: int = _setting(128, "longest sequence in tokens; batches are padded to their own longest", _POSITIVE)
    pad_multiple: int = _setting(
        0, "pad batches to a multiple of so many tokens (codes compile each length)", _NOT_NEGATIVE
    )
    group_lengths: bool = _setting(False, "make training batches of sequences of about the same length")
    learning_rate: float = _setting(2e-5, "peak learning rate", _POSITIVE)
    schedule: str = _setting("polynomial", "polynomial, linear or constant, after the warm-up", _SCHEDULE)
    warmup: float = _setting(0.06, "share of the steps that warm up", _SHARE)
    weight_decay: float = _setting(0.1, "of AdamW", _NOT_NEGATIVE)
    beta1: float = _setting(0.9, "of AdamW", _BELOW_1)
    beta2: float = _setting(0.98, "of AdamW", _BELOW_1)
    epsilon: float = _setting(1e-6, "of AdamW", _POSITIVE)
    max_grad_norm: float = _setting(1.0, "clip gradients to this norm; 0 for no clipping", _NOT_NEGATIVE)
    precision: str = _setting("float32", "float32 or bfloat16", _PRECISION)
    monitor: int = _setting(
        0, "steps in which the noise of each layer is measured once; 0 for no measurement", _NOT_NEGATIVE
    )
    save_steps: int = _setting(
        0, "steps between checkpoints within an epoch, besides its end; 0 for none", _NOT_NEGATIVE
    )
    timing: bool = _setting(True, "whether the machine is quiet enough for times to mean something")

    def __post_init__(self) -> None:
        """Reject settings that can't run, and fill in the sketch's settings."""
        known_tasks = (*TASKS, DEMO_TASK.name)
        if self.task not in known_tasks:
            raise HarnessError(f"unknown task {self.task!r}; choose one of {', '.join(known_tasks)}")
        if (self.data == "demo") != (self.task == DEMO_TASK.name):
            raise HarnessError(
                f"the task {self.task!r} does not fit --data {self.data}; the task 'demo' goes with --data demo, the "
                "GLUE tasks with --data hub or --data <folder>"
            )
        methods = (*_METHODS, *available_sketches())
        if self.method not in methods:
            raise HarnessError(f"unknown method {self.method!r}; choose one of {', '.join(methods)}")
        for setting in dataclasses.fields(self):
            value, bounds = getattr(self, setting.name), setting.metadata["bounds"]
            if bounds and not _BOUNDS[bounds](value):
                raise HarnessError(f"{setting.name}={value!r} is not {bounds}")
        object.__setattr__(self, "exclude_modules", tuple(self.exclude_modules))
        self._check_compiled()
        if not self.uses_sketch:
            given = [name for name in ("ratio", "center", "storage") if getattr(self, name) is not None]
            given += [name for name in VARIANTS if getattr(self, name)]
            if given:
                options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                raise HarnessError(f"the method {self.method!r} keeps no sketch: leave out {options}")
            return
        knobs = {name: getattr(self, name) for name in ("ratio", "center") if getattr(self, name) is not None}
        try:
            config = RMMConfig(sketch=self.method, min_rows=self.min_rows, storage=self.storage, **knobs)
        except (TypeError, ValueError) as error:
            raise HarnessError(str(error)) from error
        object.__setattr__(self, "ratio", config.ratio)
        object.__setattr__(self, "center", config.center)

    def _check_compiled(self) -> None:
        for methods, name, example in (((CODES,), "bits", "8"), ((BUDGET, FIT), "budget", "50%")):
            if (self.method in methods) != (getattr(self, name) is not None):
                raise HarnessError(
                    f"--method {' or '.join(methods)} and --{name} go together: pass both or neither, as --{name}"
                    f" {example}"
                )
        if self.executor is not None and self.plan_options is None:
            raise HarnessError(f"the method {self.method!r} has no plan: leave out --executor")
        try:
            options = Options(budget=self.budget, executor=self.executor or Options.executor)
        except ValueError as error:
            raise HarnessError(str(error)) from error
        if options.executor == Options.executor:
            # given by name, it is the same run
            object.__setattr__(self, "executor", None)

    @property
    def uses_sketch(self) -> bool:
        return self.method not in _METHODS

    @property
    def plan_options(self) -> dict[str, Any] | None:
        """Options of `RMMCallback` by which steps are planned and compiled; None where they run in eager mode."""
        executor = {} if self.executor is None else {"executor": self.executor}
        if self.method == FIT:
            return {"fit": self.budget, **executor}
        if self.bits is not None:
            return {"compile": {"bits": BITS[self.bits], **executor}}
        return None if self.budget is None else {"compile": {"budget": self.budget, **executor}}

    @property
    def rmm_config(self) -> RMMConfig:
        """The configuration of the converted layers; only where `uses_sketch`."""
        names = ("ratio", "center", "min_rows", "storage", "skip_padding")
        kept = (0,) if self.keep_first else ()
        return RMMConfig(sketch=self.method, keep_tokens=kept, **{name: getattr(self, name) for name in names})

    @property
    def task_description(self) -> Task:
        return DEMO_TASK if self.task == DEMO_TASK.name else TASKS[self.task]

    @property
    def method_label(self) -> str:
        """Method and knobs in one word, such as `hadamard-0.4-centered-int4`."""
        if not self.uses_sketch:
            knob = self.bits or self.budget
            return self.method if knob is None else f"{self.method}-{knob.replace('/', '-').replace('%', '')}"
        knobs = ["centered"] if self.center else []
        knobs += [self.storage] if self.storage is not None else []
        knobs += [word for name, word in VARIANTS.items() if getattr(self, name)]
        return "-".join([f"{self.method}-{self.ratio:g}", *knobs])

    @property
    def name(self) -> str:
        return f"{self.task}-{self.method_label}-seed{self.seed}"

    @property
    def needs_hub(self) -> bool:
        return self.data == "hub" or not (self.model == "demo" or is_local_model(self.model))

    def recorded(self) -> dict[str, Any]:
        """The settings as a result file holds them: where data and model lay on this machine is left out."""
        values = dataclasses.asdict(self)
        values["data"] = self.data if self.data in ("hub", "demo") else "folder"
        values["model"] = Path(os.path.abspath(self.model)).name if is_local_model(self.model) else self.model
        values["exclude_modules"] = list(self.exclude_modules)
        # results from before these settings existed stay as they are
        values = {key: value for key, value in values.items() if key not in _RECORDED_WHERE_ON or value}
        if not self.uses_sketch:
            # they decide nothing then
            values.update(min_rows=None, exclude_modules=None)
            values.pop("monitor", None)
        return values


def stay_offline(*runs: RunSettings) -> None:
    """Keep the hub's client, which asks once when it is imported, off the network if no run needs the hub."""
    if not any(run.needs_hub for run in runs):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def is_local_model(model: str) -> bool:
    """Whether `--model` names a folder on this machine rather than a model on the hub."""
    return model != "demo" and Path(model).is_dir()


@dataclass(frozen=True)
class NamedConfig:
    """A file of `configs/`: settings, exceptions a task, and the grid that a sweep runs."""

    name: str
    settings: dict[str, Any]
    task_settings: dict[str, dict[str, Any]]
    tasks: tuple[str, ...]
    # with `method` and the settings of `KNOBS`
    methods: tuple[dict[str, Any], ...]
    seeds: tuple[int, ...]

    def run(self, **changes: Any) -> RunSettings:
        """Settings of one run: the defaults, then this file's, then its exceptions for the task, then `changes`."""
        task = changes.get("task", self.settings.get("task", RunSettings.task))
        return RunSettings(**{**self.settings, **self.task_settings.get(task, {}), **changes})

    def grid(self, **changes: Any) -> list[RunSettings]:
        """All runs of the grid, seed by seed, so that a sweep cut short has whole seeds to compare.

        Each seed starts with another method, so that no method always meets a fresh, or a warm, machine.

        Of the changes, `task`, `seed`, `method` and the settings of `KNOBS` choose runs of the grid; a task, method or
        seed outside of the grid replaces the grid's own. All others win over the file's settings.
        """
        chosen = {key: changes.pop(key) for key in ("method", *KNOBS) if key in changes}
        # as runs, so that knobs left out have their defaults
        methods = [each for each in self.methods if chosen.items() <= vars(RunSettings(**each)).items()]
        if not methods and "method" not in chosen:
            asked = " and ".join(f"{key}={value}" for key, value in chosen.items())
            raise HarnessError(f"the grid of {self.name!r} has no run with {asked}; name one with --method as well")
        methods = methods or [chosen]
        tasks = [changes.pop("task")] if "task" in changes else self.tasks
        seeds = [changes.pop("seed")] if "seed" in changes else self.seeds
        return [
            self.run(**{"task": task, "seed": seed, **method, **changes})
            for number, seed in enumerate(seeds)
            for task in tasks
            for method in (*methods[number % len(methods) :], *methods[: number % len(methods)])
        ]


def config_path(name: str) -> Path:
    return Path(name) if name.endswith(".json") else CONFIG_FOLDER / f"{name}.json"


def load_named_config(name: str) -> NamedConfig:
    """Read a file of `configs/` by its name without the suffix, or one of the user's by its path."""
    path = config_path(name)
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in CONFIG_FOLDER.glob("*.json")))
        raise HarnessError(f"unknown config {name!r}; choose one of {known}, or give the path of a .json file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = NamedConfig(
            path.stem,
            content["settings"],
            content.get("task_settings", {}),
            *(tuple(content[name]) for name in ("tasks", "methods", "seeds")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HarnessError(
            f"{path} is not a configuration ({type(error).__name__}: {error}); start from a copy of one in"
            f" {CONFIG_FOLDER}"
        ) from error
    used = {key for part in (config.settings, *config.task_settings.values(), *config.methods) for key in part}
    unknown = used - {field.name for field in dataclasses.fields(RunSettings)}
    if unknown:
        raise HarnessError(f"the config {name!r} has unknown settings: {', '.join(sorted(unknown))}")
    return config
