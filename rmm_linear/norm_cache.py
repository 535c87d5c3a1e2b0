"""WTA-CRS as published: rows are drawn by the norms that their gradients had in the previous epoch.

The best probabilities of a row-sampling sketch are proportional to ||x_i|| ||g_i|| (Liu et al. 2023, "Winner-Take-All
Column Row Sampling", arXiv 2305.15265, section 3), and g is not known when x is sketched. Its norms are remembered,
for each layer, sample of the dataset and position in the sequence, from the last time that the sample was trained on
(their algorithm 1), in bfloat16 in the host's memory. A cache changes the variance alone: the estimate is unbiased for
any contents (`rmm_linear.sketches.row_sampling.sampling_norms`). In the first epoch no norm is known, and rows are
drawn by ||x_i||, as without a cache. docs/noise.md has a training loop with a cache.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.config import RMMConfig
from rmm_linear.padding import in_checkpoint
from rmm_linear.sketches.row_sampling import ColumnRowSampling

# The value of a table for a norm that has not been observed.
_UNKNOWN = -1.0


class RowNorms:
    """The norms of the gradient's rows, remembered and new, in one call of a layer or of layers that share a sketch."""

    def __init__(self, batch: "_Batch", name: str, positions: int) -> None:
        self._batch, self._name, self._positions = batch, name, positions
        self._now: Tensor | None = None

    def known(self, device: torch.device) -> Tensor | None:
        """Return the remembered norms, shape (rows,), negative where a norm is unknown; None if there is no table."""
        self._batch.is_used = True
        table = self._batch.cache.tables.get(self._name)
        if table is None:
            return None
        norms = _widened(table[self._batch.samples, : self._positions], self._positions)
        return norms.flatten().to(device, non_blocking=True)

    def look(self, g: Tensor, _: Tensor | None) -> None:
        """Record the norms of a gradient (rows, out) of the layer, or of one of the layers, in the backward pass."""
        norms = torch.linalg.vector_norm(g, dim=1, dtype=torch.float32)
        if self._now is None:
            self._batch.cache.seen.append(self)
        self._now = norms if self._now is None else torch.hypot(self._now, norms)

    def write(self, tables: dict[str, Tensor], samples: int) -> None:
        """Write the new norms into the layer's table."""
        assert self._now is not None
        table = tables.get(self._name, torch.empty((samples, 0), dtype=torch.bfloat16))
        tables[self._name] = table = _widened(table, self._positions)
        old = table[self._batch.samples, : self._positions]
        new = self._now.view(-1, self._positions).to(table.device, table.dtype)
        # a GradScaler skips a step that overflows: its norms are not remembered
        table[self._batch.samples, : self._positions] = torch.where(new.isfinite(), new, old)


class _Batch:
    """The samples of a forward pass, and the enclosing announced batch."""

    def __init__(self, cache: "NormCache", samples: Tensor, outer: "_Batch | None") -> None:
        self.cache, self.samples, self.outer, self.is_used = cache, samples, outer, False


# The batch of this thread, if there is one: `DataParallel` runs its replicas in threads.
_announced = threading.local()


def current_norms(layer: nn.Module, x: Tensor) -> RowNorms | None:
    """Return the norms of the announced samples at a layer with the input (samples, ..., in); None for other layers."""
    batch = getattr(_announced, "batch", None)
    while batch is not None and layer not in batch.cache.names:
        batch = batch.outer
    if batch is None or x.dim() < 2 or x.shape[0] != batch.samples.shape[0] or in_checkpoint():
        return None
    return RowNorms(batch, batch.cache.names[layer], x.shape[1:-1].numel())


