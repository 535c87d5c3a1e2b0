"""What one run is: its settings, the named configurations in `configs/`, and the grid of runs that one spells out."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmm_linear import RMMConfig
from rmm_linear.sketches import available_sketches

from .demo import DEMO_TASK
from .errors import HarnessError
from .tasks import TASKS, Task

CONFIG_FOLDER = Path(__file__).parent / "configs"
EXACT = "exact"
CHECKPOINTING = "checkpointing"
SCHEDULES = ("polynomial", "linear", "constant")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides the outcome of one run; written into its result file.

    Attributes:
        task: A GLUE task, or `demo`.
        data: `hub`, `demo`, or the path of a folder in the official GLUE layout.
        model: `demo`, a name on the hub, or the path of a folder that `from_pretrained` reads.
        method: `exact`, `checkpointing`, or the name of a sketch.
        ratio: Rows kept by the sketch over rows of the input; None for the two methods without a sketch.
        center: Whether the column mean is kept apart; None for the two methods without a sketch.
        min_rows: Inputs with fewer rows stay exact.
        seed: Seed of the classification head, the order of the data, dropout and the sketches.
        epochs: Passes over the training split.
        max_steps: Stop after this many steps; 0 for all of them. The learning-rate schedule ends there, too.
        batch_size: Sequences a training step.
        eval_batch_size: Sequences an evaluation step.
        max_length: Longest sequence in tokens; longer ones are cut. Batches are padded to their own longest sequence.
        learning_rate: Peak learning rate.
        schedule: `polynomial` (power 1, down to zero), `linear` or `constant`, each after the warm-up.
        warmup: Share of the steps over which the learning rate rises from zero.
        weight_decay: AdamW's weight decay.
        beta1: AdamW's first decay rate.
        beta2: AdamW's second decay rate.
        epsilon: AdamW's epsilon.
        max_grad_norm: Gradients are clipped to this norm; 0 for no clipping.
        precision: `float32`, or `bfloat16` for autocast.
        save_steps: Write a checkpoint every so many steps, besides the end of each epoch; 0 for epochs only.
        timing: Whether the machine is quiet enough for the times to mean something; if not, the report leaves them out.
    """

    task: str = "demo"
    data: str = "demo"
    model: str = "demo"
    method: str = EXACT
    ratio: float | None = None
    center: bool | None = None
    min_rows: int = 128
    seed: int = 0
    epochs: float = 3
    max_steps: int = 0
    batch_size: int = 16
    eval_batch_size: int = 64
    max_length: int = 128
    learning_rate: float = 2e-5
    schedule: str = "polynomial"
    warmup: float = 0.06
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    max_grad_norm: float = 1.0
    precision: str = "float32"
    save_steps: int = 0
    timing: bool = True

    def __post_init__(self) -> None:
        """Reject what can't run, and fill in the sketch's knobs.

        Raises:
            HarnessError: Naming the setting, its value and what is allowed.
        """
        known_tasks = (*TASKS, DEMO_TASK.name)
        if self.task not in known_tasks:
            raise HarnessError(f"unknown task {self.task!r}; choose one of {', '.join(known_tasks)}")
        if (self.data == "demo") != (self.task == DEMO_TASK.name):
            raise HarnessError(
                f"the task {self.task!r} does not fit --data {self.data}; the task 'demo' goes with --data demo, the "
                "GLUE tasks with --data hub or --data <folder>"
            )
        methods = (EXACT, CHECKPOINTING, *available_sketches())
        if self.method not in methods:
            raise HarnessError(f"unknown method {self.method!r}; choose one of {', '.join(methods)}")
        self._check_numbers()
        if not self.uses_sketch:
            if self.ratio is not None or self.center is not None:
                raise HarnessError(
                    f"the method {self.method!r} keeps no sketch: leave out --ratio, --center and --no-center"
                )
            return
        try:
            config = RMMConfig(sketch=self.method, min_rows=self.min_rows)
            if self.ratio is not None:
                config = config.replace(ratio=self.ratio)
            if self.center is not None:
                config = config.replace(center=self.center)
        except (TypeError, ValueError) as error:
            raise HarnessError(str(error)) from error
        object.__setattr__(self, "ratio", config.ratio)
        object.__setattr__(self, "center", config.center)

    def _check_numbers(self) -> None:
        for name, choices in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise HarnessError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("batch_size", "eval_batch_size", "max_length", "epochs", "learning_rate"):
            # written so that NaN fails as well
            if not getattr(self, name) > 0:
                raise HarnessError(f"{name}={getattr(self, name)} is not above 0")
        for name in ("max_steps", "save_steps", "seed", "max_grad_norm", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise HarnessError(f"{name}={getattr(self, name)} is negative")

    @property
    def uses_sketch(self) -> bool:
        """Whether linear layers are converted."""
        return self.method not in (EXACT, CHECKPOINTING)

    @property
    def rmm_config(self) -> RMMConfig:
        """The configuration of the converted layers; only where `uses_sketch`."""
        assert self.ratio is not None
        assert self.center is not None
        return RMMConfig(ratio=self.ratio, sketch=self.method, center=self.center, min_rows=self.min_rows)

    @property
    def task_description(self) -> Task:
        """The `Task` behind the name."""
        return DEMO_TASK if self.task == DEMO_TASK.name else TASKS[self.task]

    @property
    def method_label(self) -> str:
        """Method and knobs in one word, such as `hadamard-0.1-centered`."""
        if not self.uses_sketch:
            return self.method
        return f"{self.method}-{self.ratio:g}" + ("-centered" if self.center else "")

    @property
    def name(self) -> str:
        """Name of the result file, without its suffix."""
        return f"{self.task}-{self.method_label}-seed{self.seed}"

    def recorded(self) -> dict[str, Any]:
        """The settings as a result file holds them: where data and model lay on this machine is left out."""
        values = dataclasses.asdict(self)
        values["data"] = self.data if self.data in ("hub", "demo") else "folder"
        values["model"] = Path(os.path.abspath(self.model)).name if is_local_model(self.model) else self.model
        return values


def is_local_model(model: str) -> bool:
    """Whether `--model` names a folder on this machine rather than a model on the hub."""
    return model != "demo" and Path(model).is_dir()


@dataclass(frozen=True)
class NamedConfig:
    """A file of `configs/`: settings, exceptions a task, and the grid that a sweep runs.

    Attributes:
        name: The file's name without its suffix.
        about: What it is for, in a sentence.
        settings: Settings that differ from the defaults of `RunSettings`.
        task_settings: Settings that hold for one task only, by task.
        tasks: Tasks of the grid.
        methods: Methods of the grid with their knobs: dictionaries with `method` and, for sketches, `ratio`, `center`.
        seeds: Seeds of the grid.
    """

    name: str
    about: str
    settings: dict[str, Any]
    task_settings: dict[str, dict[str, Any]]
    tasks: tuple[str, ...]
    methods: tuple[dict[str, Any], ...]
    seeds: tuple[int, ...]

    def run(self, **changes: Any) -> RunSettings:
        """Settings of one run: the defaults, then this file's, then its exceptions for the task, then `changes`.

        Args:
            **changes: Settings that win over the file's.

        Returns:
            The settings.
        """
        task = changes.get("task", self.settings.get("task", RunSettings.task))
        return RunSettings(**{**self.settings, **self.task_settings.get(task, {}), **changes})

    def grid(self, **changes: Any) -> list[RunSettings]:
        """All runs of the grid, seed by seed, so that a sweep cut short has whole seeds to compare.

        Args:
            **changes: Settings that win over the file's, in every run.

        Returns:
            The settings of each run.
        """
        return [
            self.run(**{"task": task, "seed": seed, **method, **changes})
            for seed in self.seeds
            for task in self.tasks
            for method in self.methods
        ]


def named_configs() -> tuple[str, ...]:
    """Names that `--config` takes."""
    return tuple(sorted(path.stem for path in CONFIG_FOLDER.glob("*.json")))


def load_named_config(name: str) -> NamedConfig:
    """Read a file of `configs/`.

    Args:
        name: Its name without the suffix.

    Returns:
        The configuration.

    Raises:
        HarnessError: If there is none of that name, or it holds an unknown setting.
    """
    if name not in named_configs():
        raise HarnessError(f"unknown config {name!r}; choose one of {', '.join(named_configs())}")
    content = json.loads((CONFIG_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    config = NamedConfig(
        name=name,
        about=content["about"],
        settings=content["settings"],
        task_settings=content.get("task_settings", {}),
        tasks=tuple(content["tasks"]),
        methods=tuple(content["methods"]),
        seeds=tuple(content["seeds"]),
    )
    known = {field.name for field in dataclasses.fields(RunSettings)}
    used = {key for part in (config.settings, *config.task_settings.values(), *config.methods) for key in part}
    if used - known:
        raise HarnessError(f"the config {name!r} has unknown settings: {', '.join(sorted(used - known))}")
    return config
