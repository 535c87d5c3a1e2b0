"""The strided-block Hadamard sketch in plain torch, which the GPU kernel has to match.

The rows are split into K blocks by stride: block k holds rows k, k + K, k + 2K, ... (neighbours in a sequence are
correlated, so that contiguous blocks would have more variance). In block k

    S_k^T = H[columns] diag(signs_k) / sqrt(p)

with independent fair signs for all rows, and p rows of a Hadamard matrix H of order b, drawn without replacement and
shared by all blocks. Given the columns, E over the signs of S_k S_k^T is already I, so that sharing them costs no
variance. A block of m real rows uses the smallest order b >= m that has a known construction here (every multiple of 4
up to 64 but 52, see `hadamard_order`), and the first m columns of H: the missing rows count as zeros, and less padding
means less variance.

Drawing of the columns. The variance formula requires only that each pair of columns is drawn with the same
probability. For b = 2^k, c_i = a u_i has this property, with one random a other than 0, distinct fixed u_i, and the
product of the field GF(2^k): c_i + c_j = a (u_i + u_j) is uniform over all numbers but 0, and the products of two rows
of Sylvester's matrix depend on that sum alone. This takes one random word and a few shifts; a uniform subset takes b
words and a sort. u_i = i (i + 1) / 2 modulo b, a permutation, lies in no subgroup: the subset is as evenly spread as a
uniform subset, whereas u_i = i would be a subspace at p = b / 2 and pair each row with a single other row. For other
orders, which are used for a few hundred rows at most, the columns are a uniform subset.

Row j of block k has bit k * S + j of Philox's stream of signs, S being m rounded up to a multiple of 64.

On a CPU, torch's generator draws, and H is cached. For b = 2^k the CPU takes the rows a^t, a^(t + 1), ... of a
primitive element a of GF(2^k), from a random t of b - 1 on: a slice of the cached rows needs no gather, and
a^(t + i) + a^(t + j) is uniform over all numbers but 0, as above.
"""

from functools import lru_cache

import torch
from torch import Tensor

from .. import random
from ..philox.reference import SIGN_STREAM, signs_and_keys, smallest_keys

# The signs of a block begin at a multiple of this many bits of Philox's stream.
_SIGN_ALIGNMENT = 64
# Irreducible polynomials over GF(2), the bits of x^k + ... + 1 at position k: the fields' products are modulo these.
POLYNOMIALS = (
    *(0b11, 0b11, 0b111, 0b1011, 0b10011, 0b100101, 0b1000011, 0b10000011, 0x11B, 0x211, 0x409, 0x805, 0x1053),
    *(0x201B, 0x4443, 0x8003, 0x1100B, 0x20009, 0x40081, 0x80027, 0x100009, 0x200005, 0x400003),
)

# Elements of a half-precision input that are cast to float32 at a time.
_SLAB_ELEMENTS = 1 << 20
# Prime q with q % 4 == 3 gives order q + 1 (Paley I); prime q with q % 4 == 1 gives order 2 (q + 1) (Paley II).
_PALEY = {12: 11, 20: 19, 28: 13, 36: 17, 44: 43, 60: 59}
# A CPU caches the matrices up to this order: 16 matrices, 0.1 MB in float32, which serve all ratios of 1/32 or more.
_MOST_REMEMBERED_ORDER = 64


