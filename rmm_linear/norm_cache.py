"""WTA-CRS as its authors use it: rows are drawn by the norms that their gradients had in the epoch before.

The best probabilities of a row-sampling sketch are proportional to ||x_i|| ||g_i|| (Liu et al. 2023, "Winner-Take-All
Column Row Sampling", arXiv 2305.15265, section 3), and g is not known when x is sketched. So its norms are remembered,
for each layer, sample of the dataset and position in the sequence, from the last time that the sample was trained on
(their algorithm 1), in bfloat16 in the host's memory. What a cache holds decides about the variance alone: the estimate
is unbiased whatever it is (`rmm_linear.sketches.row_sampling.sampling_norms`).

    model = convert_linears(model, config=RMMConfig(ratio=0.3, sketch="wta_crs", center=False))
    cache = NormCache(model, samples=len(dataset))
    ...
    with cache.samples(batch.pop("sample")):
        loss = model(**batch).loss
    loss.backward()

Their first epoch has no norms, and draws by ||x_i|| as the sketch does without a cache.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.padding import Look
from rmm_linear.sketches.row_sampling import ColumnRowSampling

# Stands in a table for a norm that has not been seen.
_UNKNOWN = -1.0


class RowNorms(NamedTuple):
    """What a layer's call is told, and tells.

    Attributes:
        known: Norms that the rows of the gradient had before, shape (rows,), negative where none is known; None before
            the layer's first backward pass.
        look: Takes the gradient (rows, out) in the backward pass.
    """

    known: Tensor | None
    look: Look


class _Batch:
    """The samples that a forward pass runs on."""

    def __init__(self, cache: "NormCache", samples: Tensor) -> None:
        self.cache, self.samples, self.is_used = cache, samples, False


class _Announced(threading.local):
    """The batch of this thread: `DataParallel` runs its replicas in threads."""

    batch: _Batch | None = None


_announced = _Announced()


def current_norms(layer: nn.Module, x: Tensor) -> RowNorms | None:
    """Return the norms of the announced samples at a layer with the input (samples, ..., in); None for other layers."""
    batch = _announced.batch
    name = None if batch is None else batch.cache.names.get(layer)
    if batch is None or name is None or x.dim() < 2 or x.shape[0] != batch.samples.shape[0]:
        return None
    batch.is_used = True
    return batch.cache.row_norms(name, batch.samples, x)


class NormCache:
    """Remembers the norms of gradients' rows for layers whose sketch is "wta_crs" or "crs".

    Each call of a layer within `samples` draws rows by what is known of its samples, and the backward pass remembers
    what the norms are now. Layers that share a sketch (query, key and value) draw by the norms of the first of them. A
    layer that runs several times in a step remembers the call whose backward pass comes last. The table grows with the
    longest batch, and needs 2 bytes for each position, sample and layer. Padding on the left moves positions, and so
    makes the norms less true.

    Not used, and so as if nothing were known: in the second forward pass of a checkpoint, under `torch.compile`, and
    for inputs whose first dimension is not the batch. `VarianceMonitor` and `AdaptiveRatios` know nothing of it: their
    closed forms are of ||x_i|| alone.

    Args:
        model: A model with converted layers.
        samples: Number of samples in the dataset.

    Attributes:
        names: The layers that have a table, and their names.

    Raises:
        ValueError: If `samples` is no positive int, or no layer of the model samples rows by norm.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples={samples!r} is not a positive int; pass the number of samples in the dataset")
        self._size = samples
        self.names = {layer: name for name, layer in model.named_modules() if _samples_rows(layer)}
        if not self.names:
            raise ValueError(
                "no layer of the model draws rows by their norms; convert it first, such as by convert_linears(model,"
                ' config=RMMConfig(sketch="wta_crs", center=False))'
            )
        self._model = model
        self._tables: dict[str, Tensor] = {}
        # of backward passes since the last call of `_settle`, on the device
        self._seen: list[tuple[str, Tensor, Tensor]] = []

    @contextmanager
    def samples(self, samples: Tensor | Sequence[int]) -> Iterator[None]:
        """Announce which samples of the dataset the forward pass within runs on.

        The backward pass may come later. Waits for the device, once: for the norms of the step before.

        Args:
            samples: Numbers of the samples, in the batch's order, shape (batch,), integers from 0 to `samples` - 1.

        Raises:
            ValueError: If they are no such numbers, or, in training mode, no layer's input has them as its first
                dimension (which is so under torch.compile, too).
        """
        batch = _Batch(self, self._checked(samples))
        self._settle()
        outer, _announced.batch = _announced.batch, batch
        try:
            yield
        finally:
            _announced.batch = outer
        if self._model.training and torch.is_grad_enabled() and not batch.is_used:
            raise ValueError(
                f"no layer that draws rows by their norms ran on {batch.samples.shape[0]} samples: inputs need the"
                " batch as their first dimension, and layers run by torch.compile draw by the input alone"
            )

    def row_norms(self, name: str, samples: Tensor, x: Tensor) -> RowNorms:
        """Return what is known of samples at a layer, and what takes their gradient."""
        positions = x.shape[1:-1].numel()
        table = self._tables.get(name)
        known = None
        if table is not None:
            known = _widened(table[samples, :positions], positions).flatten().to(x.device)

        def look(g: Tensor, _: Tensor | None) -> None:
            norms = torch.linalg.vector_norm(g, dim=1, dtype=torch.float32)
            self._seen.append((name, samples, norms.view(-1, positions).to(torch.bfloat16)))

        return RowNorms(known, look)

    def state_dict(self) -> dict[str, Any]:
        """Return the tables, for `load_state_dict`: a run that goes on with them draws what it would have drawn."""
        self._settle()
        return {"samples": self._size, "tables": {name: table.clone() for name, table in self._tables.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: If it is of another number of samples, or of other layers.
        """
        unknown = sorted(state["tables"].keys() - set(self.names.values()))
        if state["samples"] != self._size or unknown:
            raise ValueError(
                f"the state is of {state['samples']} samples and this cache of {self._size}"
                + (f"; no layer here is called {', '.join(unknown)}" if unknown else "")
                + ": load what a cache of the same model and dataset saved"
            )
        self._seen.clear()
        self._tables = {name: table.clone() for name, table in state["tables"].items()}

    def _settle(self) -> None:
        """Write the norms of past backward passes into the tables."""
        for name, samples, norms in self._seen:
            positions = norms.shape[1]
            table = self._tables.get(name)
            if table is None:
                table = torch.full((self._size, 0), _UNKNOWN, dtype=torch.bfloat16)
            self._tables[name] = table = _widened(table, positions)
            table[samples, :positions] = norms.to(table.device)
        self._seen.clear()

    def _checked(self, samples: Tensor | Sequence[int]) -> Tensor:
        found = torch.as_tensor(samples, device="cpu")
        if found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool or found.numel() == 0:
            raise ValueError(
                f"samples have shape {tuple(found.shape)} and dtype {found.dtype}; pass the numbers of the batch's"
                " samples, integers of shape (batch,)"
            )
        if found.min() < 0 or found.max() >= self._size:
            raise ValueError(
                f"samples go from {int(found.min())} to {int(found.max())}, and the cache is made for {self._size};"
                f" pass numbers from 0 to {self._size - 1}, or NormCache(model, samples=len(dataset))"
            )
        return found.long()


def _samples_rows(module: nn.Module) -> bool:
    config = getattr(module, "rmm_config", None)
    return isinstance(config, RMMConfig) and isinstance(config.sketch_object, ColumnRowSampling)


def _widened(table: Tensor, positions: int) -> Tensor:
    """The table with room for so many positions."""
    missing = positions - table.shape[1]
    return table if missing <= 0 else nn.functional.pad(table, (0, missing), value=_UNKNOWN)
