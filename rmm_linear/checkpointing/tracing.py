"""Trace a training step with hollow tensors, which have shapes and no contents, into the joint graph of torch.

The ops are those that eager mode runs, and no in-place writes are left. What the step takes and returns is taken apart
here; what the graph means for planners is `rmm_linear.checkpointing.capture`'s part.
"""

import contextlib
import hashlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.checkpointing.autocasting import Autocast, weights_cast_once
from rmm_linear.checkpointing.changes import Change
from rmm_linear.checkpointing.code_read import Read, noted, noted_in_backward
from rmm_linear.checkpointing.hollow import eager_peak
from rmm_linear.checkpointing.lending import NotFollowedError, lent
from rmm_linear.checkpointing.replaced_forward import own_forward
from rmm_linear.errors import CaptureError

# Changes that a message names.
_FEW = 4
# Parts of the paths of files whose lines are not the user's.
_NOT_THE_USERS = ("/torch/", "rmm_linear/checkpointing/")
_HINT = "Checkpoint the parts that can one by one"
# What to do about an error whose text, line or functions have a certain part.
_HINTS = {
    "grouped_mm": (
        "Experts in one grouped_mm are captured in bfloat16 alone: train in bfloat16, or choose another way to run them"
        ' (transformers: `model.set_experts_implementation("batched_mm")`)'
    ),
}
# What a step may return beside tensors.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Arguments:
    """How a step is called: what is a tensor in its arguments, and all else.

    Attributes:
        spec: The structure of (args, kwargs).
        constants: Leaves that are no tensors, with None in the tensors' places.
        tensors: Places of the tensors among the leaves.
    """

    spec: Any
    constants: tuple[Any, ...]
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple["Arguments", list[Tensor]]:
        """Take arguments apart.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The structure, and the tensors.

        Raises:
            CaptureError: If an argument is neither a tensor nor a plain value.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise CaptureError(
                    f"an argument is a {type(leaf).__name__}, whose contents a plan can't follow from step to step:"
                    " pass tensors and plain values, in tuples, lists and dicts"
                )
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, constants, places), [leaves[place] for place in places]

    def together(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put arguments together again.

        Args:
            tensors: The tensors, in the order of `tensors`.

        Returns:
            Positional and keyword arguments.
        """
        leaves = list(self.constants)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Returned:
    """One leaf of what a step returns.

    Attributes:
        kind: "result" (computed), "input" (an input, as it is) or "constant" (no tensor).
        index: Which result or input.
        value: The constant.
    """

    kind: str
    index: int = 0
    value: Any = None


@dataclass(frozen=True)
class Traced:
    """A step as torch's joint graph.

    Attributes:
        joint: Forward pass, loss and backward pass; "desc" in the meta of its ends says what each is.
        returned: What the step returns, leaf by leaf.
        returned_spec: The structure of what it returns.
        differentiable: For each result, whether its gradient is an input of the graph.
        has_gradient: For each result, whether it requires a gradient in the plain step.
        numbers: Numbers in tensors that Python looked at; the graph returns those tensors after the results.
        blocks: The module that belongs to each sequence number of autograd.
        requires_grad: For each input, whether it is differentiated.
        hollow: The tensors among the arguments without their contents.
        fingerprint: Equal for equal graphs.
        read: What the step's Python code may read.
        changed: What it changes in Python each time it runs.
        eager_peak_bytes: See `Capture`.
    """

    joint: fx.GraphModule
    returned: tuple[Returned, ...]
    returned_spec: Any
    differentiable: tuple[bool, ...]
    has_gradient: tuple[bool, ...]
    numbers: tuple[Any, ...]
    blocks: dict[int, str]
    requires_grad: tuple[bool, ...]
    hollow: tuple[Tensor, ...]
    fingerprint: str
    read: Read
    changed: tuple[str, ...]
    eager_peak_bytes: int | None