class NormCache:
    """Remembers the norms of gradients' rows for layers whose sketch is "wta_crs" or "crs".

    Each call of a layer within `samples` draws rows by the known norms of its samples, and the backward pass remembers
    the new norms. Layers that share a sketch (query, key and value) draw by the root of the sum of their squared norms,
    which is stored for the first layer. For a layer that runs several times in a step, the call whose backward pass
    comes last is remembered. A gradient that is not finite leaves a norm unchanged. The tables grow with the longest
    batch, and need 2 bytes of the host's memory for each position, sample and layer. Padding on the left moves
    positions, and so makes the norms less accurate. Each process remembers the samples that it has trained on itself:
    of n processes that shuffle anew in each epoch, each knows an n-th of its samples in the second epoch.

    Rows are drawn by the input alone, and no norm is remembered, in checkpointed blocks, under `torch.compile`, and for
    inputs whose first dimension is not the batch. `VarianceMonitor` ignores a cache: it uses ||x_i|| alone.

    Args:
        model: A model with converted layers.
        samples: Number of samples in the dataset.

    Attributes:
        names: The layers that may draw by remembered norms, and their names.
        tables: Norms by the name of the layer, shape (samples, positions); negative where a norm is unknown.

    Raises:
        ValueError: If `samples` is no positive int, or no layer of the model draws rows by their norms.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples={samples!r} is not a positive int; pass the number of samples in the dataset")
        self._size = samples
        self.names = {layer: name for name, layer in model.named_modules() if _samples_rows(layer)}
        if not self.names:
            raise ValueError(
                "no layer of the model draws rows by their norms; convert it before, such as by convert_linears(model,"
                ' config=RMMConfig(sketch="wta_crs", center=False)), without a storage'
            )
        self._model = model
        self.tables: dict[str, Tensor] = {}
        # norms of backward passes that are not yet written into the tables
        self.seen: list[RowNorms] = []

    @contextmanager
    def samples(self, samples: Tensor | Sequence[int]) -> Iterator[None]:
        """Announce the samples of the dataset on which the forward pass inside the context runs.

        The backward pass may come later. Entering waits for the device to finish the previous step.

        Args:
            samples: Numbers of the samples, in the batch's order, shape (batch,), integers from 0 to `samples` - 1.

        Raises:
            ValueError: If `samples` has other values, or, in training mode, no layer has drawn rows by their norms.
        """
        numbers = self._checked(samples)
        self._settle()
        batch = _announced.batch = _Batch(self, numbers, getattr(_announced, "batch", None))
        try:
            yield
        finally:
            _announced.batch = batch.outer
        if self._model.training and torch.is_grad_enabled() and not batch.is_used:
            raise ValueError(
                f"no layer has drawn rows by the norms of these {numbers.shape[0]} samples: the layers' inputs need the"
                " batch as their first dimension; checkpointed blocks, layers run by torch.compile or by a plan,"
                " replicas of DataParallel, and layers of a model other than the cache's draw by the input alone"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the tables, for `load_state_dict`: a run that resumes with these tables draws the same rows."""
        self._settle()
        return {"samples": self._size, "tables": dict(self.tables)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tables that `state_dict` returned; a state without tables empties the cache.

        Raises:
            ValueError: If the tables are of another number of samples, or of other layers.
        """
        tables = {name: table.clone() for name, table in state.get("tables", {}).items()}
        unknown = sorted(tables.keys() - set(self.names.values()))
        sizes = {state.get("samples", self._size), *(table.shape[0] for table in tables.values())}
        if sizes != {self._size} or unknown:
            raise ValueError(
                f"the state is of {', '.join(map(str, sizes))} samples and this cache of {self._size}"
                + (f"; no layer here is called {', '.join(unknown)}" if unknown else "")
                + ": load the state of a cache of the same model and dataset"
            )
        self.seen.clear()
        self.tables = tables

    def _settle(self) -> None:
        """Write the norms of past backward passes into the tables."""
        for norms in self.seen:
            norms.write(self.tables, self._size)
        self.seen.clear()

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
        # a copy: the caller may overwrite the tensor before the backward pass
        return found.to(torch.int64, copy=True)


def _samples_rows(module: nn.Module) -> bool:
    config = getattr(module, "rmm_config", None)
    return isinstance(config, RMMConfig) and isinstance(config.sketch_object, ColumnRowSampling)


def _widened(table: Tensor, positions: int) -> Tensor:
    missing = positions - table.shape[1]
    return table if missing <= 0 else nn.functional.pad(table, (0, missing), value=_UNKNOWN)
