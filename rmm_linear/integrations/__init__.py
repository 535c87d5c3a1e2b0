"""Bridges to training libraries, each of which needs its library only when it is imported."""