def trace(
    model: nn.Module,
    step: Callable[..., Any] | None,
    state: Sequence[Tensor],
    arguments: Arguments,
    tensors: Sequence[Tensor],
    *,
    numbers: Sequence[Any] = (),
    backward_autocast: Autocast = (),
    with_eager_peak: bool = False,
) -> Traced:
    """Trace a step, with its forward pass under autocast as it is now.

    Args:
        model: The model.
        step: Called as `step(model, *args, **kwargs)`; the model itself if None.
        state: Parameters, buffers and other tensors of the model, each once, the first inputs of the graph.
        arguments: How the step is called.
        tensors: The tensors among its arguments, the other inputs; they may be hollow themselves.
        numbers: What Python sees where it looks into tensors, as far as it is known.
        backward_autocast: The state of autocast around the backward pass.
        with_eager_peak: Whether to run it as eager mode would, too, and tell its peak.

    Returns:
        The graph.

    Raises:
        CaptureError: If the step can't be traced; it names the line, and what can be done.
    """
    inputs = (*state, *tensors)
    function = _Step(step or _call, model, state, arguments, [tensor.is_leaf for tensor in inputs])
    function.numbers = numbers
    # without its cache: what that returns the second time no longer shares memory as the op's results do
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    hollow = tuple(
        _hollow(tensor, mode) if tensor.is_meta or isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
        for tensor in inputs
    )
    blocks = _Blocks(model)
    try:
        try:
            joint = _joint_graph(function, hollow, backward_autocast)
        except _UnknownNumberError:
            function.numbers = _numbers_of_sample(function, inputs)
            joint = _joint_graph(function, hollow, backward_autocast)
        if function.changes:
            joint = _second_run(function, hollow, backward_autocast, joint)
    except Exception as error:
        explained: CaptureError = _explained(error)
        raise explained from error
    finally:
        blocks.remove()
    return Traced(
        joint,
        function.returned,
        function.returned_spec,
        function.differentiable,
        function.has_gradient,
        tuple(function.numbers or ()),
        blocks.of_sequence_numbers(),
        tuple(tensor.requires_grad for tensor in inputs),
        hollow[len(state) :],
        _fingerprint(joint),
        function.read,
        function.changed,
        _eager_peak(function, hollow, mode) if with_eager_peak else None,
    )


def _eager_peak(function: "_Step", hollow: tuple[Tensor, ...], mode: FakeTensorMode) -> int | None:
    def run() -> list[Tensor]:
        results = function.forward(*hollow)
        return [result for result, is_one in zip(results, function.differentiable, strict=False) if is_one]

    try:
        with (
            function.backward_noted(),
            torch.enable_grad(),
            _as_eager_runs_it(),
            torch.random.fork_rng(devices=[]),
            mode,
        ):
            return eager_peak(run, hollow)
    except Exception:
        # a number for people, which no plan needs
        return None


class _Step(nn.Module):
    """The step as a function of tensors alone, which returns results alone."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        state: Sequence[Tensor],
        arguments: Arguments,
        are_leaves: Sequence[bool],
    ) -> None:
        super().__init__()
        # what Python will see where it looks into tensors; None: look, and write down
        self.numbers: Sequence[Any] | None = ()
        # whether all tensors have contents then
        self.has_contents = False
        # in a tuple: the model's parameters come in as arguments, and are not this module's own
        self._hidden = (model, state)
        self._step = step
        self._arguments = arguments
        self._are_leaves = are_leaves
        self._has_cast_cache = torch.is_autocast_cache_enabled()
        # what the last run changed in Python, and what the next one begins with
        self.changes: Sequence[Change] = ()
        self.start: Sequence[Change] = ()
        self._after: contextlib.ExitStack | None = None
        # names of what each run changes
        self.changed: tuple[str, ...] = ()
        self.read = Read()
        self.returned: tuple[Returned, ...] = ()
        self.returned_spec: Any = None
        self.differentiable: tuple[bool, ...] = ()
        self.has_gradient: tuple[bool, ...] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._after is not None:
            # torch runs the forward pass once alone
            self._after.close()
        model, state = self._hidden
        count = len(state)
        args, kwargs = self._arguments.together(tensors[count:])
        for tensor, is_leaf in zip(tensors, self._are_leaves, strict=True):
            # torch gives the trace's inputs a history, and autocast casts anew for each use what has one
            if is_leaf and type(tensor.grad_fn).__name__ == "Error":
                tensor.detach_().requires_grad_()
        with (
            _Numbers(self.numbers, self.has_contents) as self._looked_at,
            lent(model, self._step, state, tensors[:count], self.start) as loan,
            own_forward(model),
            weights_cast_once(self._has_cast_cache),
            noted(loan.watch_variables) as ran,
        ):
            value = self._step(model, *args, **kwargs)
        loan.refuse_lost()
        self.read, self.changes = ran.read(), loan.changes
        leaves, self.returned_spec = pytree.tree_flatten(value)
        results: list[Tensor] = []
        returned: list[Returned] = []
        found: dict[int, Returned] = {id(tensor): Returned("input", place) for place, tensor in enumerate(tensors)}
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        scalars = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.dim() and leaf.requires_grad]
        differentiable: list[bool] = []
        has_gradient: list[bool] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _PLAIN):
                    raise NotFollowedError(
                        f"the step returns a {type(leaf).__name__}, whose tensors a plan can't hand over: return"
                        " tensors in tuples, lists and dicts (a cache of keys and values: config.use_cache = False)"
                    )
                returned.append(Returned("constant", value=leaf))
                continue
            if id(leaf) not in found:
                found[id(leaf)] = Returned("result", len(results))
                is_loss = leaf.requires_grad and (not scalars or any(leaf is scalar for scalar in scalars))
                # two results in one memory: the second one gets memory of its own
                result = leaf.clone() if leaf.untyped_storage()._cdata in storages else leaf
                storages.add(leaf.untyped_storage()._cdata)
                differentiable.append(is_loss)
                has_gradient.append(leaf.requires_grad)
                results.append(result if is_loss else result.detach())
            returned.append(found[id(leaf)])
        self.returned = tuple(returned)
        self.differentiable, self.has_gradient = tuple(differentiable), tuple(has_gradient)
        if self._after is not None:
            self._after.enter_context(self._noted_after())
        return *results, *self._looked_at.tensors

    @contextlib.contextmanager
    def backward_noted(self) -> Iterator[None]:
        """Follow Python code that runs after the forward pass, too: custom Functions, hooks of tensors."""
        # in this thread alone: code that runs in others is not seen
        with torch.autograd.set_multithreading_enabled(False), contextlib.ExitStack() as after:
            self._after = after
            try:
                yield
            finally:
                self._after = None

    @contextlib.contextmanager
    def _noted_after(self) -> Iterator[None]:
        model, state = self._hidden
        start = [*self.start, *self.changes]
        with lent(model, self._step, state, state, start) as loan, noted_in_backward(loan.watch_variables) as ran:
            yield
        loan.refuse_lost()
        self.read, self.changes = self.read.extended(ran.read()), [*self.changes, *loan.changes]

    def find_numbers(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run, and return the numbers that Python looked at."""
        self.forward(*tensors)
        return tuple(self._looked_at.found)


