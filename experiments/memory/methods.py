"""The ways to train that are compared: exact, checkpointed, every layer sketched by itself, and rmm_linear's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rmm_linear import RMMConfig, convert_linears, revert_linears, summary
from rmm_linear.memory import MemoryReport

EXACT, CHECKPOINTING, ALONE, OURS = "exact", "checkpointing", "every layer alone", "rmm_linear"
RATIOS = (0.5, 0.2, 0.1)
# ratio 1 keeps all of an input, in fewer bits; a sketch in fewer bits goes further
STORED = ((1.0, "int8"), (1.0, "int4"), (0.5, "int4"), (0.2, "int4"))


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        family: EXACT, CHECKPOINTING, ALONE (every linear layer, heads included, keeps a sketch of its own) or OURS
            (layers of one input share a sketch, and layers of which a sketch frees nothing stay exact).
        config: How linear layers sketch; None for exact ones.
    """

    family: str
    config: RMMConfig | None = None

    @contextmanager
    def applied(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Have a model train this way inside the context.

        Raises:
            ValueError: If no layer can be converted, or none pays.
        """
        model_methods: Any = model
        try:
            if self.family == CHECKPOINTING:
                # transformers 5.23 has a new name for it, and 5.10 only this one
                model_methods.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            elif self.family == ALONE:
                convert_linears(model, config=self.config, target_modules=".*")
            elif self.family == OURS:
                convert_linears(model, config=self.config, sample=batch)
            rows = summary(model).rows
            yield [row.name for row in rows if row.config is not None]
        finally:
            if self.family == CHECKPOINTING:
                model_methods.gradient_checkpointing_disable()
                # enabling it makes the embeddings' output require gradients, and disabling leaves that as it is
                model_methods.disable_input_require_grads()
            revert_linears(model)

    def predicted_bytes(self, report: MemoryReport, sketched: list[str]) -> int | None:
        """Return what the exact model's report says that this way keeps.

        Returns:
            Bytes, or None for checkpointing, of which a report of the exact model says nothing.
        """
        if self.family == CHECKPOINTING:
            return None
        return report.total_bytes if self.config is None else report.predict(self.config, layers=sketched)


METHODS = (
    Method(EXACT),
    Method(CHECKPOINTING),
    *(Method(ALONE, RMMConfig.from_recipe("paper", ratio=ratio, share_sketch=False)) for ratio in RATIOS),
    *(Method(OURS, RMMConfig(ratio=ratio)) for ratio in RATIOS),
    *(Method(OURS, RMMConfig(ratio=ratio, storage=storage)) for ratio, storage in STORED),
)
