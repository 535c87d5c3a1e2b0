"""Dense Gaussian and Rademacher projections, generated a slab at a time."""
