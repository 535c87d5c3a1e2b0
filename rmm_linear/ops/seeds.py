"""Where the seeds of sketches come from."""

import torch
from torch import Tensor

from rmm_linear.ops.registration import define
from rmm_linear_kernels.allocation import empty

# Odd multiplier of splitmix64 (Steele et al. 2014): rank r's seeds are shifted by r times it, modulo 2**64.
_RANK_STRIDE = 0x9E3779B97F4A7C15
# The largest number is never drawn: a range ends before its end.
_FROM, _TO = -(1 << 63), (1 << 63) - 1
_HAS_PROCESS_GROUPS = torch.distributed.is_available()


def data_parallel_rank() -> int:
    """Return this process's rank, 0 without an initialised process group."""
    if _HAS_PROCESS_GROUPS and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


# without a default: compiled code would hand that over by name, which takes longer
@define("draw_seed(Tensor x, Tensor? token) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(x: Tensor, token: Tensor | None) -> Tensor:
    # what torch.randint draws, by less code that a step would run for this alone
    seed = empty(x, (), torch.int64).random_(_FROM, _TO)
    rank = data_parallel_rank()
    if rank == 0:
        # for most, a launch less on a GPU
        return seed
    shift = (rank * _RANK_STRIDE) % (1 << 64)
    return seed + (shift - (1 << 64) if shift >= 1 << 63 else shift)


# Since torch 2.15 compilers merge equal calls of those ops alone that they take for pure, by this. That an op is random
# and must not run twice, the partitioner reads from the tag.
torch.ops.rmm_linear.draw_seed.default._nondeterministic_seeded = False


@torch.library.register_fake("rmm_linear::draw_seed")
def _(x: Tensor, token: Tensor | None) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


def draw_seed(x: Tensor, *, alone: bool = False) -> Tensor:
    """Draw a sketch's seed from the default generator of `x`'s device.

    `torch.manual_seed`, checkpointing's `preserve_rng_state` and resumed runs therefore govern it. The op is tagged
    `nondeterministic_seeded`: the AOT partitioner must save the seed, never draw it anew in the backward pass. The
    process's rank is mixed in, so that data-parallel ranks that were seeded alike still draw different sketches.

    AOTAutograd treats the op as it treats any other. It merges equal calls: layers that are compiled together and draw
    for the same tensor draw once, equal calls of the sketching op are merged then as well, and they keep one sketch.
    And it moves what the output does not need into the backward pass, where the arguments are there: a draw and its
    sketch together, if `x` is what the sketch is made of. Of a tensor that stays when that one goes, the draw would
    move alone, and the sketch would have another seed.

    Args:
        x: The tensor that is to be sketched; in eager mode any other will do, since only its device matters.
        alone: For compilers: make this draw unlike any other.

    Returns:
        0-d int64 on the device of `x`.
    """
    # calls of torch.empty are not merged
    token = torch.empty((), device=x.device) if alone else None
    return _draw_seed(x, token)
