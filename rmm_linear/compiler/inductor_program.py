"""The program of a schedule, compiled by Inductor: a forward graph and a backward graph, fused and fast.

The schedule is written as one graph in its own order, a second computation as a second node, decomposed into Inductor's
ops, and cut where the forward pass ends: the forward graph returns the results and the tensors that the plan keeps. No
partitioner of torch sees the graph, for one may draw random numbers anew in the backward graph.

Inductor keeps the peak of a plan because the schedule is divided into windows: the bytes in memory when a window
begins, and all that its ops write, fit the budget together. Storages that Inductor is expected to fuse away do not
count; where the measured peak shows that Inductor did not, the step is compiled again with all storages counted. Inside
of a window Inductor fuses by its own rules; it fuses no ops across two windows, and computes a tensor that a later
window reads in the tensor's own window. Random ops are drawn by seeds, so that they can run again in the backward
graph; a seed itself is drawn once, and kept.
"""

import hashlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rmm_linear.compiler.costs import is_product
from rmm_linear.compiler.exact_program import Part, Program
from rmm_linear.compiler.fake_memory import memories_of, tensors_of
from rmm_linear.compiler.joint_graph import Capture, dense_copy
from rmm_linear.compiler.measuring import is_measurable, measured_peak_bytes
from rmm_linear.compiler.torch_private import compile_by_inductor, decompositions, fake_mode_of
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.schedule import Schedule, end_of_forward, frees_of_order

# Most compilations, with all storages counted, of a step whose measured peak is above its budget.
_MOST_TRIES = 3
# Without a budget, peaks that differ by this factor are worth another compilation, and slower steps.
_MUCH_MORE = 1.05
# Most ops of a window. Inductor fuses fewer into a kernel.
_MOST_OPS = 512
_STEP = "rmm_linear.step"
_COUNTING = (torch.ops.prims.iota.default, torch.ops.aten.select.int, torch.ops.aten.add.Tensor)


def program_within(
    capture: Capture, plan: CheckpointPlan, inputs: Sequence[Tensor], replan: Callable[[int], CheckpointPlan]
) -> tuple[CheckpointPlan, Program]:
    """Compile a plan, measure its peak, and plan again where the peak is above the budget.

    The peak is measured with the step's inputs, which are not written into. Where the user's profiler runs, or the step
    communicates, it is not measured. The first plan whose measured peak is within the budget is returned with its
    program, or, with a warning, the plan of the least peak.
    """
    budget_bytes = target = plan.budget_bytes
    if not is_measurable(capture):
        return plan, compiled_program(capture, plan.schedule, target)
    tries: list[tuple[int, CheckpointPlan, Program]] = []
    while not tries or (tries[-1][0] > budget_bytes and len(tries) <= _MOST_TRIES):
        if len(tries) > 1:
            # the same excess over a plan that takes less
            target = plan.peak_bytes - (tries[-1][0] - budget_bytes)
            try:
                plan = replan(target)
            except ValueError:
                break
        # where loops were not fused as expected, the second try is the same plan, with all storages counted
        program = compiled_program(capture, plan.schedule, target, expects_fusion=not tries)
        tries.append((measured_peak_bytes(capture, program, inputs), plan, program))
    measured, plan, program = min(tries, key=lambda each: each[0])
    if measured > budget_bytes:
        warnings.warn(
            f"the compiled step takes {measured} bytes, and its budget is {budget_bytes}: Inductor computes some ops"
            ' through tensors that the plan does not know; on a CPU executor="exact" keeps the budget to the byte',
            stacklevel=2,
        )
    return replace(plan, measured_peak_bytes=measured, budget_bytes=budget_bytes), program


def measured_plain(capture: Capture, plan: CheckpointPlan, inputs: Sequence[Tensor]) -> tuple[CheckpointPlan, Program]:
    """Compile a step without a budget, and measure its peak: Inductor is free in all that it fuses.

    Where it takes much more than the plan says, for it has fused ops that lie far apart, the step is compiled again in
    windows of the plan's own peak, which take 2 or 3 % longer. The plan that is returned has the measured peak.
    """
    program = compiled_program(capture, plan.schedule, sys.maxsize)
    if not is_measurable(capture):
        return plan, program
    measured = measured_peak_bytes(capture, program, inputs)
    if measured > _MUCH_MORE * plan.peak_bytes:
        in_windows = compiled_program(capture, plan.schedule, plan.peak_bytes)
        peak_bytes = measured_peak_bytes(capture, in_windows, inputs)
        if measured > _MUCH_MORE * peak_bytes:
            measured, program = peak_bytes, in_windows
    return replace(plan, measured_peak_bytes=measured), program


