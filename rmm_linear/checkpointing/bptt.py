"""Train a recurrent net through long sequences in little memory (Gruslys et al. 2016, arXiv 1606.03401).

`bptt_checkpoint` runs a cell over a sequence as a plain loop does, and keeps the tensors of a schedule
(`rmm_linear.planning.strategies.gruslys2016_bptt`): some states, and the saved tensors of some steps. The backward pass
runs the other steps again. One autograd.Function interprets the schedule with three verbs: a step without a graph, a
step with a graph, and the gradient of a step.

Gradients are bit-identical to those of the plain loop

    for x in inputs.unbind(0):
        output, state = cell(x, state)
        outputs.append(output)
    outputs = torch.stack(outputs)

on deterministic kernels, for inputs, initial state and parameters. Autograd adds up the gradients of a tensor in the
order of arrival: for a parameter from the last step to the first, use by use, and for a state that is also an output,
the outputs' gradients first. Float sums are not associative, so this module keeps the same order: the sum so far is the
first summand of a step's gradient. (A cell must use a parameter equally often in each step.) Gradients are not
bit-identical under autocast, whose cache of weights a plain loop shares between steps, and for parameters that are also
used outside of the cell, since two partial sums are added then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from rmm_linear.compiler.exact_program import random_state, set_random_state
from rmm_linear.errors import DoubleBackwardError, first_line
from rmm_linear.memory import SavedTensors
from rmm_linear.memory.unchanged import buffers_of, changed_buffers, unchanged
from rmm_linear.paging import Pager, pager_for
from rmm_linear.planning import bencheikh2024_double as double
from rmm_linear.planning.bptt_plan import BPTTPlan, plain_bytes, plan_for_bytes, plan_for_slots, plan_of
from rmm_linear.planning.graph import reached
from rmm_linear.planning.strategies.chain_reversal import Action, StepBytes

State = Any
Cell = Callable[[Tensor, State], Any]

_WRITES_IN_PLACE = (
    "the cell writes in place into its state or its input, whose values are needed when steps run again; make new"
    " tensors: h = 0.9 * h in place of h *= 0.9"
)


def bptt_checkpoint(
    cell: Cell,
    inputs: Tensor,
    state: State,
    *,
    memory: float | int | None = None,
    slots: int | None = None,
    strategy: Literal["hsm", "ism", "msm"] = "msm",
    host_every: int | None = None,
    local_every: int | None = None,
    page_to: str | Path | None = None,
    parameters: Sequence[Tensor] = (),
    preserve_rng_state: bool = True,
) -> tuple[Any, State]:
    """Run a cell over a sequence, and keep tensors for the backward pass within a limit of memory.

    The memory counts tensors kept between two steps: states, and tensors that autograd saves in steps. Inputs,
    parameters, the initial state, results, gradients, and temporaries of a step are not counted.

    For cuDNN's LSTM, which runs many steps in one call, treat a chunk of k steps as one step:

        chunks = inputs.unflatten(0, (-1, k))
        outputs, state = bptt_checkpoint(lstm, chunks, state, memory=0.1)
        outputs = outputs.flatten(0, 1)

    where `lstm` is an `nn.LSTM` or `nn.GRU` (not `batch_first`): `lstm(chunk, state)` returns (output, state).

    Examples:
        >>> import torch
        >>> cell, inputs = torch.nn.LSTMCell(8, 16), torch.randn(100, 4, 8)
        >>> state = torch.zeros(4, 16), torch.zeros(4, 16)
        >>> outputs, (h, c) = bptt_checkpoint(cell, inputs, state, memory=0.1)
        >>> outputs.shape, torch.equal(outputs[-1], h)
        (torch.Size([100, 4, 16]), True)
        >>> outputs.square().mean().backward()

    Warning:
        The cell runs more than once for a step, with its side effects (counters, prints). The cell must not depend on
        values that change before the backward pass ends. A module that updates a buffer (running statistics) or writes
        in place into its state or input is refused; changes of other state of a cell are not detected.

    Args:
        cell: Takes one step's input and a state, and returns the next state, or a pair (output, next state). A state
            is a tensor, or tuples, lists and dicts of tensors; outputs are likewise. If a cell returns a state alone,
            the state's first tensor is the output: h of an LSTMCell.
        inputs: One input a step, shape (time, ...), usually (time, batch, features).
        state: The initial state.
        memory: The limit: a float in (0, 1] is a share of the plain loop's memory; an int is a number of bytes. One
            extra step runs to measure the sizes of a state and a step.
        slots: Instead of `memory`, the paper's number of memory slots; see `bptt_plan.plan_for_slots`.
        strategy: Keep hidden states ("hsm"), internal states ("ism"), or both ("msm"), which is never worse than the
            others. Planning takes O(time^2 slots) once for "ism" and "msm": seconds for some thousand steps; use
            chunks, or "hsm", for more.
        host_every: With `page_to`, in place of `memory`: the number of steps from one paged state to the next.
        local_every: A divisor of `host_every`: the number of steps from one kept state to the next in the second pass.
        page_to: Destination of states that are paged out by double checkpointing (Bencheikh et al. 2024), which runs
            each step forward three times: "host" for states of an accelerator, or a folder of a disk. `memory` then
            counts the states that stay, and the fewest states are paged out for it; `strategy` has no effect.
        parameters: Tensors that the cell uses and that need gradients, except a module's own parameters. Needed for
            functions.
        preserve_rng_state: Whether a step that runs again draws the same random numbers (dropout). The generator's
            state is kept with each state: 5 kB on a CPU if the cell draws; it is part of `memory`.

    Returns:
        Outputs, stacked along a new first dimension, and the final state.

    Raises:
        ValueError: If not exactly one of `memory`, `slots` and `host_every` is given, an argument is out of range,
            `page_to` is no destination or does not fit the other arguments, the sequence is empty, the state holds no
            tensor, or the cell does not return a state, uses a tensor that needs a gradient and is not among its
            parameters, updates a buffer, or writes into its state or input.
        InfeasibleBudgetError: If the memory does not hold one step; the error names the least memory that suffices.
        DoubleBackwardError: In the backward pass of a backward pass: tensors for a second derivative are not kept.
    """
    leaves, structure = pytree.tree_flatten(state)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ValueError("the state is not a tensor or a structure of tensors alone; pass tensors")
    if inputs.dim() < 1 or not inputs.shape[0]:
        raise ValueError(f"inputs of shape {tuple(inputs.shape)} hold no step; pass (time, ...)")
    if (host_every is None) != (local_every is None) or (host_every is not None and page_to is None):
        raise ValueError("host_every, local_every and page_to belong together: pass page_to and both, or memory")
    if sum(each is not None for each in (memory, slots, host_every)) != 1:
        raise ValueError(f"memory={memory!r}, slots={slots!r}, host_every={host_every!r}: pass exactly one")
    if page_to is not None and slots is not None:
        raise ValueError(f"slots={slots!r} goes without page_to: pass memory, or host_every and local_every")
    spacing = None if host_every is None or local_every is None else (host_every, local_every)
    if spacing is not None:
        double.check(*spacing)
    is_share = isinstance(memory, float) and 0 < memory <= 1
    is_size = isinstance(memory, int) and not isinstance(memory, bool) and memory > 0
    if memory is not None and not is_share and not is_size:
        raise ValueError(f"memory={memory!r} is neither a float in (0, 1] nor a positive number of bytes")
    pager = None if page_to is None else pager_for(page_to, inputs.device)
    own = tuple(cell.parameters()) if isinstance(cell, nn.Module) else ()
    needed = tuple({id(tensor): tensor for tensor in (*own, *parameters) if tensor.requires_grad}.values())
    run = _Run(cell, structure, inputs.shape[0], preserve_rng_state)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (inputs, *leaves, *needed)):
        return run.plain(inputs, leaves)
    sizes = step_bytes(cell, inputs[0], state, parameters=parameters, preserve_rng_state=preserve_rng_state)
    run.pager = pager
    budget = int(memory * plain_bytes(run.steps, sizes)) if isinstance(memory, float) else memory or 0
    if slots is not None:
        run.plan = plan_for_slots(run.steps, slots, sizes, strategy=strategy)
    elif pager is None:
        run.plan = plan_for_bytes(run.steps, budget, sizes, strategy=strategy)
    else:
        spacing = spacing or double.spacing_for_bytes(budget, run.steps, sizes)
        run.plan = plan_of(double.actions(run.steps, *spacing), run.steps, sizes)
    returned = _BPTT.apply(run, len(leaves), inputs, *leaves, *needed)
    outputs, final = returned[: -len(leaves)], returned[-len(leaves) :]
    return pytree.tree_unflatten(list(outputs), run.output_structure), pytree.tree_unflatten(list(final), structure)


def step_bytes(
    cell: Cell, input: Tensor, state: State, *, parameters: Sequence[Tensor] = (), preserve_rng_state: bool = True
) -> StepBytes:
    """Run one step, and measure the bytes of its state and of the tensors that autograd keeps.

    `bptt_checkpoint` has the arguments. The states of the random number generators are restored.

    Raises:
        ValueError: If the cell returns no state, uses a tensor that needs a gradient and is none of its parameters,
            updates a buffer, whose contents are then restored, or writes in place into its state or input.
        RuntimeError: If the cell itself raises a RuntimeError.
    """
    leaves, structure = pytree.tree_flatten(state)
    module = cell if isinstance(cell, nn.Module) else nn.Module()
    own, buffers = list(module.parameters()), buffers_of(module)
    generator = _Generators(input.device)
    before = generator.get()
    # copies: a cell that writes in place must not change the caller's tensors
    step = _leaf(input.detach().clone(), needs_gradient=input.requires_grad)
    states = [_leaf(leaf.detach().clone(), needs_gradient=True) for leaf in leaves]
    versions = [tensor._version for tensor in (step, *states)]
    try:
        with unchanged(module), torch.enable_grad():
            with SavedTensors(module, *parameters, step, *states) as kept:
                outputs, following, _ = _split(cell(step, pytree.tree_unflatten(states, structure)), structure)
            updated = changed_buffers(module, buffers)
            drew = not all(torch.equal(one, other) for one, other in zip(before, generator.get(), strict=True))
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise ValueError(f"{_WRITES_IN_PLACE} (torch says: {first_line(error)})") from error
    finally:
        generator.set(before)
    if updated:
        raise ValueError(
            f"the cell updates {', '.join(map(repr, updated))}, among its buffers: steps run more than once, and each"
            " run would update again. Keep the value in the state, or update the buffer outside of the cell (for a"
            " batch norm: eval(), or track_running_stats=False)"
        )
    if versions != [tensor._version for tensor in (step, *states)]:
        raise ValueError(_WRITES_IN_PLACE)
    _check_leaves([*outputs, *following], {id(tensor) for tensor in (*own, *parameters, step, *states)}, parameters)
    after = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in following}
    seen = {tensor.untyped_storage().data_ptr(): tensor for tensor in following if kept.holds(tensor)}
    internal = kept.bytes - sum(after[pointer] for pointer in seen)
    generator_bytes = sum(part.nbytes for part in before) if drew and preserve_rng_state else 0
    return StepBytes(sum(after.values()) + generator_bytes, internal)


class _Generators:
    """The random number generators that a cell may draw from: the CPU's and the device's."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [torch.device("cpu"), *([] if device.type in ("cpu", "meta") else [device])]

    def get(self) -> tuple[Tensor, ...]:
        return tuple(map(random_state, self._devices))

    def set(self, states: tuple[Tensor, ...]) -> None:
        for state, device in zip(states, self._devices, strict=True):
            set_random_state(state, device)


