"""Low-bit storage: 8, 4, 3 or 2 bits an element, rounded without bias."""