def hadamard_order(rows: int) -> int:
    """Return the order of the Hadamard matrix for a block of `rows` rows, at least 1.

    1, 2, the least multiple of 4 that is at least `rows` (56 in place of 52), or, above 64, the least power of 2.
    """
    if rows <= 2:
        return rows
    if rows > 64:
        return 1 << (rows - 1).bit_length()
    order = -(-rows // 4) * 4
    return 56 if order == 52 else order


def paley_prime(order: int) -> int:
    """Return the prime of Paley's matrix in the construction of an order; 0 for a power of 2, Sylvester's matrix."""
    base = next((order >> k for k in range(order.bit_length()) if order >> k in _PALEY), 1)
    return _PALEY.get(base, 0)


def _paley(order: int, device: torch.device) -> Tensor:
    """Paley's Hadamard matrix, computed on the device: a copy from the host would make a CUDA stream wait."""
    prime = _PALEY[order]
    number = torch.arange(prime, device=device)
    # The quadratic character: 0 for 0, 1 for squares modulo the prime, -1 for other numbers. Assignment to one index
    # would copy the value from the host; assignment to a slice passes it as a kernel's argument.
    character = torch.full((prime,), -1, device=device)
    character.index_fill_(0, number.square() % prime, 1)
    character[:1] = 0
    core = torch.zeros(prime + 1, prime + 1, dtype=torch.int64, device=device)
    core[0, 1:] = 1
    core[1:, 0] = 1 if prime % 4 == 1 else -1
    core[1:, 1:] = character[(number.unsqueeze(1) - number) % prime]
    identity = torch.eye(prime + 1, dtype=torch.int64, device=device)
    if prime % 4 == 3:
        return identity + core
    # Each entry c of the symmetric core, with the identity's e, becomes [[c + e, c - e], [c - e, -c - e]].
    top = torch.stack((core + identity, core - identity), -1)
    bottom = torch.stack((core - identity, -core - identity), -1)
    return torch.stack((top, bottom), 1).reshape(order, order)


def hadamard_entries(columns: Tensor, *, order: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the first entries of chosen rows of a Hadamard matrix, which is not formed beyond order 60.

    Sylvester's matrix (2^k) times, in Kronecker's sense, one of Paley's (1933) of order 12, 20, 28, 36, 44 or 60:
    entry (i, j) is (-1)^popcount(i // q & j // q) times Paley's entry (i % q, j % q), q its order or 1.

    Args:
        columns: Row numbers of the matrix, shape (..., kept), int64.
        order: A value of `hadamard_order`.
        width: Number of entries of each row.
        dtype: Floating dtype of the result.

    Returns:
        Entries +1 and -1, shape (..., kept, width).
    """
    prime = paley_prime(order)
    base = 1 if prime == 0 else prime + 1 if prime % 4 == 3 else 2 * (prime + 1)
    place = torch.arange(width, device=columns.device)
    shared = (columns // base).unsqueeze(-1) & (place // base)
    for shift in (32, 16, 8, 4, 2, 1):
        shared = shared ^ (shared >> shift)
    entries = 1 - 2 * (shared & 1)
    if base > 1:
        entries = entries * _paley(base, columns.device)[columns % base][..., place % base]
    return entries.to(dtype)


def sign_stride(block_rows: int) -> int:
    """Return the number of bits of Philox's stream of signs for a block."""
    return -(-block_rows // _SIGN_ALIGNMENT) * _SIGN_ALIGNMENT


def columns_of_words(words: Tensor, *, order: int, kept: int) -> Tensor:
    """Return the rows of H that random words choose; see the module's docstring.

    Args:
        words: Words in [0, 2**32), one for an order that is a power of 2, else one for each row; shape (..., words).
        order: A value of `hadamard_order`.
        kept: Number of rows to choose.

    Returns:
        Distinct row numbers, shape (..., kept), int64.
    """
    if order & (order - 1):
        return smallest_keys(words, kept)
    degree = order.bit_length() - 1
    factor = 1 + ((words * (order - 1)) >> 32)  # (..., 1)
    place = torch.arange(kept, device=words.device)
    power = (place * (place + 1) // 2) % order
    product = torch.zeros_like(factor * power)
    for bit in range(degree):
        product ^= power * ((factor >> bit) & 1)
        power = power << 1
        power = power ^ ((power >> degree) * POLYNOMIALS[degree])
    return product


def _mixing(seed: Tensor, rows: int, blocks: int, kept: int, dtype: torch.dtype) -> Tensor:
    """H[columns] diag(signs) for every block, unscaled; zero where a block has no row. (..., blocks, kept, m)."""
    block_rows = -(-rows // blocks)
    order = hadamard_order(block_rows)
    # Row j * blocks + k is row j of block k; the last stride has rows for the blocks before this number alone.
    first_short = rows - (block_rows - 1) * blocks
    if not random.is_drawn_on_cpu(seed):
        stride = sign_stride(block_rows)
        words = order if order & (order - 1) else 1
        signs, keys = signs_and_keys(seed, blocks * stride, words, dtype=dtype)
        columns = columns_of_words(keys, order=order, kept=kept)
        signs = signs.unflatten(-1, (blocks, 1, stride))[..., :block_rows]
        signs[..., first_short:, :, -1] = 0
        return hadamard_entries(columns, order=order, width=block_rows, dtype=dtype).unsqueeze(-3) * signs

    def draw(generator: torch.Generator) -> Tensor:
        if order > _MOST_REMEMBERED_ORDER:
            columns = torch.randperm(order, generator=generator, device="cpu")[:kept]
            chosen = hadamard_entries(columns, order=order, width=block_rows, dtype=dtype)
        elif kept == order:
            chosen = _matrix(order, dtype)
        elif order & (order - 1):
            chosen = _matrix(order, dtype)[torch.randperm(order, generator=generator, device="cpu")[:kept]]
        else:
            # uniform up to (order - 1) / 2**32, and of bits that do not seed the generator
            first = ((generator.initial_seed() >> 32) * (order - 1)) >> 32
            chosen = _powers(order, dtype)[first : first + kept]
        chosen = chosen[:, :block_rows]
        bits = torch.empty((blocks, 1, block_rows), dtype=dtype, device="cpu").random_(0, 2, generator=generator)
        if first_short < blocks:
            # the entries of missing rows become 0
            bits[first_short:, :, -1] = 0.5
        return torch.addcmul(chosen, chosen, bits, value=-2)

    return random.for_each(seed, SIGN_STREAM, draw)


@lru_cache
def _matrix(order: int, dtype: torch.dtype) -> Tensor:
    # a cached inference tensor would be unusable in training, so this mode is left
    with torch.inference_mode(False):
        return hadamard_entries(torch.arange(order, device="cpu"), order=order, width=order, dtype=dtype)


@lru_cache
def _powers(order: int, dtype: torch.dtype) -> Tensor:
    """The rows 1, a, a^2, ... of H, twice, so that a slice may begin at any row. (2 (order - 1), order)."""
    degree, number, numbers = order.bit_length() - 1, 1, []
    for _ in range(order - 1):
        numbers.append(number)
        number <<= 1
        number ^= (number >> degree) * POLYNOMIALS[degree]
    with torch.inference_mode(False):
        return _matrix(order, dtype)[torch.tensor(numbers * 2, device="cpu")]


def hadamard_sketch(
    x: Tensor, seed: Tensor, mean: Tensor | None, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Return scale * sqrt(kept) * S^T (x - 1 mean^T) for the strided-block Hadamard S.

    Args:
        x: Input, shape (rows, features), any float dtype, any strides.
        seed: 0-d int64.
        mean: Shape (features,), subtracted from every row, or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations; `1 / sqrt(kept)` gives S^T x itself.
        dtype: Dtype of the result; sums are formed in float32, or float64 for a float64 `x`.

    Returns:
        Shape (blocks * kept, features); row k * kept + c is combination c of block k.
    """
    rows, features = x.shape
    if rows == 0:
        return x.new_empty((blocks * kept, features), dtype=dtype)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    mixing = _mixing(seed, rows, blocks, kept, compute)
    # S^T times a column of ones
    ones = None if mean is None else mixing.sum(-1, keepdim=True)
    # Half precision is cast slab by slab: a float32 copy of all of x would exceed the sketch's saving.
    full = rows // blocks
    step = blocks if x.dtype == compute else max(1, _SLAB_ELEMENTS // max(1, full * features))
    ends = [(first, min(first + step, blocks)) for first in range(0, blocks, step)]
    slabs = [_mixed_slab(x, mixing, ones, mean, first, end, scale, dtype) for first, end in ends]
    return slabs[0] if len(slabs) == 1 else torch.cat(slabs)


def _mixed_slab(
    x: Tensor,
    mixing: Tensor,
    ones: Tensor | None,
    mean: Tensor | None,
    first: int,
    end: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The sketch of the blocks from `first` to before `end`."""
    rows, (blocks, _, block_rows), compute = x.shape[0], mixing.shape, mixing.dtype
    full = rows // blocks  # strides that reach every block
    is_ragged = full < block_rows
    body, wanted = (x[: full * blocks], mixing[..., :full]) if is_ragged else (x, mixing)
    body = body.view(full, blocks, x.shape[1]).transpose(0, 1)  # (blocks, full, features)
    if end - first < blocks:
        body, wanted = body[first:end], wanted[first:end]
        ones = None if ones is None else ones[first:end]
    body = body if body.dtype == compute else body.to(compute)
    # baddbmm scales the product; with beta=0 the first argument is not read
    part = torch.baddbmm(body.new_empty(()), wanted, body, beta=0, alpha=scale)
    if is_ragged:
        # The last stride has rows for the first blocks only.
        tail = x[full * blocks + first : full * blocks + end].to(compute).unsqueeze(1)
        part[: tail.shape[0]].addcmul_(mixing[first : first + tail.shape[0], :, full:], tail, value=scale)
    if mean is not None and ones is not None:
        part.addcmul_(ones, mean if mean.dtype == compute else mean.to(compute), value=-scale)
    part = part.view(part.shape[0] * part.shape[1], part.shape[2])
    return part if dtype == compute else part.to(dtype)


def hadamard_dense(seeds: Tensor, *, rows: int, blocks: int, kept: int, dtype: torch.dtype) -> Tensor:
    """Return S itself for seeds of shape (draws,): (draws, rows, blocks * kept)."""
    if rows == 0:
        return torch.zeros((seeds.numel(), 0, blocks * kept), dtype=dtype, device=seeds.device)
    mixing = _mixing(seeds, rows, blocks, kept, dtype) / kept**0.5
    draws, _, _, block_rows = mixing.shape
    dense = mixing.new_zeros((draws, block_rows, blocks, blocks, kept))
    each = torch.arange(blocks, device=mixing.device)
    dense[:, :, each, each, :] = mixing.permute(0, 3, 1, 2)  # (draws, m, blocks, kept)
    return dense.flatten(1, 2)[:, :rows].flatten(2)
