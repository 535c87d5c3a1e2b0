"""A callable that replaces a trainer's `compute_loss`, for callbacks that need each batch."""

from typing import Any

from transformers import Trainer


class ReplacedLoss:
    """Replaces a trainer's `compute_loss`, which subclasses call as `self._loss_of`, until `remove`."""

    def __init__(self, trainer: Trainer) -> None:
        self._loss_of: Any = trainer.compute_loss
        self._attributes = vars(trainer)
        self._own_loss = self._attributes.get("compute_loss")
        self._attributes["compute_loss"] = self

    def remove(self) -> None:
        """Restore the former loss, in the trainer or in a later replacement."""
        later = self._attributes.get("compute_loss")
        while isinstance(later, ReplacedLoss) and later is not self and later._own_loss is not self:
            later = later._own_loss
        if later is self:
            del self._attributes["compute_loss"]
            if self._own_loss is not None:
                self._attributes["compute_loss"] = self._own_loss
        elif isinstance(later, ReplacedLoss):
            later._loss_of, later._own_loss = self._loss_of, self._own_loss