def compiled_program(
    capture: Capture, schedule: Schedule, limit_bytes: int, *, expects_fusion: bool = False
) -> Program:
    """Compile a schedule."""
    cut = end_of_forward(capture.graph, schedule.order) + 1
    are_loops = [not is_product(node) for node in capture.nodes]
    windows = windows_of(capture.graph, schedule, cut, limit_bytes, are_loops, expects_fusion=expects_fusion)
    # without ops in the backward pass, gradients that are views of the results' gradients still follow the forward pass
    windows.append(windows[-1] + 1)
    ordered = _in_order(capture, schedule, cut)
    values = [node.meta["val"] for node in ordered.graph.nodes if node.op == "placeholder"]
    decomposed = _Decomposed(ordered)
    readers = ("aten.as_strided", "aten.view.dtype", "aten.view_as_complex")  # of the memory, however a tensor lies
    decomposed.keeps_layouts = any(str(node.target).startswith(readers) for node in ordered.graph.nodes)
    # Inductor's ops keep the order; nodes keep their step, and the ops that kernels are named by
    with fake_mode_of(values), fx.traceback.preserve_node_meta():
        joint = make_fx(decomposed.run, decomposition_table=decompositions())(*values)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.meta["window"] = windows[_step(node)]
    _realize(joint)
    _count_once(joint)
    return _halves(capture, joint, cut)


class _Decomposed(fx.Interpreter):
    """Runs a graph in Inductor's ops, some of which lay their results out otherwise than torch's, such as `cat`."""

    keeps_layouts = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        made = super().call_function(torch.reshape if target is torch.ops.aten.view.default else target, args, kwargs)
        traced: Any = fx.traceback.get_current_meta().get("val") if self.keeps_layouts else None
        is_other = isinstance(traced, Tensor) and made.stride() != traced.stride()
        return _functional_copy(made, traced.stride()) if is_other else made


def uncompiled_program(capture: Capture) -> Program:
    """Run a captured step op by op, by no compiler; masks of dropout are others than the compiled step's."""
    schedule = Schedule.plain(capture.graph)
    cut = end_of_forward(capture.graph, schedule.order) + 1
    return _halves(capture, _in_order(capture, schedule, cut), cut, is_compiled=False)


def windows_of(
    graph: Graph,
    schedule: Schedule,
    cut: int,
    limit_bytes: int,
    are_loops: Sequence[bool],
    *,
    expects_fusion: bool,
) -> list[int]:
    """Divide a schedule into windows: the bytes when one begins, and all that it writes, are within a limit.

    Of all such divisions it separates the fewest bytes that are read by a loop, and were read or written by the loop
    that touched them before: Inductor fuses the two in one window. Of equal divisions it has the fewest windows. An op
    that is above the limit alone has a window of its own. With `expects_fusion`, a storage does not count if only loops
    of one window write and read the storage: Inductor is expected to fuse these loops, or to compute the storage again
    in each loop, and not to write the storage to memory.

    Return the window of each computation, counted from 1. The forward pass has `cut` computations; `are_loops` says
    which ops of the graph Inductor computes in loops.
    """
    ops = [graph.ops[index] for index in schedule.order]
    total = sum(graph.storages[index].size_bytes for op in ops for index in op.writes)
    if total + max(op.temporary_bytes for op in ops) <= limit_bytes:
        return [1] * cut + [2] * (len(ops) - cut)
    # of each computation: the bytes before it, the bytes that it writes and that count, and the bytes of its storages
    # that a loop is the next op to touch
    held_before, written, shared = [0], [], []
    last: dict[int, int] = {}
    # the writers of storages that only loops have written and read
    writers: dict[int, int] = {}
    returned = {*graph.results, *graph.outputs, *graph.gradients}
    live: set[int] = set()
    # of so many first computations: the bytes shared inside of windows, less the windows; where the last window begins
    best, starts = [(0, 0)], [0]
    for place, (op, freed) in enumerate(zip(ops, frees_of_order(graph, schedule.order), strict=True)):
        is_loop = are_loops[schedule.order[place]]
        new = set(op.writes) - live
        live |= new
        live -= set(freed)
        held_before.append(held_before[-1] + sum(graph.sizes[i] for i in new) - sum(graph.sizes[i] for i in freed))
        written.append(sum(graph.sizes[index] for index in op.writes))
        shared.append(0)
        if is_loop and expects_fusion:
            writers.update(dict.fromkeys(new - returned, place))
        for index in {*op.reads, *op.writes}:
            if not is_loop:
                writers.pop(index, None)
                continue
            if index in last and index in op.reads:
                shared[last[index]] += graph.sizes[index]
            last[index] = place
        for index in freed:
            last.pop(index, None)
            if index in writers:
                written[writers.pop(index)] -= graph.sizes[index]
        value, start = (-1, 0), place
        inside = in_window = temporary = 0
        for begin in range(place, max(cut if place >= cut else 0, place + 1 - _MOST_OPS) - 1, -1):
            in_window, temporary = in_window + written[begin], max(temporary, ops[begin].temporary_bytes)
            inside += shared[begin]
            before, count = best[begin]
            fits = begin == place or held_before[begin] + in_window + temporary <= limit_bytes
            if fits and (before + inside, count - 1) > value:
                value, start = (before + inside, count - 1), begin
        best.append(value)
        starts.append(start)
    borders, end = set(), len(ops)
    while end:
        end = starts[end]
        borders.add(end)
    return list(accumulate(int(place in borders) for place in range(len(ops))))


