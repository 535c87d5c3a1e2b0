"""The Hadamard sketch of few rows: all that either pass needs of it, at once."""
