"""Writes what triton's own Philox gives: run in a process of its own, with TRITON_INTERPRET=1.

The variable changes what `triton.jit` makes of a function at import, and must not reach the process of the test suite.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _randint_kernel(SEED, OFFSET, OUT, COUNT: tl.constexpr):
    # from memory: a Python integer would come as int32 or int64 depending on its size
    seed = tl.load(SEED)
    index = tl.arange(0, COUNT)
    first, second, third, fourth = tl.randint4x(seed, tl.load(OFFSET + index))
    tl.store(OUT + index, first)
    tl.store(OUT + COUNT + index, second)
    tl.store(OUT + 2 * COUNT + index, third)
    tl.store(OUT + 3 * COUNT + index, fourth)


@triton.jit
def _randn_kernel(SEED, OFFSET, OUT, COUNT: tl.constexpr):
    seed = tl.load(SEED)
    index = tl.arange(0, COUNT)
    first, second, third, fourth = tl.randn4x(seed, tl.load(OFFSET + index))
    tl.store(OUT + index, first)
    tl.store(OUT + COUNT + index, second)
    tl.store(OUT + 2 * COUNT + index, third)
    tl.store(OUT + 3 * COUNT + index, fourth)


def main(source: str, target: str) -> None:
    seeds, offsets = torch.load(source)
    count = offsets[0].numel()
    words, normals = [], []
    for offset in offsets:
        for seed in seeds:
            # int32: the words' bits, whatever triton calls their type
            bits = torch.empty(4, count, dtype=torch.int32)
            _randint_kernel[(1,)](seed, offset, bits, COUNT=count)
            words.append(bits.to(torch.int64) & 0xFFFFFFFF)
            normal = torch.empty(4, count)
            _randn_kernel[(1,)](seed, offset, normal, COUNT=count)
            normals.append(normal)
    shape = (len(offsets), len(seeds), 4, count)
    torch.save((torch.stack(words).view(shape), torch.stack(normals).view(shape)), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
