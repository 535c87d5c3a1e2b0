"""The sketched matmuls of rmm_linear, one folder an op, each with a plain-torch `reference.py`.

This package imports only torch and, in each `kernel.py`, triton. In the library, `rmm_linear.backend` alone imports it.
"""
