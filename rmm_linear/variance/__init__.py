"""The noise of weight gradients: the variance of a sketch beside that of minibatches, and choices that lower it."""

from rmm_linear.variance.allocation import (
    Allocation,
    LayerProfile,
    NoiseProfile,
    Option,
    allocate_ratios,
)
from rmm_linear.variance.gradient_noise import GradientNoise, Measured, gradient_noise, measure_sketch_variance
from rmm_linear.variance.monitor import NoiseRecord, NoiseSummary, VarianceMonitor
from rmm_linear.variance.profile import layer_options, profile_noise
from rmm_linear.variance.step_noise import StepNoise, measure_step_noise

__all__ = [
    "Allocation",
    "GradientNoise",
    "LayerProfile",
    "Measured",
    "NoiseProfile",
    "NoiseRecord",
    "NoiseSummary",
    "Option",
    "StepNoise",
    "VarianceMonitor",
    "allocate_ratios",
    "gradient_noise",
    "layer_options",
    "measure_sketch_variance",
    "measure_step_noise",
    "profile_noise",
]