def _leaf(tensor: Tensor, *, needs_gradient: bool) -> Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(needs_gradient and differentiable)


def _split(returned: Any, structure: pytree.TreeSpec) -> tuple[list[Tensor], list[Tensor], pytree.TreeSpec]:
    """The outputs, the next state and the structure of the outputs in a cell's return value."""
    leaves, found = pytree.tree_flatten(returned)
    if found == structure:
        return leaves[:1], leaves, pytree.tree_structure(0)
    if isinstance(returned, tuple) and len(returned) == 2 and pytree.tree_structure(returned[1]) == structure:
        outputs, output_structure = pytree.tree_flatten(returned[0])
        if all(isinstance(output, Tensor) for output in outputs):
            return outputs, pytree.tree_leaves(returned[1]), output_structure
    raise ValueError(f"the cell returned {found}, which is neither a state, {structure}, nor (output, state)")


def _check_leaves(roots: Sequence[Tensor], known: set[int], parameters: Sequence[Tensor]) -> None:
    """Refuse a graph that reaches tensors that need gradients and are not known."""
    # a parameter's own graph is not part of the step's
    ends = {None, *(tensor.grad_fn for tensor in parameters)}
    first: set[Any] = {tensor.grad_fn for tensor in roots} - ends
    for node in reached(first, lambda node: {each for each, _ in node.next_functions} - ends):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(
                f"the cell uses a tensor of shape {tuple(leaf.shape)} that needs a gradient and is not among its"
                " parameters; pass it, or a tensor computed from it, as `parameters`"
            )


