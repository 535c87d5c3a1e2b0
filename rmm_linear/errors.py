"""The exceptions that users may want to catch. A caller's mistake in an argument stays a ValueError."""


class RMMError(Exception):
    """Base class of the errors that this library raises itself."""


class DoubleBackwardError(RMMError, RuntimeError):
    """Raised when the gradient of a sketched layer is itself differentiated.

    The sketch fixes an estimate of one gradient; the derivative of that estimate is not an estimate of the second
    derivative. Use ratio 1.0 without a storage, or `revert_linears`, where second derivatives are needed.
    """


class TracingError(RMMError, RuntimeError):
    """Raised when a sketched layer in training mode is exported or traced into a graph.

    Such a graph holds the forward pass alone: what is trained from it would be an exact layer, without a word. Use eval
    mode, or `revert_linears`; `torch.compile` captures the backward pass as well, and is fine.
    """


class PaddingGradientError(RMMError, RuntimeError):
    """A row that was left out as padding carries a gradient: the weight gradient would miss its part."""
