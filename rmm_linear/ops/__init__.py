"""The seam between the library and its kernels: opaque torch operators, and nothing else imports the kernels.

Each op is defined with `torch.library` so that torch.compile, CUDA graphs and selective checkpointing see one node
with a known output shape. Sizes that follow from the number of rows are SymInt: a compiled model does not recompile
for every sequence length. All ops run with autocast off: a caller inside an autocast region (a backward pass run
within one, say) must not have its float32 sums lowered. `rmm_linear.ops.dispatch` chooses between a Triton kernel and
its plain-torch twin when an op runs. In plain eager mode, where nobody looks on, the functions here call the
implementation itself (`rmm_linear.ops.registration`).

The stored sketch of x is S^T x times the storage scale c, about sqrt(rank / rows), in x's dtype: its entries then have
the size of x's own, where S^T x itself would overflow float16. The sketch of g is S^T g / c, in float32 (float64 for
float64), where there is room; on a GPU, where the product of the two has to run on the tensor cores, in g's own dtype,
and in float16 over a power of two near 1 / ratio. The product is the same. The Hadamard sketch's entries in half
precision are +-1 combinations times powers of two, whose factor rounds nothing; the product has the rest of it.

The flag `gradient` of the sketching ops tells which of the two sketches is wanted, and not a factor: a factor that
depends on the number of rows would make a compiled model recompile for each.
"""

import rmm_linear.ops.flops  # noqa: F401  registers its formulas
from rmm_linear.ops.checks import KernelCheck, check_kernels
from rmm_linear.ops.dispatch import (
    ENVIRONMENT,
    chosen,
    is_for_kernels,
    is_on_cpu,
    kernel_status,
    odd_factor,
    product_scale,
    reads_runs,
    use_kernels,
    wants_half,
)
from rmm_linear.ops.grad_weight import as_operand, product_operand, reads_codes, sketched_grad_weight
from rmm_linear.ops.hadamard_gradient import hadamard_grad_weight
from rmm_linear.ops.projected_gradient import projected_grad_weight
from rmm_linear.ops.projections import (
    hadamard_sketch,
    hadamard_sketch_and_mean,
    hadamard_sketch_and_sums,
    random_projection,
    sampled_mean,
    trigonometric_sketch,
)
from rmm_linear.ops.quantized_sketch import hadamard_sketch_quantized, quantize_and_mean
from rmm_linear.ops.rows import gather_rows, importance_rows, sample_rows, uniform_row_sketch, uniform_rows
from rmm_linear.ops.seeds import data_parallel_rank, draw_seed
from rmm_linear.ops.sources import fingerprint
from rmm_linear.ops.storage import Codes, dequantize, quantize
from rmm_linear.ops.whole import hadamard_dense, projection_dense, trigonometric_dense
from rmm_linear_kernels.hadamard_sketch.reference import hadamard_order
from rmm_linear_kernels.low_bit.reference import BITS as STORAGE_BITS
from rmm_linear_kernels.low_bit.reference import SCALE_DTYPE, packed_width, rounding_variance
from rmm_linear_kernels.row_sampling.reference import integer_weights as row_weights
from rmm_linear_kernels.row_sampling.reference import row_norms, winners
from rmm_linear_kernels.strides import as_matrix, in_runs, number_of_rows

# S itself, and the sampling weights, are for closed forms and tests: no layer calls them.
__all__ = [
    "ENVIRONMENT",
    "SCALE_DTYPE",
    "STORAGE_BITS",
    "Codes",
    "KernelCheck",
    "as_matrix",
    "as_operand",
    "check_kernels",
    "chosen",
    "data_parallel_rank",
    "dequantize",
    "draw_seed",
    "fingerprint",
    "gather_rows",
    "hadamard_dense",
    "hadamard_grad_weight",
    "hadamard_order",
    "hadamard_sketch",
    "hadamard_sketch_and_mean",
    "hadamard_sketch_and_sums",
    "hadamard_sketch_quantized",
    "importance_rows",
    "in_runs",
    "is_for_kernels",
    "is_on_cpu",
    "kernel_status",
    "number_of_rows",
    "odd_factor",
    "packed_width",
    "product_operand",
    "product_scale",
    "projected_grad_weight",
    "projection_dense",
    "quantize",
    "quantize_and_mean",
    "random_projection",
    "reads_codes",
    "reads_runs",
    "rounding_variance",
    "row_norms",
    "row_weights",
    "sample_rows",
    "sampled_mean",
    "sketched_grad_weight",
    "trigonometric_dense",
    "trigonometric_sketch",
    "uniform_row_sketch",
    "uniform_rows",
    "use_kernels",
    "wants_half",
    "winners",
]