class _Numbers(TorchDispatchMode):
    """Answers with numbers of the sample where Python looks into a tensor; without any, writes them down.

    How many entries of a tensor are not zero is such a number, too: `nonzero` then has a shape.
    """

    def __init__(self, numbers: Sequence[Any] | None, has_contents: bool) -> None:
        super().__init__()
        self.numbers, self._has_contents = numbers, has_contents
        self.tensors: list[Tensor] = []
        self.found: list[Any] = []
        self._drew_nothing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number_in(args[0])
        if func is torch.ops.aten.nonzero.default:
            return self._nonzero(args[0])
        if any(isinstance(value, torch.Generator) for value in (kwargs or {}).values()):
            # the graph would hold a copy of it, which nobody seeds, and a recomputation would draw other numbers
            raise NotFollowedError(
                "the step draws from a generator of its own, which a plan can't follow: draw from torch's"
                " (`torch.manual_seed`), or outside of what is planned, and pass the numbers as an argument"
            )
        if self.numbers is None and torch.Tag.nondeterministic_seeded in func.tags:
            is_hollow = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
            # a hollow tensor draws nothing: what is drawn in earnest after it is not what the step draws
            if self._drew_nothing and not is_hollow:
                raise DataDependentOutputException(func)
            self._drew_nothing |= is_hollow
        return func(*args, **(kwargs or {}))

    def _number_in(self, tensor: Tensor) -> Any:
        if self.numbers is None:
            self.found.append(torch.ops.aten._local_scalar_dense.default(tensor))
            return self.found[-1]
        # a copy: what is looked at may be an input, returned as well, or written into later
        self.tensors.append(tensor.detach().clone())
        if len(self.tensors) > len(self.numbers):
            raise _UnknownNumberError
        return self.numbers[len(self.tensors) - 1]

    def _nonzero(self, tensor: Tensor) -> Tensor:
        if self._has_contents:
            # it may follow from what is computed, and would be another shape in each step
            raise DynamicOutputShapeException(torch.ops.aten.nonzero.default)
        count = self._number_in((tensor != 0).sum())
        return torch.ops.aten.nonzero_static.default(tensor, size=count, fill_value=0)


class _UnknownNumberError(Exception):
    pass


@contextlib.contextmanager
def _as_eager_runs_it() -> Iterator[None]:
    """Trace what eager mode runs: while tracing, torch replaces some ops by Python code with other roundings."""
    # Batch norms alone are left replaced: their buffers' updates would be lost otherwise.
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    removed: list[tuple[Any, Any, Any]] = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or "batch_norm" in packet:
            continue
        op: Any = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        for key in keys:
            if op is not None and key in op.py_kernels:
                removed.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    # a seed that is drawn and left, since another layer's is shared, moves the generator as in eager mode
    draw_seed = torch.ops.rmm_linear.draw_seed.default
    draw_seed._nondeterministic_seeded = True
    try:
        yield
    finally:
        draw_seed._nondeterministic_seeded = False
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


