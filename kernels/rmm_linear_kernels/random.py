"""Random numbers as functions of a seed tensor: torch's own generator on a CPU, Philox elsewhere.

Philox in plain torch takes a thousand small operations in each step of a layer; torch's generator (mt19937) takes one
for each tensor. So the generator draws on a CPU, and a seed gives another S there than in the Triton kernels and their
references, which draw by Philox. In Triton's interpreter, CPU tensors represent a GPU's.

Each use of a seed has its own stream: the seed is mixed (the finaliser of splitmix64, Steele et al. 2014), the number
of the use is added, and the sum is mixed again. So a sketch is independent of the rounding of its stored values, and
streams of neighbouring seeds (of data-parallel ranks, for example) are independent. The generator is seeded with the
lower 32 bits of the mixed number: one pair of seeds in 2**32 has the same stream. `hadamard/reference.py` uses the
upper 32 bits as a random number.

A seed gives the same S for one version of this library, one version of torch, and one kind of processor.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .interpreter import IS_INTERPRETED
from .philox import reference as philox

STANDS_IN_FOR_GPU = IS_INTERPRETED
_MASK64 = (1 << 64) - 1
# Splitmix64's increment, by which 0 is not mixed to 0.
_INCREMENT = 0x9E3779B97F4A7C15


def is_drawn_on_cpu(x: Tensor) -> bool:
    """Tell whether torch's generator, and not Philox, draws for a tensor's device."""
    return x.is_cpu and not STANDS_IN_FOR_GPU


def generator_of(seed: int, stream: int) -> torch.Generator:
    """Return a new generator for one use (a number, 0 or more) of a 64-bit seed."""
    mixed = seed
    for added in (_INCREMENT, stream + _INCREMENT):
        mixed = (mixed + added) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        mixed ^= mixed >> 31
    return torch.Generator().manual_seed(mixed)


def for_each(seed: Tensor, stream: int, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
    """Draw by torch's generator for one seed, or for many at a time.

    Args:
        seed: 64-bit seeds on the CPU, shape (...,), int64.
        stream: The number of the use.
        draw: Draws a tensor from a generator, always of the same shape.

    Returns:
        The tensors, shape (..., shape of one tensor).
    """
    if seed.dim() == 0:
        return draw(generator_of(int(seed), stream))
    return torch.stack([draw(generator_of(each, stream)) for each in seed.flatten().tolist()]).unflatten(0, seed.shape)


def signs(seed: Tensor, count: int, *, dtype: torch.dtype) -> Tensor:
    """Return independent fair signs +1 and -1, shape (..., count)."""
    if not is_drawn_on_cpu(seed):
        return philox.random_signs(seed, count, dtype=dtype)

    def draw(generator: torch.Generator) -> Tensor:
        bits = torch.empty(count, dtype=dtype, device="cpu").random_(0, 2, generator=generator)
        return torch.rsub(bits, 1, alpha=2)

    return for_each(seed, philox.SIGN_STREAM, draw)


def subset(seed: Tensor, population: int, chosen: int) -> Tensor:
    """Return `chosen` distinct numbers below `population`, each subset equally likely, (..., chosen), int64."""
    if not is_drawn_on_cpu(seed):
        return philox.choose_without_replacement(seed, population, chosen)
    draw = for_each(seed, philox.CHOICE_STREAM, lambda g: torch.randperm(population, generator=g, device="cpu"))
    return draw[..., :chosen]


def fractions(seed: Tensor, count: int) -> Tensor:
    """Return independent uniforms in [0, 1) with 53 random bits each, shape (..., count), float64."""
    if not is_drawn_on_cpu(seed):
        return philox.random_fractions(seed, count)
    return for_each(
        seed,
        philox.CHOICE_STREAM,
        lambda g: torch.rand(count, generator=g, dtype=torch.float64, device="cpu"),
    )
