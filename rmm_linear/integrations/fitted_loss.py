"""The loss of a `transformers.Trainer`, which fits the model when it is first computed: `RMMCallback(fit=...)`."""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from rmm_linear.candidates import cautious_ratio
from rmm_linear.checkpointing.planned import remove_checkpointing
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.fitting import Fit, fit
from rmm_linear.integrations.replaced_loss import ReplacedLoss


class FittedLoss(ReplacedLoss):
    """A trainer's `compute_loss` that fits the model to its first batch, and to later batches that have no plan.

    `options` are the arguments of `fit`. `every` is the number of batches from one measurement of the noise to the
    next; 0 turns measurements off.

    Attributes:
        fitted: The result of `fit`; None before the first batch.
        noise: The latest measured noise, as a share of the minibatch's variance; None before the first batch.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, options: Mapping[str, Any], every: int) -> None:
        self.fitted: Fit | None = None
        self.noise: float | None = None
        self._model, self._options, self._every, self._batches, self._has_told = model, options, every, 0, False
        super().__init__(trainer)

    def __call__(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Compute the trainer's loss, after fitting the model if it has no plan."""
        if not self._model.training:
            return self._loss_of(model, inputs, *arguments, **keywords)
        if self.fitted is None:
            try:
                self._fit(inputs, keywords)
            except BaseException:
                # the trainer may be used again without the callback
                self.remove()
                raise
        elif self._every:
            self._batches += 1
            if self._batches % self._every == 0:
                self._watch(self.fitted, inputs, keywords)
        try:
            # a copy, since the trainer's loss may remove the labels
            return self._loss_of(model, copy.copy(inputs), *arguments, **keywords)
        except InfeasibleBudgetError:
            self._fit(inputs, keywords)
            return self._loss_of(model, inputs, *arguments, **keywords)

    def _loss_with(self, keywords: Mapping[str, Any]) -> Callable[[nn.Module, Any], torch.Tensor]:
        others = {name: value for name, value in keywords.items() if name != "return_outputs"}
        return lambda model, batch: self._loss_of(model, dict(batch), **others)

    def _fit(self, inputs: Any, keywords: Mapping[str, Any], **more: Any) -> None:
        remove_checkpointing(self._model)
        options = {**self._options, **more}
        self.fitted = fit(self._model, inputs, loss_fn=self._loss_with(keywords), **options)
        self.noise = self.fitted.chosen.noise_ratio
        print(f"fit: {str(self.fitted).partition(chr(10))[0]}")

    def _watch(self, fitted: Fit, inputs: Any, keywords: Mapping[str, Any]) -> None:
        """Measure the noise again, and fit the model anew if it has grown above the limit."""
        if not fitted.chosen.options:
            return
        try:
            measured = cautious_ratio(fitted.measure(inputs, self._loss_with(keywords)))
            if not math.isfinite(measured):
                raise ValueError("the minibatch's variance can't be told from 0 on parts of the batch")
            self.noise = measured
        except ValueError as error:
            # for example, the last batch may have too few examples
            if not self._has_told:
                self._has_told = True
                warnings.warn(f"fit: {error}; the noise is not measured on this batch", UserWarning, stacklevel=3)
            return
        if self.noise <= self._options["noise"]:
            return
        print(f"fit: the noise has grown to {self.noise:.2g} of the minibatch's variance")
        try:
            # the former budget in bytes: a percentage of this batch's peak would be another budget
            self._fit(inputs, keywords, budget=fitted.budget_bytes)
        except InfeasibleBudgetError as error:
            warnings.warn(f"the model keeps its former plan: {error}", stacklevel=3)
            self._model._compiled_call_impl = fitted.step
