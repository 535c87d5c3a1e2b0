"""Dense Gaussian and Rademacher projections, generated slab by slab."""
