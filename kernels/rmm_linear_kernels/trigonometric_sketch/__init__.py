"""Subsampled randomised trigonometric transforms: DCT and real DFT."""
