"""Bridges to training libraries; each module imports its library."""
