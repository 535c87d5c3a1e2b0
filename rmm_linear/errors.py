"""The exceptions that users may want to catch. A caller's mistake in an argument stays a ValueError."""


class RMMError(Exception):
    """Base class of the errors that this library raises itself."""


class DoubleBackwardError(RMMError, RuntimeError):
    """Raised when the gradient of a sketched layer, a planned step or `bptt_checkpoint` is itself differentiated.

    A sketch fixes an estimate of one gradient, whose derivative is no estimate of the second derivative; a planned step
    keeps no graph of its gradients. `revert_linears`, or a ratio of 1 without a storage, `remove_checkpointing`, and a
    loop in place of `bptt_checkpoint` allow second derivatives again.
    """


class TracingError(RMMError, RuntimeError):
    """Raised when a sketched layer in training mode is exported or traced into a graph.

    Such a graph holds the forward pass alone: a model trained from it would have exact layers, without a warning. Use
    eval mode, or `revert_linears`; `torch.compile` captures the backward pass as well, and is fine.
    """


class TransformError(RMMError, RuntimeError):
    """Raised when a sketched layer is mapped over by `vmap`, or differentiated in forward mode.

    A sketch is of all rows of one input, and has no forward-mode derivative. Use eval mode, ratio 1.0 without a
    storage, or `revert_linears`, for per-sample gradients, Jacobians and Hessians.
    """


class PaddingGradientError(RMMError, RuntimeError):
    """A row that was left out as padding carries a gradient: the weight gradient would miss its part."""


class CaptureError(RMMError, ValueError):
    """A training step could not be captured as one graph, for instance because its control flow depends on data."""


class NothingToTrainError(RMMError, ValueError):
    """Nothing that a step returns depends on a parameter that is trained: there is no backward pass to plan."""

    def __init__(self) -> None:
        super().__init__(
            "nothing that the step returns depends on a parameter that is trained: there is no backward pass to plan."
            " Return the loss, and call the model in training mode"
        )


class AutocastBackwardError(RMMError, RuntimeError):
    """A planned step's backward pass was called inside of autocast, where it would compute in other dtypes."""


class PagingError(RMMError, RuntimeError):
    """A tensor could not be paged out, or not brought back: a disk is full, or a file has lost its contents."""


class MissingCompilerError(RMMError, RuntimeError):
    """The executor "inductor" found no C++ compiler."""


class ScheduleError(RMMError, ValueError):
    """A schedule can't run, or would not compute the plain program's results.

    Attributes:
        step: The step that is wrong, None if it is no single one.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class InfeasibleBudgetError(RMMError, ValueError):
    """No schedule that a strategy found fits the budget; another strategy may find one.

    Attributes:
        budget_bytes: The budget.
        least_bytes: The least budget for which the strategy found a schedule.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
