"""Batches of any length, padded to a few lengths, so that few plans are needed.

A batch is a mapping of tensors as Hugging Face's tokenizers and collators make it: (batch, length) each, with an
`attention_mask` that says which places are padding. Padded places are masked, and have labels that no loss counts: the
loss and its gradients are those of the batch as it came, up to rounding, and with dropout those of another draw. That
holds for models that follow the mask, which no look at a batch can tell: `check_padding_changes_no_loss` tries it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional as F

from rmm_linear.checkpointing.lending import lent
from rmm_linear.checkpointing.python_state import PythonState

_MASK = "attention_mask"
_IDS = "input_ids"
# What each tensor of a batch is padded with; ids have the model's own padding token.
_VALUES: dict[str, float] = {_IDS: 0, _MASK: 0, "token_type_ids": 0, "position_ids": 0, "labels": -100}
# Relative to a loss of at least 1.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
_ROUNDING_OF_OTHERS = 3e-2


@dataclass(frozen=True)
class Buckets:
    """Lengths that batches are padded to.

    Attributes:
        lengths: In ascending order; a multiple, if it is a single number.
        values: What each tensor is padded with.
        sequences: Whether tensors of these names are as long as the batch; of others, their shape says so.
    """

    lengths: int | tuple[int, ...]
    values: Mapping[str, float]
    sequences: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(
        cls, pad_to: int | Sequence[int] | None, pad_values: Mapping[str, float] | None, model: nn.Module
    ) -> "Buckets | None":
        """Read what a user asks for.

        Args:
            pad_to: A multiple, or lengths; None for no padding.
            pad_values: What tensors are padded with, beside those that are known.
            model: The model; `config.pad_token_id` pads its ids.

        Returns:
            The buckets; None if there is nothing to pad.

        Raises:
            ValueError: If a length is none, or values are given for no lengths.
        """
        if pad_to is None:
            if pad_values is not None:
                raise ValueError(f"pad_values={pad_values!r} without pad_to: pass the lengths to pad to as well")
            return None
        lengths = [pad_to] if isinstance(pad_to, int) else list(pad_to)
        if not lengths or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in lengths):
            raise ValueError(f"pad_to={pad_to!r} is no length; pass a multiple (64), or a list of lengths ([64, 128])")
        ids = getattr(getattr(model, "config", None), "pad_token_id", None)
        known = {**_VALUES, _IDS: ids} if isinstance(ids, int) else _VALUES
        return cls(pad_to if isinstance(pad_to, int) else tuple(sorted(lengths)), {**known, **(pad_values or {})})

    def learned(self, sample: Mapping[str, Any]) -> "Buckets":
        """Learn from a sample which tensors are as long as the batch: later on, another one may be by chance.

        Args:
            sample: A batch.

        Returns:
            The buckets, for batches like this.
        """
        length = self._length_of(sample)
        tensors = {name: value for name, value in sample.items() if isinstance(value, Tensor)}
        return replace(self, sequences={name: length in value.shape[1:] for name, value in tensors.items()})

    def length_for(self, length: int) -> int:
        """Say what a length is padded to.

        Args:
            length: The length.

        Returns:
            The next bucket's; the length itself, if it is longer than all of them.
        """
        if isinstance(self.lengths, int):
            return -(-length // self.lengths) * self.lengths
        return next((each for each in self.lengths if each >= length), length)

    def padded(self, batch: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
        """Pad a batch.

        Args:
            batch: Tensors and plain values by name.
            length: The length to pad to; the next bucket's if None.

        Returns:
            The batch, with longer tensors.

        Raises:
            ValueError: If it has no mask, or a tensor of its length that nothing is known of.
        """
        present = self._length_of(batch)
        length = self.length_for(present) if length is None else length
        return {name: self._longer(name, value, present, length) for name, value in batch.items()}

    @staticmethod
    def _length_of(batch: Mapping[str, Any]) -> int:
        ids, mask = batch.get(_IDS), batch.get(_MASK)
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or ids.dim() != 2 or mask.shape != ids.shape:
            raise ValueError(
                f"pad_to pads batches with {_IDS} and {_MASK} of one shape (batch, length), passed by name; this one"
                f" has {', '.join(f'{name} {_shape(value)}' for name, value in batch.items()) or 'nothing by name'}"
            )
        return ids.shape[1]

    def _longer(self, name: str, value: Any, present: int, length: int) -> Any:
        if not isinstance(value, Tensor) or not self.sequences.get(name, present in value.shape[1:]):
            return value
        if name not in self.values or value.dim() != 2 or value.is_floating_point():
            raise ValueError(
                f"pad_to does not know how to pad {name!r} of shape {tuple(value.shape)} and {value.dtype}: known are"
                f" integers of shape (batch, length) by the names {', '.join(self.values)}; for another one say what"
                f" padding is, pad_values={{{name!r}: 0}}, or pad it before; if it is {present} wide by chance, pass a"
                " sample of another length"
            )
        return F.pad(value, (0, length - present), value=self.values[name])


def check_padding_changes_no_loss(
    buckets: Buckets, model: nn.Module, step: Callable[..., Any], batch: Mapping[str, Any]
) -> None:
    """Compare the losses of a batch and of the same batch, padded; both in eval mode.

    Args:
        buckets: Lengths to pad to.
        model: The model; it stays as it is.
        step: Called as `step(model, **batch)`.
        batch: The batch.

    Raises:
        ValueError: If they differ by more than rounding, there is no loss, the padded batch fails, or a module takes
            statistics over the batch in training, where padding may count.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"pad_to can't be used with {name or 'the model'!r}, a {type(module).__name__}, whose statistics over a"
                " batch may count padding: pad the batches yourself, or put the module in eval mode"
            )
    length = buckets.length_for(batch[_IDS].shape[1])
    if length == batch[_IDS].shape[1]:
        # one that has no padding can be told by a longer one alone
        length = buckets.length_for(length + 1)
    if length == batch[_IDS].shape[1] or any(tensor.is_meta for tensor in model.parameters()):
        return
    plain = _losses(model, step, batch)
    try:
        padded = _losses(model, step, buckets.padded(batch, length))
    except Exception as error:
        raise ValueError(
            f"pad_to was tried with the sample padded from {batch[_IDS].shape[1]} to {length}, which failed"
            f" ({type(error).__name__}: {error}): pass a shorter sample if that is longer than the model takes"
        ) from error
    if not plain:
        raise ValueError(
            "pad_to needs a loss in what is planned, for the other results would be longer than the batch: let the"
            " model return it (labels=...), or plan the step that computes it (checkpoint_step)"
        )
    for before, after in zip(plain, padded, strict=True):
        rounding = max(_ROUNDING.get(parameter.dtype, _ROUNDING_OF_OTHERS) for parameter in model.parameters())
        if not (abs(before - after) <= rounding * max(1.0, abs(before)) or (before != before and after != after)):
            raise ValueError(
                f"padding changes the loss of the sample: {before:.6g} at length {batch[_IDS].shape[1]}, {after:.6g}"
                f" padded to {length}. The model does not leave masked places out everywhere, or {_IDS} need another"
                f" padding token (pad_values={{{_IDS!r}: ...}}, now {buckets.values[_IDS]:g}); leave pad_to away"
            )


def _losses(model: nn.Module, step: Callable[..., Any], batch: Mapping[str, Any]) -> list[float]:
    tensors = PythonState(model).tensors
    parameters = {id(parameter) for parameter in model.parameters()}
    # buffers that a forward pass writes into are copies
    copies = [tensor if id(tensor) in parameters else tensor.detach().clone() for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    try:
        model.eval()
        with lent(model, step, tensors, copies), torch.random.fork_rng(devices=devices), torch.no_grad():
            leaves = pytree.tree_leaves(step(model, **batch))
    finally:
        for module, training in modes:
            module.training = training
    return [float(leaf) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.dim()]


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
