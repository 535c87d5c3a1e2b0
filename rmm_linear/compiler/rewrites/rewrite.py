"""What a rewrite says of itself: which reads of the backward pass it serves, by which codes, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from rmm_linear.compiler.rewrites.coded import Code
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Reading, Readings
from rmm_linear.compiler.rewrites.step import Read


@dataclass(eq=False)
class Rewrite:
    """One code, and the reads that an op has a formula of its own for; ops that are linear in a tensor need none.

    Attributes:
        code: The code.
        serves: The reads.
        bias: A bound of the bias of what `replace` and `provided` read, see `rmm_linear.planning.coding.CodedTensor`.
    """

    code: Code
    serves: Sequence[Read] = field(default_factory=list)
    bias: float = 0.0

    def provided(self) -> dict[fx.Node, Reading]:
        """The tensors that other ops can read from the code: the one that is coded."""
        return {self.code.node: self.code.read}

    def are_joint(self, first: fx.Node, last: fx.Node) -> bool:
        """Tell whether two ops of `serves` may read the code in one path, for there is a formula for both."""
        return False

    def encode(self, editor: Editor) -> None:
        """Write the code into the forward pass."""
        self.code.encode(editor)

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        """Let an op of `serves` read from the code; ops come in the order of the graph."""
        raise NotImplementedError
