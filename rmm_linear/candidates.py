"""Ways to run a training step that `fit` chooses among, and their noise, which is measured on parts of a sample."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from rmm_linear.byte_sizes import Unit, readable
from rmm_linear.checkpointing.planned import arguments_of_sample
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.ops import ranked_higher
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.tables import aligned
from rmm_linear.variance.step_noise import StepNoise, measured_until

# The loss of a model for a batch.
Loss = Callable[[nn.Module, Any], Tensor]

T = TypeVar("T")

# Sketches are always noisier.
LEAST_NOISE_OF_SKETCHES = 0.05
# Options that leave gradients exact.
_EXACT = frozenset({"strategy", "page_to"})
# Parts of the sample with which noise is measured; the fewest, where so many would leave more than a share of it out.
_PARTS, _FEWEST_PARTS, _LEFT_OUT = 8, 4, 0.1
# Two draws of a code differ by the rank that seeds them, and no process has a rank so high.
_OTHER_RANK = 1 << 20


def cautious_ratio(noise: StepNoise) -> float:
    """Return the noise ratio if the minibatch's variance is a standard error less: few batches tell little about it."""
    minibatch = noise.minibatch.value - noise.minibatch.standard_error
    return noise.step.value / minibatch if minibatch > 0 else math.inf


@dataclass(frozen=True)
class Candidate:
    """One way to run the step.

    Attributes:
        name: Such as "8 bits".
        options: Options of the backend: "bits" and "sketch"; "strategy" and "page_to" of an exact step that pages; none
            for other exact ones. Without a compiler: "ratio" and "storage" of converted layers.
        plan: The plan within the budget; None if no plan fits, and without a compiler.
        least_bytes: The least that was found where the budget can't be met; else the plan's peak. Without a compiler,
            the measured peak.
        time: Predicted time over that of the exact step without a budget, infinite where the budget is not met; without
            a compiler, the measured time in ms.
        noise: What was measured; None if it was not, as of the exact step, which has none.
        obstacle: Why the noise could not be measured; empty if it could, or was not wanted.
        checkpoints: How many blocks are checkpointed, without a compiler.
        fits: Whether the budget is met.
    """

    name: str
    options: Mapping[str, Any]
    plan: CheckpointPlan | None
    least_bytes: int
    time: float = math.inf
    noise: StepNoise | None = None
    obstacle: str = ""
    checkpoints: int = 0
    fits: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether its gradients are exact."""
        return self.options.keys() <= _EXACT

    @property
    def noise_ratio(self) -> float:
        """Variance over the step's draws, over that of minibatches; 0 for the exact step, infinite if not measured."""
        if self.is_exact:
            return 0.0
        return math.inf if self.noise is None else cautious_ratio(self.noise)


def table(candidates: Sequence[Candidate], unit: Unit, time: str = "time", digits: int = 3) -> Iterator[str]:
    """Show peaks, times and noise, one candidate a line, and then why noise was not measured."""
    rows = [("", f"peak, {unit.name}", time, "noise over minibatch noise")]
    for each in candidates:
        peak, time_of_step = unit.of(each.least_bytes), f"{each.time:.{digits}f}"
        if each.time == math.inf:
            # no plan was found that fits
            peak, time_of_step = f"> {unit.of(each.least_bytes - 1)}", ""
        noise = f"{each.noise_ratio:.2g}" if each.noise or each.is_exact else "not measured"
        rows.append((each.name, peak, time_of_step, noise if each.fits else "does not fit"))
    yield from aligned(rows, numbers=(1, 2, 3), has_rule=False)
    yield from dict.fromkeys(each.obstacle for each in candidates if each.obstacle)


def choose(
    candidates: list[Candidate],
    limit: float,
    measured: Callable[[Candidate], StepNoise],
    budget_bytes: int | None,
    refusal: Callable[[int], str],
    least_gain: float = 1.0,
) -> Candidate:
    """Return the fastest candidate within the budget and the noise limit, a noisy one if it gains a factor of time.

    Raises:
        InfeasibleBudgetError: If there is none.
    """
    candidates.sort(key=lambda each: (not each.fits, each.time if each.is_exact else least_gain * each.time))
    fitting = [place for place, each in enumerate(candidates) if each.fits]
    for place in fitting:
        if not candidates[place].is_exact:
            try:
                candidates[place] = replace(candidates[place], noise=measured(candidates[place]))
            except NotMeasurableError as error:
                candidates[place] = replace(candidates[place], obstacle=str(error))
        if candidates[place].noise_ratio <= limit:
            return candidates[place]
    # without a budget the exact step would have fitted
    assert budget_bytes is not None
    if fitting:
        exact = [each.least_bytes for each in candidates if each.is_exact]
        text = _refusal_for_noise(candidates, limit, exact, budget_bytes)
        least_bytes = min(exact, default=budget_bytes)
    else:
        least_bytes = min(each.least_bytes for each in candidates)
        text = refusal(least_bytes)
    raise InfeasibleBudgetError(text, budget_bytes=budget_bytes, least_bytes=least_bytes)