class _Blocks:
    """Which module runs at which sequence number of autograd: forward ops and their backward ops share one."""

    def __init__(self, model: nn.Module) -> None:
        self._spans: list[tuple[int, int, str]] = []
        self._open: list[tuple[str, int]] = []
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._open.append((name, torch._C._autograd._get_sequence_nr()))

        return hook

    def _leave(self, *_: Any) -> None:
        name, first = self._open.pop()
        self._spans.append((first, torch._C._autograd._get_sequence_nr(), name))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def of_sequence_numbers(self) -> dict[int, str]:
        found: dict[int, str] = {}
        # inner modules end before the modules that hold them
        for first, last, name in reversed(self._spans):
            found.update(dict.fromkeys(range(first, last), name))
        return found


def _second_run(
    function: _Step, inputs: tuple[Tensor, ...], backward_autocast: Autocast, first: fx.GraphModule
) -> fx.GraphModule:
    """Run once more with what the first run changed in Python: only what computes the same then has a plan."""
    function.start = changes = function.changes
    second = _joint_graph(function, inputs, backward_autocast)
    if _fingerprint(first) != _fingerprint(second) or not _same_constants(first, second):
        raise NotFollowedError(
            f"the step changes {', '.join(_texts(changes))}, and computes something else when it runs again, which a"
            " plan would not follow: run it once before it is planned if only its first run differs; keep a counter in"
            " a buffer (`self.count.add_(1)`), or pass what changes as an argument"
        )
    again = {change.path for change in function.changes}
    function.changed = _texts([change for change in changes if change.path in again])
    return second


def _texts(changes: Sequence[Change]) -> tuple[str, ...]:
    texts = tuple(dict.fromkeys(map(str, changes)))
    return (*texts[:_FEW], f"{len(texts) - _FEW} more") if len(texts) > _FEW else texts


def _same_constants(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    pairs = zip(_constants(first), _constants(second), strict=True)
    return all(a is b or (isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)


def _constants(joint: fx.GraphModule) -> list[Any]:
    return [getattr(joint, str(node.target)) for node in joint.graph.nodes if node.op == "get_attr"]


def _joint_graph(function: _Step, inputs: tuple[Tensor, ...], backward_autocast: Autocast) -> fx.GraphModule:
    states = [{"device_type": kind, "dtype": dtype} for kind, dtype in backward_autocast]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_as_eager_runs_it())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast=states or "off"))
        stack.enter_context(function.backward_noted())
        return aot_export_joint_with_descriptors(stack, function, inputs).graph_module


def _fingerprint(joint: fx.GraphModule) -> str:
    found = hashlib.sha256()
    for node in joint.graph.nodes:
        leaves = pytree.tree_leaves(node.meta.get("val"))
        kinds = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
        found.update(f"{node} {node.op} {node.target} {node.args} {node.kwargs} {kinds}\n".encode())
    return found.hexdigest()


def _numbers_of_sample(function: _Step, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The numbers that Python looks at when the step runs on the sample."""
    # Most follow from token ids and masks alone. So what is floating-point stays hollow, if that will do, and the rest
    # has its contents; otherwise the step runs in earnest as far as the loss, and keeps nothing.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    partly = [_hollow(tensor, mode) if tensor.is_floating_point() else tensor.detach().clone() for tensor in inputs]
    try:
        return _looked_at(function, partly)
    except DataDependentOutputException:
        function.has_contents = True
        return _looked_at(function, [tensor.detach().clone() for tensor in inputs])


def _looked_at(function: _Step, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    devices = {tensor.device.index for tensor in inputs if tensor.is_cuda}
    try:
        function.numbers = None
        with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
            return function.find_numbers(inputs)
    finally:
        function.numbers, function.has_contents = (), False


def _hollow(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor of the same shape without contents; on the CPU for one that is on no device."""
    device = "cpu" if tensor.is_meta else tensor.device
    with mode, torch.enable_grad():
        hollow = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )
        return hollow if tensor.is_leaf else hollow.view_as(hollow)


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _explained(error: Exception) -> CaptureError:
    """Say where a capture failed, and what to do."""
    if isinstance(error, NotFollowedError):
        return CaptureError(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_USERS)]
    where = f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    kinds = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
        _UnknownNumberError,
    )
    if isinstance(error, kinds):
        return CaptureError(
            f"the step depends on the contents of a tensor{where}; a capture has none. Checkpoint the blocks without"
            " such code one by one (`checkpoint_model(block, ...)`), replace the branch by `torch.where`, or, where it"
            " is the loss that does, call the model without labels, and compute the loss after it"
        )
    told = " ".join([where, str(error), *(frame.name for frame in frames)])
    hint = next((hint for part, hint in _HINTS.items() if part in told), _HINT)
    return CaptureError(f"the step can't be captured{where}: {type(error).__name__}: {error}. {hint}")
