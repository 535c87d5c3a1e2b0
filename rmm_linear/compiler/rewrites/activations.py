"""Codes of the inputs of smooth elementwise functions: one code of u for f(u), and for gradient * f'(u).

Any chain of elementwise ops of one tensor u is such a function f, and so is the chain of the backward pass, which is
linear in the gradient that arrives. A reading u~ is uniform in an interval of one step s around u: the mean of f(u~) is
f smoothed by a box of width s, f + s^2 f'' / 24 + .... So f(u~) - s^2 f''(u~) / 24 is read, whose mean is f up to terms
of s^4. Autograd computes f''.

The steps are bounded: u is cut at +-T, and where u is above T the excess is coded apart and read along the slope of f.
So f must be linear above T, and constant below -T. With 4 bits, v is coded in place of u = v + c v^3: steps of u are
smaller near zero, where f bends, and larger far away. Where f is linear it is a cubic of v, whose reading has no bias.

Before a function is coded, all of this is checked: the mean of the readings is compared with the function on a
grid of u, for the largest step that can be.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from rmm_linear.compiler.rewrites import codes
from rmm_linear.compiler.rewrites.coded import Code, Shape
from rmm_linear.compiler.rewrites.editing import Editor
from rmm_linear.compiler.rewrites.readings import Reading, Readings, Rewrite
from rmm_linear.compiler.rewrites.step import FLOATS, UNTAGGED, Read, Step, shape_of
from rmm_linear.compiler.torch_private import decompositions
from rmm_linear.planning.graph import reached

aten = torch.ops.aten
# The part of s^2 f'' that is subtracted. 8 bits need it too: an outlier sets the step of its column, and where other
# inputs are small the bias would be much of f.
_BEND = 1 / 24
# Where u is cut: the first tail is taken with which the function is biased by less than the bound. If there is none,
# the function is read from 8 bits in place of 4, or exactly.
_TAILS = {8: (16.0, 32.0), 4: (5.5, 6.0, 7.0, 8.0, 9.0, 10.0, 15.0)}
_CUBE = {8: 0.0, 4: 0.06}
_MOST_BIASED = 1e-2
_RANGE, _POINTS, _DRAWS = 40.0, 1601, 64
# From the end of the grid to the largest float16 number, a function may differ from its reading by this part of itself.
_FAR, _FAR_ERROR = 6e4, 1e-3
# Slopes so near to 0 or 1 are taken for 0 or 1.
_LEAST = 1e-4


class Place(NamedTuple):
    """A tensor in the ops of a function: "u", "gradient", or the number of an op."""

    name: str


@dataclass(frozen=True)
class Function:
    """A chain of elementwise ops of u, and perhaps of a gradient; equal to others of the same ops.

    The last of the ops computes the result. `text` says the same, for the ops of the graph may change. Some ops are
    decomposed: autograd does not differentiate SiLU's op of the backward pass, for instance, and its second derivative
    of GELU by tanh overflows.
    """

    ops: tuple[tuple[Any, Any, Any], ...] = field(compare=False)
    text: str
    has_gradient: bool

    def __call__(self, u: Tensor, gradient: Tensor | None = None) -> Tensor:
        made: dict[str, Any] = {"u": u, "gradient": gradient}
        result = u
        for number, (target, args, kwargs) in enumerate(self.ops):
            values = [made[each.name] if isinstance(each, Place) else each for each in args]
            options = dict(kwargs)
            result = values[0] if target is None else target(*values, **options)
            if type(result.grad_fn).__name__ == "NotImplemented" or options.get("approximate") == "tanh":
                result = decompositions()[target](*values, **options)
            made[str(number)] = result
        return result


class Limits(NamedTuple):
    """How well a function is read.

    Attributes:
        bias: The most that the mean of a reading differs from the function, times 1 + u^2, for a factor that a gradient
            multiplies it by may grow with u; relative to the largest value of the function within +-1.
        slope: The slope of the function where the excess begins; 0 where it does not matter.
    """

    bias: float
    slope: float


@dataclass(eq=False)
class Region:
    """Backward ops that compute a gradient times functions of u.

    They read u and functions of it, and the gradient that arrives; other ops read `functions`, each with its node.
    """

    reads: list[Read]
    gradient: fx.Node
    functions: list[tuple[fx.Node, Function]]


@dataclass(eq=False)
class Activation(Rewrite):
    """Functions of a tensor.

    Attributes:
        regions: The parts of the backward pass that compute with them.
        outputs: Nodes that are functions of the tensor alone.
        tail: Where the tensor is cut.
    """

    regions: list[Region] = field(kw_only=True)
    outputs: list[tuple[fx.Node, Function]] = field(kw_only=True)
    tail: float = field(kw_only=True)

    def provided(self) -> dict[fx.Node, Reading]:
        return {node: functools.partial(self._read, result=node, function=function) for node, function in self.outputs}

    def are_joint(self, first: fx.Node, last: fx.Node) -> bool:
        """Tell whether two readers are of one region, which reads the code once."""
        return any({first, last} <= {read.reader for read in region.reads} for region in self.regions)

    def replace(self, reader: fx.Node, editor: Editor, readings: Readings) -> None:
        """Compute the results of a region from the code."""
        for region in self.regions:
            if reader is region.reads[0].reader:
                gradient = editor.now(region.gradient)
                for node, function in region.functions:
                    editor.replace(node, self._read(editor, node, gradient, result=node, function=function))

    def _read(
        self, editor: Editor, before: fx.Node, *gradient: fx.Node, result: fx.Node, function: Function
    ) -> fx.Node:
        where: Any = {"before": before, "block_of": result}
        how = {**self.code.how, "cube": self.code.cube, "dtype": result.meta["val"].dtype}
        slope = _limits(function, self.code.bits, self.tail).slope
        return editor.insert(_read, *self.code.sources, *gradient, function=function, slope=slope, **how, **where)


def candidates(step: Step, bits: int) -> Iterator[Activation]:
    """Find elementwise functions whose input can be coded in so many bits."""
    # a function that 4 bits would bias is read from 8
    widths = [each for each in (4, 8) if each >= bits]
    members: dict[fx.Node, list[fx.Node]] = {}
    roots: dict[fx.Node, fx.Node] = {}
    for node in step.joint.graph.nodes:
        if node in step.gradients or node.op == "output":
            continue
        roots[node] = root = _root(node, roots)
        if root is not node:
            members.setdefault(root, []).append(node)
    reads: dict[fx.Node, list[Read]] = {}
    for read in step.reads:
        reads.setdefault(roots[read.source], []).append(read)
    for root, functions in members.items():
        is_trivial = all(map(_is_alias, functions))
        if is_trivial or root not in reads or not step.is_float(root) or not step.memories(root):
            continue
        shape = Shape.of(root.meta["val"])
        if shape is not None:
            for each in widths:
                found = _activation(step, root, functions, shape, each)
                if found is not None:
                    yield found
                    break


def _activation(step: Step, u: fx.Node, members: Sequence[fx.Node], shape: Shape, bits: int) -> Activation | None:
    regions = _regions(step, u, members)
    needed = [function for region in regions for _, function in region.functions]
    if not needed:
        return None
    biases = ((tail, max(_limits(function, bits, tail).bias for function in needed)) for tail in _TAILS[bits])
    tail, bias = next(((tail, bias) for tail, bias in biases if bias <= _MOST_BIASED), (None, math.inf))
    if tail is None:
        return None
    outputs = []
    for node in members:
        function = _function(u, None, node, {u, *members})
        of_output = _limits(function, bits, tail).bias
        if step.is_float(node) and of_output <= _MOST_BIASED:
            outputs.append((node, function))
            bias = max(bias, of_output)
    serves = [read for region in regions for read in region.reads]
    code = Code(u, "activation", bits, shape, tail, _CUBE[bits])
    return Activation(code, serves, bias, regions=regions, outputs=outputs, tail=tail)


def _root(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> fx.Node:
    """The tensor that a node is an elementwise function of: of another one, or itself."""
    sources = node.all_input_nodes
    if not sources or not _is_elementwise(node):
        return node
    first = roots[sources[0]]
    is_one = all(roots[each] is first and shape_of(each) == shape_of(node) for each in sources)
    return first if is_one else node


def _is_elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    is_known = torch.Tag.pointwise in tags or node.target in UNTAGGED or node.target is aten.detach.default
    return isinstance(node.meta.get("val"), Tensor) and not is_random and is_known


def _is_alias(node: fx.Node) -> bool:
    """Whether a node has the values of its argument, but for their rounding."""
    if node.target is not aten._to_copy.default:
        return node.target is aten.detach.default
    # others round by so much that the function has steps
    dtypes = {*FLOATS, torch.float64}
    return all(each.meta["val"].dtype in dtypes for each in (node, node.all_input_nodes[0]))


def _regions(step: Step, u: fx.Node, members: Sequence[fx.Node]) -> list[Region]:
    sources = {u, *members}
    # a member's reader may itself be read by ops that read no member
    regions: dict[fx.Node, list[fx.Node]] = {}
    # for each node of a region, the gradient that arrives there
    inside: dict[fx.Node, fx.Node] = {}
    first = min((step.number[read.reader] for read in step.reads if read.source in sources), default=0)
    for node in list(step.number)[first:]:
        if node not in step.gradients or not _is_elementwise(node):
            continue
        gradients = {each for each in node.all_input_nodes if each in step.gradients}
        others = set(node.all_input_nodes) - gradients
        if not others <= sources or any(shape_of(each) != shape_of(u) for each in (node, *gradients)):
            continue
        arriving = {inside[each] for each in gradients if each in inside}
        if len(arriving) != 1 or not all({each, inside.get(each)} & arriving for each in gradients):
            if not others or len(gradients) != 1:
                continue
            arriving = gradients
        (gradient,) = arriving
        inside[node] = gradient
        regions.setdefault(gradient, []).append(node)
    found = []
    for gradient, nodes in regions.items():
        exits = [node for node in nodes if any(inside.get(user) is not gradient for user in node.users)]
        functions = [(node, _function(u, gradient, node, {*sources, *nodes})) for node in exits]
        reads = [Read(node, each) for node in nodes for each in node.all_input_nodes if each in sources]
        found.append(Region(reads, gradient, functions))
    return found


def _function(u: fx.Node, gradient: fx.Node | None, end: fx.Node, inside: set[fx.Node]) -> Function:
    """Read a function from the nodes that compute it; casts between floats are left out."""
    found = reached([end], lambda node: [each for each in node.all_input_nodes if each in inside and each is not u])
    places: dict[fx.Node | None, Any] = {u: Place("u"), gradient: Place("gradient")}
    ops = []
    for number, node in enumerate(sorted(found)):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
        ops.append((None if _is_alias(node) else node.target, tuple(args), tuple(kwargs.items())))
        places[node] = Place(str(number))
    return Function(tuple(ops), repr(ops), gradient is not None)


def _limits(function: Function, bits: int, tail: float) -> Limits:
    """Tell how well a function is read: compare the mean of readings with it, on a grid of its input."""
    try:
        return _compared(function, bits, tail)
    except (RuntimeError, TypeError, KeyError):
        # an op of other tensors, or an op that has no double precision or no derivative
        return Limits(math.inf, 0.0)


# fit() rewrites a step several times
@functools.lru_cache(maxsize=1024)
def _compared(function: Function, bits: int, tail: float) -> Limits:
    near = torch.linspace(-_RANGE, _RANGE, _POINTS, dtype=torch.float64)
    far = torch.logspace(math.log10(_RANGE), math.log10(_FAR), _POINTS, dtype=torch.float64)
    u = torch.cat([near, far, -far])
    cube = _CUBE[bits]
    step = codes.largest_step(bits, tail, cube)
    # with the variance of all draws, 1 / 12
    draws = (torch.arange(_DRAWS, dtype=torch.float64) - (_DRAWS - 1) / 2) / (_DRAWS**2 - 1) ** 0.5
    # most of the grid is cut to one of two values
    cut, place = u.clamp(-tail, tail).unique(return_inverse=True)
    within = (codes.curved(cut, cube) + step * draws[:, None]).flatten()
    ends = torch.tensor([tail, _RANGE], dtype=torch.float64)
    ones = [torch.ones_like(each) if function.has_gradient else None for each in (u, within, ends)]
    exact = function(u, ones[0])
    if ones[0] is not None and not torch.allclose(function(u, -2 * ones[0]), -2 * exact, equal_nan=True):
        return Limits(math.inf, 0.0)
    slope = function(ends, ones[2]).diff().item() / (_RANGE - tail)
    slope = next((each for each in (0.0, 1.0) if abs(slope - each) < _LEAST), slope)
    steps = torch.full_like(within, step)
    in_float32 = _unsmoothed(
        function, within.float(), steps.float(), None if ones[1] is None else ones[1].float(), cube
    )
    if not in_float32.isfinite().all():
        return Limits(math.inf, 0.0)
    means = _unsmoothed(function, within, steps, ones[1], cube).view(_DRAWS, -1).mean(0)
    read = means[place] + slope * (u - tail).clamp_min(0)
    error, scale = (read - exact).abs(), exact[u.abs() <= 1].abs().max()
    if (error[_POINTS:] > _FAR_ERROR * exact[_POINTS:].abs().clamp_min(scale.item())).any():
        return Limits(math.inf, 0.0)
    bias = ((error * (1 + u * u))[:_POINTS].max() / scale).item()
    return Limits(bias if math.isfinite(bias) else math.inf, slope)


def _unsmoothed(function: Function, v: Tensor, steps: Tensor, gradient: Tensor | None, cube: float) -> Tensor:
    # anomaly mode looks for NaN in contents, which fake tensors do not have; a checkpoint's hooks count what is saved
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False), hooks:
        u = codes.straight(v, cube).detach().requires_grad_()
        value = function(u, gradient)
        slope = _derivative(value, u, steps)
        bend = _derivative(slope, u, steps)
    if cube:
        rate = 1 + 3 * cube * v * v
        bend = bend * rate * rate + slope * (6 * cube * steps * v)
    return (value - _BEND * bend).detach()


def _derivative(value: Any, u: Tensor, steps: Tensor) -> Any:
    """Return the derivative times steps; 0 of a constant."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return 0.0
    return torch.autograd.grad(value, u, steps, create_graph=True, materialize_grads=True)[0]


def _read(
    code: Tensor,
    steps: Tensor,
    most: Tensor,
    key: Tensor,
    *gradient: Tensor,
    function: Function,
    slope: float,
    shape: Shape,
    bits: int,
    cube: float,
    dtype: torch.dtype,
) -> Tensor:
    layout = shape.layout
    within, excess = codes.decode_with_tail(code, steps, most, key, layout, bits=bits)
    of_gradient = shape.rows_of(gradient[0]).to(torch.float32) if gradient else None
    read = _unsmoothed(function, within, layout.in_rows(steps), of_gradient, cube)
    if slope:
        excess = excess if slope == 1 else slope * excess
        read = read + (excess if of_gradient is None else excess * of_gradient)
    return shape.tensor_of(read.to(dtype))
