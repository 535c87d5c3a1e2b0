"""RMMConfig: all settings of a layer's sketch, in one frozen, validated object."""

import json
import uuid
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch

from rmm_linear.fingerprint import fingerprint
from rmm_linear.sketches import SKETCHES, Centered, LowBit, Sketch, available_sketches

_LAST_TOKEN = (1 << 31) - 1
_ROW_NUMBER_BYTES = 4
_RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    # Without the pass over x that computes the mean: the fastest, at somewhat more variance.
    "fast": {"center": False},
    # Bershatsky et al. 2022: a dense Gaussian for every layer, heads and poolers included.
    "paper": {"sketch": "gaussian", "center": False, "min_rows": 1},
}
# Prefix of the keys of configurations that depend on more than this library's code and their own text.
_THIS_PROCESS = uuid.uuid4().hex
# Instances of subclasses by key, since `RMMConfig.from_dict` makes instances of the base class.
_OTHERS: dict[str, "RMMConfig"] = {}


@dataclass(frozen=True)
class RMMConfig:
    """The settings by which a linear layer keeps its input for the backward pass.

    A configuration is immutable, hashable, and validated when it is made. `to_dict` and `from_dict` round-trip.

    Examples:
        >>> from rmm_linear import RMMConfig
        >>> config = RMMConfig(ratio=0.2).replace(center=False)
        >>> config.ratio, config.sketch, config.center
        (0.2, 'hadamard', False)

    Attributes:
        ratio: Rows kept over rows, in (0, 1]; the paper's rho. 1.0 makes the layer exact, unless it has a `storage`.
        sketch: Name of the sketch; `rmm_linear.sketches.available_sketches()` lists them.
        center: Keep the column mean of the input exactly and sketch the rest: less variance for 4 bytes a feature, and
            a reading of the input and one of the gradient for their means.
        min_rows: Inputs of fewer rows (poolers, classification heads) are kept exactly: a sketch would save little and
            add much noise.
        storage: Round the sketch to "int8", "int4" or "int2" with a random dither, without bias, or None to hold the
            sketch in the input's dtype. At ratio 1 the input itself is rounded, without a sketch.
        skip_padding: Leave out the rows that the model's attention mask marks as padding, which carry no gradient;
            `ratio` and `min_rows` refer to the other rows then (`rmm_linear.padding`).
        keep_tokens: Positions in every sequence whose rows are kept beside the sketch of the others: (0,) for models
            that read the first token, (-1,) for the last, since these rows have much of the gradient. These rows are
            kept in addition to `ratio`, in the input's dtype. Positions count the tokens that are not padding where
            `skip_padding` leaves padding out, and all tokens otherwise, also in checkpointed blocks and under
            torch.compile: with padding on the right, (-1,) is a padding row there. Sequences run along the last
            dimension but one; inputs of two dimensions have no sequences.
        share_sketch: Keep one sketch for all layers that are called with the same tensor in a forward pass (query, key
            and value) and have equal configurations (`rmm_linear.sharing`).
        sketch_object: The sketch that the configuration describes, storage and centering included.
        graph_key: The text from which operators find the configuration (`config_of`): the code, and the knobs as JSON;
            valid in this process only if the configuration uses code beside this library's.
    """

    ratio: float = 0.5
    sketch: str = "hadamard"
    center: bool = True
    min_rows: int = 128
    storage: str | None = None
    skip_padding: bool = False
    keep_tokens: tuple[int, ...] = ()
    share_sketch: bool = True
    sketch_object: Sketch = field(init=False, repr=False, compare=False)
    graph_key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, Real) or not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio={self.ratio!r} is not in (0, 1]; pass the share of rows to keep, such as 0.5, or 1.0 for an"
                " exact layer"
            )
        if not isinstance(self.sketch, str) or self.sketch not in SKETCHES:
            raise ValueError(f"sketch={self.sketch!r} is unknown; choose one of {', '.join(available_sketches())}")
        for name in ("center", "skip_padding", "share_sketch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool; pass True or False")
        if isinstance(self.min_rows, bool) or not isinstance(self.min_rows, Integral) or self.min_rows < 0:
            raise ValueError(f"min_rows={self.min_rows!r} is not a non-negative int; pass 1 to sketch any input")
        object.__setattr__(self, "keep_tokens", _checked_tokens(self.keep_tokens))
        object.__setattr__(self, "ratio", float(self.ratio))
        object.__setattr__(self, "min_rows", int(self.min_rows))
        sketch: Sketch = SKETCHES[self.sketch](ratio=self.ratio)
        if self.storage is not None:
            sketch = LowBit(sketch if self.ratio < 1 else None, self.storage)
        object.__setattr__(self, "sketch_object", Centered(sketch) if self.center else sketch)
        of = type(self)
        code = fingerprint(SKETCHES[self.sketch]) or _THIS_PROCESS
        if of is not RMMConfig:
            code = f"{_THIS_PROCESS}/{of.__module__}/{of.__qualname__}"
        object.__setattr__(self, "graph_key", f"{code} {json.dumps(self.to_dict(), default=repr)}")
        if of is not RMMConfig:
            _OTHERS[self.graph_key] = self

    @property
    def is_exact(self) -> bool:
        """Whether a layer with this configuration computes as `nn.Linear`: ratio 1, without a storage."""
        return self.ratio == 1 and self.storage is None

    def sketches(self, rows: int, kept: int = 0) -> bool:
        """Tell whether an input of this many rows, of which `keep_tokens` keeps `kept`, is sketched.

        False at ratio 1 without a storage, below `min_rows`, and where no rows are left to sketch.
        """
        return rows >= self.min_rows and rows > kept and (self.ratio < 1 or self.storage is not None)

    def saved_bytes(
        self, rows: int, features: int, dtype: torch.dtype, valid_rows: int | None = None, sequences: int = 0
    ) -> int:
        """Return the bytes that a layer keeps of an input for its weight gradient.

        With rows left out, one such row is kept exactly, with its number. The numbers of the valid rows are kept once
        for all layers of a model with the same `keep_tokens`, and are not counted here.

        Args:
            rows: Rows of the flattened input.
            features: Input features.
            dtype: Dtype that the layer computes in.
            valid_rows: Rows that are not padding, all by default; ignored without `skip_padding`.
            sequences: Sequences that the rows belong to, whose `keep_tokens` are kept; none by default.
        """
        sketched = rows if valid_rows is None or not self.skip_padding else valid_rows
        kept = min(sketched, sequences * len(self.keep_tokens))
        if not self.sketches(sketched, kept):
            return rows * features * dtype.itemsize
        beside = kept * features * dtype.itemsize
        if sketched < rows:
            beside += features * dtype.itemsize + _ROW_NUMBER_BYTES
        return beside + self.sketch_object.saved_bytes(sketched - kept, features, dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # through __init__, since an older pickle may lack newer knobs
        self.__init__(**{name: state[name] for name in _knobs(self) if name in state})  # type: ignore[misc]

    def replace(self, **changes: Any) -> "RMMConfig":
        """Return a copy with some knobs changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the knobs by name, as JSON values: a dictionary for `from_dict`."""
        values = {name: getattr(self, name) for name in _knobs(self)}
        return values | {"keep_tokens": list(self.keep_tokens)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RMMConfig":
        """Make a configuration from the output of `to_dict`; missing knobs take their defaults."""
        return cls(**values)

    @classmethod
    def from_recipe(cls, name: str, **changes: Any) -> "RMMConfig":
        """Return a named configuration with some knobs changed, most often `ratio`.

        "default"; "fast" (no centering); "paper" (Bershatsky et al. 2022: dense Gaussian).

        Raises:
            ValueError: If the recipe is unknown, or a value is bad.
        """
        if name not in _RECIPES:
            raise ValueError(f"recipe {name!r} is unknown; choose one of {', '.join(_RECIPES)}")
        return cls(**{**_RECIPES[name], **changes})


@lru_cache(maxsize=4096)
def config_of(key: str) -> RMMConfig:
    """Return the configuration with this `graph_key`."""
    return _OTHERS.get(key) or RMMConfig.from_dict(json.loads(key.partition(" ")[2]))


def config_for(ratio: float | None, config: RMMConfig | None) -> RMMConfig:
    """Return the configuration of the options `ratio` and `config`; a ValueError if both are given."""
    if config is None:
        return RMMConfig() if ratio is None else RMMConfig(ratio=ratio)
    if ratio is not None:
        raise ValueError(f"both ratio={ratio!r} and config are given; pass config=config.replace(ratio={ratio!r})")
    if not isinstance(config, RMMConfig):
        raise ValueError(f"config is a {type(config).__name__}; pass an RMMConfig, such as RMMConfig(ratio=0.5)")
    return config


def _checked_tokens(tokens: object) -> tuple[int, ...]:
    if not isinstance(tokens, (tuple, list)) or any(
        isinstance(token, bool) or not isinstance(token, Integral) or abs(int(token)) > _LAST_TOKEN for token in tokens
    ):
        raise ValueError(
            f"keep_tokens={tokens!r} is no tuple of ints below 2**31; pass positions in a sequence, such as (0,)"
        )
    found = tuple(int(token) for token in tokens)
    if len(set(found)) < len(found):
        raise ValueError(f"keep_tokens={tokens!r} names a position twice; pass each once")
    return found


def _knobs(config: RMMConfig) -> list[str]:
    return [knob.name for knob in fields(config) if knob.init]