def _uses_some_twice(nodes: Sequence[Any], parameters: Sequence[Tensor]) -> bool:
    """Whether a step's graph reaches one of the parameters by more than one edge."""
    ends = {(edge.node, edge.output_nr) for edge in map(get_gradient_edge, parameters)}
    outside = {None, *(node for node, _ in ends)}
    inside = reached(nodes, lambda node: {each for each, _ in node.next_functions} - outside)
    edges = [edge for node in inside for edge in node.next_functions if edge in ends]
    return len(set(edges)) < len(edges)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    # not in place: two parameters may share a gradient, as the two biases of an LSTM do
    return one + other


class _State(NamedTuple):
    """The state before a step; `generators` is empty if the generators' states are not preserved."""

    leaves: list[Tensor]
    generators: tuple[Tensor, ...]


@dataclass
class _Step:
    """A step with its graph."""

    input: Tensor
    state: list[Tensor]
    outputs: list[GradientEdge | None]
    following: list[GradientEdge | None]


class _Run:
    """One forward and backward pass over a sequence: the kept states and steps, and the three verbs."""

    plan: BPTTPlan
    # the plan's actions that are still to come
    remaining: Iterator[Action]
    input_needs: bool
    state_needs: tuple[bool, ...]
    inputs: Tensor
    parameters: tuple[Tensor, ...]
    generators: _Generators

    def __init__(self, cell: Cell, structure: pytree.TreeSpec, steps: int, preserve_rng_state: bool) -> None:
        self.cell = cell
        self.structure = structure
        # set by the first step
        self.output_structure: Any = None
        self.steps = steps
        self.preserve_rng_state = preserve_rng_state
        # pairs of an output's and a state leaf's index that are the same tensor
        self.shared: list[tuple[int, int]] = []
        self.states: dict[int, _State] = {}
        self.pins: dict[int, int] = {}
        self.stored: dict[int, _Step] = {}
        self.is_used_up = False
        self.pager: Pager | None = None
        # the pager's handles of paged states, by step
        self.paged: dict[int, Any] = {}
        # the state that was paged out last, from which the next steps run
        self.passing: tuple[int, _State] | None = None
        self.autocast: dict[str, Any] | None = None

    def plain(self, inputs: Tensor, leaves: list[Tensor]) -> tuple[Any, State]:
        collected: list[list[Tensor]] = []
        for step in inputs.unbind(0):
            outputs, leaves = self._split(self.cell(step, self._state(leaves)))
            collected.append(outputs)
        stacked = [torch.stack(parts) for parts in zip(*collected, strict=True)]
        return pytree.tree_unflatten(stacked, self.output_structure), self._state(leaves)

    def start(self, inputs: Tensor, leaves: list[Tensor], parameters: tuple[Tensor, ...]) -> None:
        self.generators = _Generators(inputs.device)
        kind = inputs.device.type
        if torch.amp.is_autocast_available(kind):
            enabled = torch.is_autocast_enabled(kind)
            self.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": enabled}
        self.bind(inputs, leaves, parameters)
        self.remaining = iter(self.plan.actions)
        self._pin(0, leaves)

    def bind(self, inputs: Tensor, leaves: list[Tensor], parameters: tuple[Tensor, ...]) -> None:
        """Set the tensors that autograd saved; between the passes this object has no reference to these tensors."""
        self.inputs, self.parameters = inputs, parameters
        if self.states:
            self.states[0] = self.states[0]._replace(leaves=leaves)

    def unbind(self) -> None:
        self.states[0] = self.states[0]._replace(leaves=[])
        del self.inputs, self.parameters

    def advance(self, target: int, outputs: Callable[[int, list[Tensor]], None] | None) -> list[Tensor]:
        """Run steps without a graph from the latest kept state, and return the state before `target`."""
        if self.passing is not None:
            (latest, (leaves, generators)), self.passing = self.passing, None
        else:
            latest = target
            while latest not in self.states and latest not in self.paged:
                latest -= 1
            if latest in self.states:
                leaves, generators = self.states[latest]
            else:
                assert self.pager is not None
                fetched, count = self.pager.take(self.paged.pop(latest)), self.structure.num_leaves
                leaves, generators = fetched[:count], tuple(fetched[count:])
                del fetched
        if outputs is None and self.preserve_rng_state:
            self.generators.set(generators)
        with torch.no_grad(), self._as_in_forward():
            for number in range(latest, target):
                found, leaves = self._split(self.cell(self.inputs[number], self._state(leaves)))
                if outputs is not None:
                    outputs(number, found)
                del found
        return leaves

    def with_graph(
        self, number: int, leaves: list[Tensor], outputs: Callable[[int, list[Tensor]], None] | None
    ) -> tuple[_Step, list[Tensor]]:
        """Run a step with a graph, and return it and the state after it."""
        state = [_leaf(leaf, needs_gradient=number > 0 or self.state_needs[place]) for place, leaf in enumerate(leaves)]
        step = _leaf(self.inputs[number], needs_gradient=self.input_needs)
        with torch.enable_grad(), self._as_in_forward():
            found, following = self._split(self.cell(step, self._state(state)))
        if outputs is not None:
            outputs(number, [output.detach() for output in found])
        # edges in place of tensors, so that outputs are not kept alive
        edges = [[get_gradient_edge(t) if t.requires_grad else None for t in part] for part in (found, following)]
        return _Step(step, state, *edges), [leaf.detach() for leaf in following]

    def forward(self, outputs: Callable[[int, list[Tensor]], None]) -> list[Tensor]:
        """Run the first pass, and return the final state."""
        for kind, stage in self.remaining:
            leaves = self.advance(stage, outputs)
            if kind == "hold":
                self._pin(stage, leaves)
                continue
            if kind == "page":
                assert self.pager is not None
                self.paged[stage] = self.pager.put([*leaves, *self.generators.get()])
                self.passing = stage, _State(leaves, ())
                continue
            if kind == "store":
                self._pin(stage, leaves)
            # the last step is always stored: its gradient is computed first
            self.stored[stage], following = self.with_graph(stage, leaves, outputs)
            if stage == self.steps - 1:
                break
            self._pin(stage + 1, following)
        return following

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run the schedule to its end, and return gradients of inputs, initial state and parameters."""
        last = self.stored[self.steps - 1]
        several = _uses_some_twice([edge.node for edge in (*last.outputs, *last.following) if edge], self.parameters)
        del last
        passing = _Gradients(self, gradients, several=several)
        now = self.generators.get() if self.preserve_rng_state else None
        try:
            self._reverse(self.steps - 1, passing)
            for kind, stage in self.remaining:
                if kind == "hold":
                    self._pin(stage, self.advance(stage, None))
                elif kind == "release" or stage == self.steps - 1:
                    # the schedule may reverse the last step here, which was reversed above
                    self._unpin(stage)
                elif kind == "store":
                    leaves = self.advance(stage, None)
                    self._pin(stage, leaves)
                    self.stored[stage], following = self.with_graph(stage, leaves, None)
                    self._pin(stage + 1, following)
                    del leaves, following
                else:
                    was_stored = stage in self.stored
                    self._reverse(stage, passing)
                    if was_stored:
                        self._unpin(stage)
                        self._unpin(stage + 1)
        finally:
            self.is_used_up = True
            if self.pager is not None:
                self.pager.close()
            if now is not None:
                self.generators.set(now)
        return (passing.of_inputs, *passing.of_state, *passing.totals)

    def _reverse(self, number: int, passing: "_Gradients") -> None:
        step = self.stored.pop(number, None)
        if step is None:
            step, following = self.with_graph(number, self.advance(number, None), None)
            del following
        passing.through(number, step)

    def _pin(self, number: int, leaves: list[Tensor]) -> None:
        if number not in self.states:
            now = self.generators.get() if self.preserve_rng_state else ()
            # a cell that draws no random numbers does not change the generators: keep one copy
            other = next((state.generators for state in self.states.values()), now)
            is_same = all(torch.equal(one, another) for one, another in zip(now, other, strict=True))
            self.states[number] = _State(leaves, other if is_same else now)
        self.pins[number] = self.pins.get(number, 0) + 1

    def _unpin(self, number: int) -> None:
        self.pins[number] -= 1
        if not self.pins[number]:
            del self.pins[number], self.states[number]

    def _state(self, leaves: list[Tensor]) -> State:
        return pytree.tree_unflatten(leaves, self.structure)

    def _split(self, returned: Any) -> tuple[list[Tensor], list[Tensor]]:
        outputs, following, structure = _split(returned, self.structure)
        if self.output_structure is None:
            self.output_structure = structure
            self.shared = [
                (place, other)
                for place, output in enumerate(outputs)
                for other, leaf in enumerate(following)
                if output is leaf
            ]
        return outputs, following

    def _as_in_forward(self) -> AbstractContextManager[Any]:
        # the cache must be off: a step without a graph would cache weights without a graph
        if self.autocast and (self.autocast["enabled"] or torch.is_autocast_enabled(self.autocast["device_type"])):
            return torch.autocast(**self.autocast, cache_enabled=False)
        return nullcontext()


class _Gradients:
    """Sums so far of the gradients of inputs, of the state before the latest reversed step, and of parameters."""

    def __init__(self, run: _Run, gradients: Sequence[Tensor | None], *, several: bool) -> None:
        count = len(gradients) - run.structure.num_leaves
        self._of_outputs, self.of_state = gradients[:count], list(gradients[count:])
        self._shared, self._parameters, self._several = run.shared, run.parameters, several
        self.totals: list[Tensor | None] = [None] * len(run.parameters)
        self.of_inputs = torch.zeros_like(run.inputs) if run.input_needs else None
        for output, place in self._shared:
            of_last = self._of_outputs[output]
            if of_last is not None:
                own = self.of_state[place]
                self.of_state[place] = of_last[-1] if own is None else own + of_last[-1]

    def through(self, number: int, step: _Step) -> None:
        """Propagate the gradients through a step."""
        shared = {output for output, _ in self._shared}
        roots: list[tuple[Any, Tensor]] = []
        for place, edge in enumerate(step.outputs):
            of_output = self._of_outputs[place]
            if place not in shared and edge is not None and of_output is not None:
                roots.append((edge, of_output[number]))
        following = zip(step.following, self.of_state, strict=True)
        roots += [(edge, gradient) for edge, gradient in following if edge is not None and gradient is not None]
        differentiable = bool(roots)
        # first summands: the outputs' gradients of the state before this step, and later steps' gradients of
        # parameters; if a step uses a parameter once, adding these afterwards gives the same bits and is faster
        seeds: dict[int, Tensor] = {}
        for output, place in self._shared if number else ():
            of_output = self._of_outputs[output]
            if of_output is not None and step.state[place].requires_grad:
                roots.append((step.state[place], of_output[number - 1]))
                seeds[place] = of_output[number - 1]
        if not differentiable:
            self.of_state = [seeds.get(place) for place in range(len(step.state))]
            return
        if self._several:
            known = zip(self._parameters, self.totals, strict=True)
            roots += [(parameter, total) for parameter, total in known if total is not None]
        wanted = [*([step.input] if step.input.requires_grad else []), *self._parameters]
        wanted += [leaf for leaf in step.state if leaf.requires_grad]
        edges, given = zip(*roots, strict=True)
        found: list[Tensor | None] = list(torch.autograd.grad(edges, wanted, given, allow_unused=True))
        if self.of_inputs is not None and step.input.requires_grad:
            of_input = found.pop(0)
            if of_input is not None:
                self.of_inputs[number] = of_input
        of_parameters = found[: len(self.totals)]
        del found[: len(self.totals)]
        self.totals = of_parameters if self._several else list(map(_sum, self.totals, of_parameters))
        self.of_state = [found.pop(0) if leaf.requires_grad else None for leaf in step.state]


class _BPTT(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, states: int, inputs: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves, parameters = list(tensors[:states]), tensors[states:]
        run.input_needs, run.state_needs = ctx.needs_input_grad[2], ctx.needs_input_grad[3 : 3 + states]
        run.start(inputs, [leaf.detach() for leaf in leaves], parameters)
        buffers: list[Tensor] = []

        def collect(number: int, outputs: list[Tensor]) -> None:
            if not buffers:
                buffers.extend(output.new_empty((run.steps, *output.shape)) for output in outputs)
            for buffer, output in zip(buffers, outputs, strict=True):
                buffer[number] = output

        final = run.forward(collect)
        run.unbind()
        # save_for_backward, so that autograd refuses a backward pass after an in-place change
        ctx.save_for_backward(inputs, *tensors)
        ctx.run, ctx.count = run, states
        ctx.set_materialize_grads(False)
        returned = (*buffers, *final)
        ctx.mark_non_differentiable(*(t for t in returned if not (t.is_floating_point() or t.is_complex())))
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "bptt_checkpoint has no second derivative: the graph of its gradients is not kept; call the cell in a"
                " plain loop if create_graph=True is needed"
            )
        run: _Run = ctx.run
        if run.is_used_up:
            raise RuntimeError(
                "trying to go backward through bptt_checkpoint a second time: the kept tensors have been freed; run"
                " the forward pass again"
            )
        inputs, *tensors = ctx.saved_tensors
        run.bind(inputs, [leaf.detach() for leaf in tensors[: ctx.count]], tuple(tensors[ctx.count :]))
        return (None, None, *run.backward(gradients))
