"""About the mean of all rows, out of a few of them."""
