"""Which rows a sketch keeps, by uniform draws or by integer weights; those rows, and the norms of all."""
