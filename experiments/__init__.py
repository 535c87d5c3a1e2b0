"""Experiments on top of the public API of `rmm_linear`; nothing in the library imports from here."""
