"""The sketched matmuls of rmm_linear, one folder an op, each with a plain-torch `reference.py`.

This package imports torch (and, where a `kernel.py` exists, triton) and nothing else. The library reaches it through
one module only, `rmm_linear.backend`.
"""