def _in_order(capture: Capture, schedule: Schedule, cut: int) -> fx.GraphModule:
    """Write the joint graph in the schedule's order; of each node `_step` is the place in it."""
    ops = {*capture.nodes, *(node for inlined in capture.inlined for node in inlined)}
    graph = fx.Graph(capture.module)
    present: dict[fx.Node, fx.Node] = {}
    views: dict[Any, fx.Node] = {}
    step = 0

    def copy(node: fx.Node, value: Callable[[fx.Node], fx.Node]) -> fx.Node:
        made = graph.node_copy(node, value)
        made.target = _functional_copy if node.target is dense_copy else node.target
        # torch copies it to the ops that this one is decomposed into
        made.meta["custom"] = {**node.meta.get("custom", {}), _STEP: step}
        return made

    def value(node: Any) -> Any:
        """The latest computation of a node; a view is made where it is read, in each of the passes."""
        if not isinstance(node, fx.Node) or node in present:
            return present.get(node, node)
        assert node not in ops, f"{node} is read before it is computed"
        # the backward pass keeps one result of an op that has several, and not all of them
        is_again = step >= cut and node.target is not operator.getitem
        key = (node, tuple(value(source) for source in node.all_input_nodes), is_again)
        if key not in views:
            views[key] = copy(node, value)
        return views[key]

    for node in capture.module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            present[node] = graph.node_copy(node)
    ends: list[fx.Node] = []
    for step, index in enumerate(schedule.order):
        for node in (*capture.inlined[index], capture.nodes[index]):
            sources = {source: value(source) for source in node.all_input_nodes}
            present[node] = copy(node, sources.__getitem__)
        for user in node.users:
            if user.target is operator.getitem:
                value(user)
        if step == cut - 1:
            ends = [value(end) for end in (*capture.results, *(end for _, end in capture.updates))]
    step = max(step, cut)
    ends += [value(end) for end in capture.gradients if end is not None]
    graph.output(tuple(ends))
    return fx.GraphModule(capture.module, graph)


def _step(node: fx.Node) -> int:
    return node.meta["custom"][_STEP]


