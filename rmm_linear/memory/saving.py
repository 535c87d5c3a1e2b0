"""Measure the bytes that the sketched layers of a model save, against the same forward pass with exact layers.

A sum over the layers would be wrong: query, key and value projections share one input, which exact layers keep once; a
gated product keeps both of its factors, one of which may be another layer's input; and a checkpointed block keeps
nothing. So one forward pass of the sketched model is recorded, and the bytes of the exact model follow:

    exact = kept - tensors that only sketched layers keep + every distinct input that no other operation keeps

which equals a measurement of the exact model to the byte.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rmm_linear.functional import compute_dtype
from rmm_linear.layer import SketchedLayer, layer_input
from rmm_linear.memory.kept import StorageSet, WatchedModules, storages_of
from rmm_linear.padding import current_valid_rows
from rmm_linear.producers import flattens_in_place, is_free_to_keep
from rmm_linear.rows import sequences_of


class MeasuredSaving(WatchedModules):
    """Count the bytes that one forward pass of a model keeps, and the bytes that it would keep with exact layers.

    The model must have sketched layers, be in training mode and not be compiled.

    Attributes:
        promised_bytes: Sum over the calls of the layers of the bytes that a sketch saves of the call's input.
        sketches_anything: Whether any layer that is not exact by its configuration ran in training mode.

    Examples:
        >>> import torch
        >>> from rmm_linear import convert_linears
        >>> from rmm_linear.memory import MeasuredSaving
        >>> model = convert_linears(torch.nn.Sequential(torch.nn.Linear(64, 64)), ratio=0.5)
        >>> with MeasuredSaving(model) as saving:
        ...     loss = model(torch.randn(512, 64)).sum()
        >>> saving.exact_bytes, saving.kept_bytes < saving.exact_bytes
        (131072, True)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._reset()

    def _reset(self) -> None:
        # the layer whose forward is running, and the number of tensors that it has saved so far
        self._running: nn.Module | None = None
        self._packs = 0
        # storages saved outside sketched layers; and all inputs of sketched layers
        self._saved_elsewhere = StorageSet()
        self._inputs = StorageSet()
        # inputs that exact layers would keep: existing tensors by key, and fresh copies (casts) in bytes
        self._exact_inputs: set[StorageWeakRef] = set()
        # inputs that are saved by the operation that made them
        self._free_inputs: set[StorageWeakRef] = set()
        self._fresh_bytes = 0
        self._cast_weights: set[int] = set()
        # calls of sketched layers that save nothing, by reason
        self._shared = self._checkpointed = self._small = 0
        self.promised_bytes = 0
        self.sketches_anything = False

    @property
    def kept_bytes(self) -> int:
        """Bytes that the model kept for its backward pass."""
        return self.bytes

    @property
    def exact_bytes(self) -> int:
        """Bytes that the model would have kept with exact layers."""
        kept, inputs = self._kept.sizes, self._inputs.sizes
        # kept storages, except those that only sketched layers keep
        stays = sum(size for key, size in kept.items() if key in self._saved_elsewhere.sizes or key in inputs)
        return stays + sum(inputs[key] for key in self._exact_inputs - kept.keys()) + self._fresh_bytes

    @property
    def saving_bytes(self) -> int:
        """Bytes saved: negative if sketches take more bytes than the inputs that they replace."""
        return self.exact_bytes - self.kept_bytes

    def reasons(self) -> list[str]:
        """Return the reasons why the saving is less than `promised_bytes`."""
        elsewhere = len((self._exact_inputs & self._saved_elsewhere.sizes.keys()) - self._free_inputs)
        found = {
            "calls share their input with another layer, and exact layers keep it once": self._shared,
            "inputs are kept by another operation anyway": elsewhere,
            "calls lie in checkpointed blocks, which keep nothing": self._checkpointed,
            "inputs have fewer rows than min_rows and are kept as they are": self._small,
        }
        return [f"{count} {phrase}" for phrase, count in found.items() if count]

    def _pack(self, tensor: Tensor) -> tuple[Any, ...]:
        if self._running is None:
            for storage in storages_of(tensor):
                self._saved_elsewhere.add(storage)
        else:
            self._packs += 1
        return super()._pack(tensor)

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = layer
        self._packs = 0

    def _after(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        self._running = None
        assert isinstance(layer, SketchedLayer)
        x = layer_input(args, kwargs)
        trains = layer.training and layer.weight.requires_grad
        if trains:
            self._promise(layer, x, compute_dtype(x))
        # Without a saved tensor (no gradient is needed, or a checkpoint is active) an exact layer would keep nothing.
        if self._packs == 0:
            self._checkpointed += trains
            return
        for storage in storages_of(x):
            self._inputs.add(storage)
        if layer.weight.requires_grad:
            self._expect_input(x, compute_dtype(x))
        if x.requires_grad:
            self._expect_weight(layer.weight, compute_dtype(layer.weight))

    def _promise(self, layer: SketchedLayer, x: Tensor, dtype: torch.dtype) -> None:
        if is_free_to_keep(x, dtype):
            # the layer keeps its input
            self._free_inputs.update(map(self._inputs.add, storages_of(x)))
            return
        config, features = layer.rmm_config, x.shape[-1]
        rows = x.numel() // max(1, features)
        announced = current_valid_rows(x) if config.skip_padding else None
        valid = rows if announced is None else announced.count
        self.sketches_anything |= not config.is_exact
        sequences = sequences_of(x.shape)
        kept = min(valid, sequences * len(config.keep_tokens))
        self._small += not config.is_exact and not config.sketches(valid, kept)
        self.promised_bytes += x.numel() * dtype.itemsize - config.saved_bytes(rows, features, dtype, valid, sequences)

    def _expect_input(self, x: Tensor, dtype: torch.dtype) -> None:
        # A cast, or the copy that flattens a strided input, belongs to this call alone: three layers with one input
        # make three copies.
        if dtype != x.dtype or not flattens_in_place(x):
            self._fresh_bytes += x.numel() * dtype.itemsize
            return
        for storage in storages_of(x):
            if storage not in self._excluded:
                key = self._inputs.add(storage)
                self._shared += key in self._exact_inputs
                self._exact_inputs.add(key)

    def _expect_weight(self, weight: Tensor, dtype: torch.dtype) -> None:
        if dtype == weight.dtype:
            return
        # autocast casts a trainable float32 leaf once, and other weights anew at each call
        if torch.is_autocast_cache_enabled() and weight.requires_grad and weight.is_leaf:
            if id(weight) in self._cast_weights:
                return
            self._cast_weights.add(id(weight))
        self._fresh_bytes += weight.numel() * dtype.itemsize

    def __enter__(self) -> "MeasuredSaving":
        super().__enter__()
        self._reset()
        layers = [layer for layer in self._model.modules() if isinstance(layer, SketchedLayer)]
        self._watch(layers, self._before, self._after)
        return self
