"""The mean of x, less what the codes of its sketch take of it."""
