"""Low bits, and the mean of x less what they take of it."""
