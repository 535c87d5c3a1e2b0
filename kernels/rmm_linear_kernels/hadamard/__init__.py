"""The strided-block Hadamard sketch."""
