"""Whether Triton's interpreter runs the kernels, on CPU tensors. As `triton.jit` does, this decides it at import."""

import os

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
