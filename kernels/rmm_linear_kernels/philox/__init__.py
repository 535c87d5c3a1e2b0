"""Philox 4x32-10 random bits: the counter-based stream that every sketch draws from."""