def _functional_copy(gradient: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.ops.aten.copy.default(gradient.new_empty_strided(gradient.shape, stride), gradient)


def _realize(joint: fx.GraphModule) -> None:
    """Compute a tensor that a later window reads in its own window, in place of inlining it into its readers."""
    writer: dict[int, fx.Node] = {}
    last_read: dict[int, int] = {}
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        for memory in memories_of(node):
            writer.setdefault(memory, node)
        for source in node.all_input_nodes:
            for memory in memories_of(source):
                last_read[memory] = max(last_read.get(memory, 0), node.meta["window"])
    for memory, node in writer.items():
        is_read_later = last_read.get(memory, 0) > node.meta["window"]
        node.meta["inductor_realize_to_strides"] = is_read_later and isinstance(node.meta["val"], Tensor)
    for node in joint.graph.nodes:
        # kernels of GPUs assume the layout of the output that their forward op returned, and ignore its strides
        if "attention_backward" in str(node.target):
            for source in node.all_input_nodes:
                is_made = source.op == "call_function" and isinstance(source.meta["val"], Tensor)
                source.meta["inductor_realize_to_strides"] = is_made


def _count_once(joint: fx.GraphModule) -> None:
    """Write int32 numbers that count columns to memory once in a window, for C++ computes such numbers one by one."""
    first: dict[Any, fx.Node] = {}
    # two equal results of the model must not share memory
    returned = {memory for end in joint.graph.output_node().all_input_nodes for memory in memories_of(end)}
    for node in joint.graph.nodes:
        value, is_own = node.meta.get("val"), returned.isdisjoint(memories_of(node))
        if node.target not in _COUNTING or not is_own or value.dtype != torch.int32 or value.device.type != "cpu":
            continue
        known = first.setdefault((node.target, node.args, str(node.kwargs), node.meta["window"]), node)
        if known is not node:
            node.replace_all_uses_with(known)
        elif any(tensor.numel() > value.numel() for user in node.users for tensor in tensors_of(user)):
            counts = any(each.target is _COUNTING[0] for each in (node, *node.all_input_nodes))
            node.meta["inductor_realize_to_strides"] = counts


def _halves(capture: Capture, joint: fx.GraphModule, cut: int, *, is_compiled: bool = True) -> Program:
    """Cut a graph where the forward pass ends, and compile both halves unless `is_compiled` is false."""
    originals, placeholders = (graph.find_nodes(op="placeholder") for graph in (capture.module.graph, joint.graph))
    copy_of = dict(zip(originals, placeholders, strict=True))
    inputs = [copy_of[node] for node in capture.inputs]
    tangents = {place: copy_of[node] for place, node in enumerate(capture.tangents) if node is not None}
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    results, count = len(capture.results), len(capture.results) + len(capture.updates)
    early_ends, gradient_ends = output.args[0][:count], output.args[0][count:]
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    early, late = [node for node in calls if _step(node) < cut], [node for node in calls if _step(node) >= cut]
    read = dict.fromkeys([source for node in late for source in node.all_input_nodes] + list(gradient_ends))
    saved_nodes = [node for node in read if node.op == "call_function" and _step(node) < cut]
    reads = tuple(place for place, node in enumerate(inputs) if node in read)

    def half(
        inputs: Sequence[fx.Node], body: Sequence[fx.Node], ends: Sequence[fx.Node], *, is_backward: bool
    ) -> Callable[[list[Any]], Sequence[Any]]:
        module = _part(joint, inputs, body, ends)
        if not is_compiled:
            return fx.Interpreter(module).boxed_run
        windows = [(node.name, node.meta.get("window")) for node in module.graph.nodes]
        key = hashlib.sha256(repr(windows).encode()).hexdigest()
        reads_codes = is_backward and bool(capture.coding.coded)
        examples = [node.meta["val"] for node in inputs]
        return compile_by_inductor(module, examples, key, is_backward=is_backward, reads_codes=reads_codes)

    forward = half(inputs, early, [*early_ends, *saved_nodes], is_backward=False)
    taken = [*(inputs[place] for place in reads), *saved_nodes, *tangents.values()]
    backward = half(taken, late, gradient_ends, is_backward=True)
    targets = [place for place, _ in capture.updates]
    places = tuple(place for place, node in enumerate(capture.gradients) if node is not None)
    kept = {memory for node in saved_nodes for memory in memories_of(node)}
    shared = [place for place, node in enumerate(early_ends[:results]) if not kept.isdisjoint(memories_of(node))]

    def run_forward(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[Any]]:
        found = forward(list(inputs))
        updates = [(inputs[place], new) for place, new in zip(targets, found[results:count], strict=True)]
        # new tensor objects: a saved tensor must not be a returned tensor, or the two would hold each other
        return [result.detach() for result in found[:results]], updates, list(found[count:])

    def run_backward(
        inputs: Sequence[Tensor | None],
        saved: list[Any],
        tangents: Sequence[Tensor | None],
        gradients: list[Tensor | None],
    ) -> Iterator[None]:
        arguments = [*(inputs[place] for place in reads), *saved, *(tangents[place] for place in tangent_places)]
        saved.clear()
        for place, gradient in zip(places, backward(arguments), strict=True):
            gradients[place] = gradient
        yield

    parts, tangent_places = (Part(places, frozenset(reads)),), tuple(tangents)
    return Program(run_forward, run_backward, parts, tuple(shared), (), has_layouts=True)


def _part(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node], ends: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph(joint)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in body:
        sources = {source: copied(source) for source in node.all_input_nodes}
        copies[node] = graph.node_copy(node, sources.__getitem__)
    output = graph.output(tuple(copied(node) for node in ends))
    output.meta["user_visible_output_idxs"] = list(range(len(ends)))
    graph.eliminate_dead_code()
    return fx.GraphModule(joint, graph)
