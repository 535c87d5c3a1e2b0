"""Rewrites of a joint graph: what the backward pass reads is kept in fewer bytes."""
