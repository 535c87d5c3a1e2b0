"""What a CPU draws S from: torch's own generator, seeded by the layer's seed.

Philox in plain torch takes a thousand small operations a step of a layer, where torch's generator (mt19937) takes one
for each tensor. So a CPU draws by it, and S is a function of the seed there as everywhere, but another one than the S
of the Triton kernels and their references, which draw by Philox.

Each use of a seed has a stream of its own: the seed is mixed (the finaliser of splitmix64, Steele et al. 2014), the
number of the use is added, and the sum is mixed again. So a sketch and the rounding of what it stores are independent,
and seeds at any distance have nothing in common, those of data-parallel ranks included. Of the mixed number the
generator takes the lower 32 bits: one pair of seeds in 2**32 has the same stream. The upper ones are a random number
that takes no operation.

The streams are a promise for one version of this library, one of torch, and one kind of processor: same seed, same S.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
# Splitmix64's increment: the number 0 is not mixed to 0.
_INCREMENT = 0x9E3779B97F4A7C15


def generator_of(seed: int, stream: int) -> torch.Generator:
    """Return a new generator for one use of a seed.

    Args:
        seed: A 64-bit seed.
        stream: Which of its uses: a number, 0 or more.
    """
    return torch.Generator().manual_seed(_mixed(_mixed(seed) + stream))


def number_below(end: int, generator: torch.Generator) -> int:
    """Return a random number that came with a generator's seed: always the same one.

    Args:
        end: How many numbers there are, no more than a few thousand: they are equally likely up to `end` / 2**32.
        generator: As `generator_of` made it, which draws from other bits.

    Returns:
        A number from 0 to before `end`.
    """
    return ((generator.initial_seed() >> 32) * end) >> 32


def _mixed(number: int) -> int:
    mixed = (number + _INCREMENT) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


def for_each(seed: Tensor, stream: int, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
    """Draw for one seed, or for many at a time.

    Args:
        seed: 64-bit seeds on the CPU, shape (...,), int64.
        stream: Which use of the seeds.
        draw: What is made of one generator: a tensor of always the same shape.

    Returns:
        The tensors, shape (..., shape of one).
    """
    if seed.dim() == 0:
        return draw(generator_of(int(seed), stream))
    return torch.stack([draw(generator_of(each, stream)) for each in seed.flatten().tolist()]).unflatten(0, seed.shape)


def random_signs(generator: torch.Generator, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Return independent fair signs.

    Args:
        generator: What draws them.
        shape: How many.
        dtype: Floating dtype of the result.

    Returns:
        Entries +1 and -1.
    """
    bits = torch.empty(shape, dtype=dtype, device="cpu").random_(0, 2, generator=generator)
    return torch.rsub(bits, 1, alpha=2)
