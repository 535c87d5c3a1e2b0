"""Row sampling: uniform, column-row sampling (CRS) and winner-take-all CRS."""