def _refusal_for_noise(candidates: Sequence[Candidate], limit: float, exact: Sequence[int], budget_bytes: int) -> str:
    end = f"the budget is {readable(budget_bytes)}"
    if exact:
        end += f", and exact gradients take {readable(min(exact))} at the least"
    measured = [(each.noise_ratio, each.name) for each in candidates if each.noise is not None]
    if not measured:
        text = next(each.obstacle for each in candidates if each.obstacle)
    elif min(measured)[0] == math.inf:
        text = "the minibatch's variance can't be told from 0 on parts of the sample: pass a larger batch"
    else:
        ratio, name = min(measured)
        text = (
            f"the plans within the budget are noisier than noise={limit:g}: the least is {ratio:.2g} of the minibatch's"
            f" variance, with {name}; allow more noise, or a larger budget"
        )
    return f"{text}; {end}"


def is_without_contents(model: nn.Module) -> bool:
    """Tell whether a model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def checked_noise(noise: float) -> float:
    """Return a noise limit as a float, or raise a ValueError if it is no share of the minibatch's variance."""
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < math.inf:
        raise ValueError(
            f"noise={noise!r} is no share of the minibatch's variance: pass 0 for exact gradients, or 0.01 for 1 %"
        )
    return float(noise)


class NotMeasurableError(ValueError):
    """The sample or the model is such that the noise of its steps can't be measured."""


def plain_batch(batch: Any) -> Any:
    """Return a batch as a dict of its own where it is a mapping: a loss may take the labels out."""
    return dict(batch) if isinstance(batch, Mapping) else batch


class _Called(BaseException):
    """Raised in place of a model's call, with the result of `at_call`."""


def at_call(
    model: nn.Module, batch: Any, loss_fn: Loss | None, run: Callable[[tuple[Any, ...], dict[str, Any]], T]
) -> T:
    """Return the result of `run`, which gets the arguments of the model's call for a batch.

    `run` is called under the autocast in which `loss_fn` calls the model; `loss_fn` may keep the labels for itself.

    Raises:
        ValueError: If `loss_fn` does not call the model.
    """
    if loss_fn is None:
        return run(*arguments_of_sample(batch))

    def call(*args: Any, **kwargs: Any) -> None:
        del model._compiled_call_impl
        raise _Called(run(args, kwargs))

    model._compiled_call_impl = call
    devices = {each.device for each in model.parameters() if each.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            loss_fn(model, plain_batch(batch))
    except _Called as called:
        return called.args[0]
    finally:
        vars(model).pop("_compiled_call_impl", None)
    raise ValueError("loss_fn does not call the model that it is given: compute the loss from model(...)")


def loss_of(model: nn.Module, batch: Any, loss_fn: Loss | None) -> Tensor:
    """Return the loss of a batch: that of `loss_fn`, or the model's result, which is a tensor or has a `.loss`."""
    if loss_fn is None:
        args, kwargs = arguments_of_sample(batch)
        found = model(*args, **kwargs)
        loss = getattr(found, "loss", found)
    else:
        loss = loss_fn(model, plain_batch(batch))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
        raise NotMeasurableError("the step returns no loss with a graph: pass loss_fn(model, batch) that returns one")
    return loss


def noise_on(model: nn.Module, parts: Sequence[Any], loss_fn: Loss | None, limit: float) -> StepNoise:
    """Measure the noise of a model's steps on parts of a sample; on four if it is less than a tenth of a limit there.

    Raises:
        NotMeasurableError: If the gradients are not finite.
    """
    numbers = itertools.count()

    def loss_of_draw(model: nn.Module, part: Any) -> Tensor:
        # two draws of a part differ by their codes alone: dropout draws the same masks
        number = next(numbers)
        torch.manual_seed(number // 2)
        with ranked_higher(_OTHER_RANK * (number % 2)):
            return loss_of(model, part, loss_fn)

    with torch.enable_grad():
        noise = measured_until(model, parts, loss_of_draw, lambda noise: cautious_ratio(noise) < limit / 10)
    if not math.isfinite(noise.gradient_squared):
        raise NotMeasurableError("the noise can't be measured: the gradient of the sample is not finite")
    return noise


def parts_of(sample: Any) -> list[Any]:
    """Cut a batch into parts of one size, at random: along the first dimension that most of its tensors have."""
    sizes = [len(leaf) for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim()]
    size = max(sizes, key=sizes.count, default=0)
    if size < _FEWEST_PARTS:
        raise NotMeasurableError(
            f"the noise can't be measured: the sample has {size} examples in tensors (of dicts, lists, tuples); pass"
            f" {_FEWEST_PARTS} or more"
        )
    count = _PARTS if size >= _PARTS and size % _PARTS <= _LEFT_OUT * size else _FEWEST_PARTS
    # a batch may be sorted
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))[: size - size % count]

    def part_of(leaf: Any, rows: Tensor) -> Any:
        is_cut = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size
        return leaf[rows.to(leaf.device)] if is_cut else leaf

    return [pytree.tree_map(lambda leaf, rows=rows: part_of(leaf, rows), sample) for rows in order.chunk(count)]
