"""The strided-block Hadamard sketch in low bits, without the sketch itself."""
