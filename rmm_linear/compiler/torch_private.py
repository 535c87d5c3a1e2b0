"""The private parts of torch that the backend uses, in one place: a rename in torch is mended here.

Supported are torch 2.11 and later; the import or `require` says by name which part a version lacks.
"""

import functools
import gc
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from rmm_linear.errors import CaptureError, MissingCompilerError
from rmm_linear.torch_private import is_torch_func_active

try:
    import torch._functorch._aot_autograd.descriptors
    import torch._functorch.config
    from torch._C import DispatchKey as DispatchKey
    from torch._dynamo import OptimizedModule as OptimizedModule
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors as aot_export_joint_with_descriptors
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._prims_common import suggest_memory_format as suggest_memory_format
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

    AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
    # marks of a joint graph's arguments and results
    aot = torch._functorch._aot_autograd.descriptors
    aot_options = torch._functorch.config.patch
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"planned steps need a part of torch that torch {torch.__version__} does not have ({error}): install torch"
        " 2.13, with which they were tested"
    ) from error

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]+)')
# of one model; beyond them, Dynamo runs it as written
_MOST_RECOMPILATIONS = 64
_BRANCH = re.compile(r"\nCaused by: (.+?)(?: \(_dynamo|\n|$)")
# what Dynamo says where a function raises: in its code, in an op, and for its arguments
_RAISED = ("Observed exception", "failed to run FX node", "making fake", "device mismatch", "failed to bind arguments")
_FOLDER, _STANDARD_LIBRARY = str(Path(torch.__file__).parent), str(Path(inspect.__file__).parent)


def require(owner: Any, name: str) -> Any:
    """Return a private part of torch.

    Raises:
        CaptureError: If this version of torch has none.
    """
    if not hasattr(owner, name):
        raise CaptureError(
            f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which planned steps need:"
            " install torch 2.13, with which they were tested"
        )
    return getattr(owner, name)


def frame_of(module: fx.GraphModule) -> Any:
    """Tell which frame of Python a graph of Dynamo is of, by a number that all of its versions share.

    The graph itself stands for a frame that is unknown.
    """
    return getattr(module.meta.get("dynamo_compile_id"), "frame_id", module)


def ends_at_a_break(module: fx.GraphModule) -> bool:
    """Tell whether Dynamo broke the frame of a graph at the graph's end, so that other graphs follow."""
    return getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False)


def is_transformed(tensors: Any) -> bool:
    """Tell whether torch.func, or forward-mode differentiation of one of some tensors, is active."""
    is_dual = (forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    return is_torch_func_active() or (forward_ad._current_level >= 0 and any(is_dual))


def is_transforming() -> bool:
    """Tell whether torch.func is active in this thread, or forward-mode differentiation in any thread."""
    return is_torch_func_active() or forward_ad._current_level >= 0


def is_profiled() -> bool:
    """Tell whether torch's profiler runs: there is one at a time."""
    if require(torch.autograd, "_profiler_enabled")():
        return True
    # a profile that warms up is not enabled yet, and another one would end it
    warmup = torch.profiler.ProfilerAction.WARMUP
    profiles = (each for each in gc.get_referrers(torch.profiler.profile) if type(each) is torch.profiler.profile)
    return any(getattr(each, "current_action", None) is warmup for each in profiles)


def compile_lock() -> AbstractContextManager[Any]:
    """Return the lock that Dynamo compiles under: traces of several threads would meet in torch's global state."""
    import torch._dynamo.convert_frame

    return require(torch._dynamo.convert_frame, "compile_lock")


def compiled(function: Callable[..., Any], backend: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
    """Compile a function; Dynamo counts the function's recompilations apart from recompilations of other functions.

    The function may be a module's `_call_impl`, which torch.compile by itself skips for torch's own modules. With
    `fullgraph` a graph break is an error.
    """
    from torch._dynamo.external_utils import wrap_inline

    is_known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if is_known else {}
    wrapped: Any = wrap_inline(function)
    # torch 2.11 counts the recompilations of a code object, which all wrapped functions share
    wrapped.__code__ = wrapped.__code__.replace()
    return torch.compile(wrapped, backend=backend, fullgraph=fullgraph, **options)


def dynamo_options() -> AbstractContextManager[None]:
    """Set how Dynamo traces a planned model: whole under DistributedDataParallel, with its floats and RNNs.

    Messages that a logger writes once (transformers' `warning_once`) break no graph: planned steps leave them out.
    """
    import torch._dynamo

    once = {function for name, function in vars(logging.Logger).items() if name.endswith("_once")}
    ignored = getattr(torch._dynamo.config, "ignore_logger_methods", set()) | once
    wanted: dict[str, Any] = {
        "optimize_ddp": False,
        "specialize_float": True,
        "allow_rnn": True,
        # a hook that is added later is noticed
        "skip_nnmodule_hook_guards": False,
        # a trace in another thread, which torch does not tell from one in this thread, is waited for
        "force_compile_during_fx_trace": True,
        "recompile_limit": max(_MOST_RECOMPILATIONS, torch._dynamo.config.recompile_limit),
        "ignore_logger_methods": ignored,
    }
    options = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    return torch._dynamo.config.patch(**options)


def hindrance(model: nn.Module) -> str | None:
    """Tell why torch.compile would trace nothing now, leave hooks out or break the graph; None if it traces it all."""
    import torch._dynamo
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is on, in which nothing can be trained"
    if (mode := _get_current_dispatch_mode()) is not None:
        return f"{type(mode).__name__}, a TorchDispatchMode, is active, under which torch.compile traces nothing"
    if getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default") == "force_eager":
        return 'torch.compile is switched off (by torch.compiler.set_stance("force_eager"))'
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off (by TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE)"
    if require(torch.nn.modules.module, "_has_any_global_hook")():
        return "hooks of all modules are registered (as by register_module_forward_hook), which plans do not notice"
    if any(module._backward_hooks or module._backward_pre_hooks for module in model.modules()):
        return "backward hooks of modules are registered (as by register_full_backward_hook), which break graphs"
    return None


def reasons_of_breaks() -> dict[str, int]:
    """Return why Dynamo broke graphs or skipped frames so far."""
    from torch._dynamo.utils import counters

    return {**counters["unimplemented"], **counters["graph_break"]}


def failures_of_dynamo() -> tuple[type[Exception], ...]:
    """Return the exceptions that Dynamo raises where it can't trace a function."""
    from torch._dynamo import exc
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    limit = getattr(exc, "FailOnRecompileLimitHit", exc.TorchDynamoException)
    return exc.TorchDynamoException, GuardOnDataDependentSymNode, limit


def is_recompile_limit(error: Exception) -> bool:
    """Tell whether Dynamo gave up since a function was compiled too often."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def is_own_error(error: Exception) -> bool:
    """Tell whether the function itself may raise an exception where Dynamo failed."""
    return any(text in str(error) for text in _RAISED)


def reason_of(error: Exception) -> str:
    """Tell why Dynamo could not trace a function, and at which line.

    The line is the innermost one that is neither torch's nor the standard library's.
    """
    told, _, stack = str(error.__cause__ if is_recompile_limit(error) else error).partition("from user code:")
    reason = told.strip().partition("\n\n")[0].partition("\n  Hint:")[0]
    if is_own_error(error) and error.__cause__:
        reason += f" {error.__cause__}"
    # of a branch on a size that is a tensor's content, the line alone
    branch = _BRANCH.search(told)
    where = line_of(stack) or (branch[1] if branch else "")
    return f"{reason}\n  at {where}" if where else reason


def line_of(stack: str) -> str:
    """Find the innermost line of a stack that is neither torch's nor the standard library's."""
    frames = _FRAME.findall(stack)
    users = [frame for frame in frames if not frame[0].startswith(_FOLDER)]
    users = [frame for frame in users if not frame[0].startswith(_STANDARD_LIBRARY) or "site-packages" in frame[0]]
    frames = users or frames
    return "{}:{}: {}".format(*frames[-1]) if frames else ""


def decompositions(*, of_random_ops: bool = False) -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, or only the decompositions of ops that draw random numbers."""
    from torch._inductor.decomposition import select_decomp_table

    table, random = select_decomp_table(), torch.Tag.nondeterministic_seeded
    return {op: made for op, made in table.items() if not of_random_ops or random in getattr(op, "tags", ())}


@contextmanager
def checks_are_ops() -> Iterator[None]:
    """Trace the checks of linear algebra (`solve`, `inv`, `cholesky`) as ops that stay in a graph.

    From torch 2.13 on, a trace threads tokens through them, which are neither arguments nor results of the step.
    """
    check = torch.ops.aten._linalg_check_errors.default
    effect = require(torch._library.simple_registry.singleton.find(check._name), "effect")
    kept = require(fx.node, "_side_effectful_functions") | {check}
    with mock.patch.object(effect, "_effect", None), mock.patch.object(fx.node, "_side_effectful_functions", kept):
        yield


def draw_by_seeds(joint: fx.GraphModule) -> None:
    """Let random ops of a joint graph draw by seeds, and clear it of ops without effect, as Inductor does.

    The graph was traced with the decompositions of random ops, and is changed in place.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad, replace_random
    from torch._inductor.virtualized import V

    mode = fake_mode_of([node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"])
    before = set(joint.graph.nodes)
    # Inductor's patterns are of decomposed graphs: they would take seconds to be made, and find nothing
    with V.set_fake_mode(mode), torch._guards.tracing(torch._guards.TracingContext(mode)):
        require(post_grad, "remove_noop_ops")(joint.graph)
        require(joint_graph, "constant_fold_uniform_value")(joint)
        require(replace_random, "replace_random_passes")(joint)
        _cast_once(joint.graph)
    joint.recompile()
    if before != set(joint.graph.nodes):
        renew_values(joint)


def renew_values(joint: fx.GraphModule) -> None:
    """Compute the fake values of a changed graph: of new nodes, and of views of tensors that were replaced."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    values = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
    # the casts of autocast are ops of the graph already
    with require(torch._C, "_DisableAutocast")():
        FakeTensorProp(joint, fake_mode_of(values)).propagate_dont_convert_inputs(*values)


def _cast_once(graph: fx.Graph) -> None:
    """Let all readers of a tensor share a cast: autocast casts an input of several linear layers for each of them."""
    first: dict[Any, fx.Node] = {}
    # two results that are equal casts must not share memory: the caller may write into one
    returned = {each.meta["val"].untyped_storage()._cdata for each in graph.output_node().all_input_nodes}
    for node in list(graph.nodes):
        is_cast = node.target is torch.ops.aten._to_copy.default
        if is_cast and node.meta["val"].untyped_storage()._cdata not in returned:
            known = first.setdefault((node.args, str(node.kwargs)), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.erase_node(node)


def fake_mode_of(values: Iterable[Any]) -> Any:
    """Return the mode that fake tensors belong to; one at least is among the values."""
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))


def fake_tensor(mode: Any, like: Tensor, memory: torch.UntypedStorage, offset: int) -> Tensor:
    """Make a fake tensor in a memory of the meta device, without running an op.

    It has the shape, layout, dtype and device of another one, and begins at an offset in elements.
    """
    size_bytes = memory.nbytes()
    elements = torch.empty(0, dtype=like.dtype, device="meta").set_(memory, offset, like.shape, like.stride())
    # torch makes a storage larger that is too small
    assert memory.nbytes() == size_bytes
    return FakeTensor(mode, elements, like.device)


def compile_by_inductor(
    module: fx.GraphModule, examples: Sequence[Any], key: str, *, is_backward: bool, reads_codes: bool
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a graph whose nodes carry `meta["window"]`: nothing is fused across windows.

    The graph is in Inductor's ops, and the examples are fake inputs. The key tells windows apart, for Inductor's cache
    of compiled graphs. The returned function takes its arguments in a list, which it empties.

    Raises:
        MissingCompilerError: If there is no C++ compiler.
    """
    from torch._inductor import config, exc
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = fake_mode_of(examples)
    options: dict[str, Any] = {
        "allow_buffer_reuse": False,
        # it copies the inputs of convolutions into another layout
        "layout_optimization": False,
        "reorder_for_peak_memory": False,
    }
    if reads_codes:
        # A reading of a code is computed in each kernel that needs it. By default a reading would be written once in
        # float32: four times the bytes of a code.
        options |= {"realize_opcount_threshold": 100, "realize_reads_threshold": 6}
    try:
        with (
            V.set_fake_mode(mode),
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            config.patch(options),
            # Inductor caches no graph without one
            mock.patch.object(mode, "shape_env", ShapeEnv()),
            _in_windows(key),
            _with_loaders_that_remember(),
        ):
            return compile_fx_inner(module, examples, is_backward=is_backward)
    except exc.InvalidCxxCompiler as error:
        raise MissingCompilerError(
            'executor="inductor" needs a C++ compiler, and none was found: install one (g++ or clang++; the variable'
            ' CXX names it), or use executor="exact"'
        ) from error


@contextmanager
def _in_windows(key: str) -> Iterator[None]:
    """Let Inductor fuse no ops of two windows, and end each function of C++ with its window."""
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.virtualized import V

    class Windows(CustomGraphPass):
        """Changes nothing; its identity makes the windows part of the key of Inductor's cache."""

        def __call__(self, graph: fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return f"windows 3, {key}"

    def window_of(kernel: Any) -> Any:
        origins = (node for part in kernel.get_nodes() if part.node is not None for node in part.node.get_origins())
        return max((node.meta["window"] for node in origins if "window" in node.meta), default=None)

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            is_alike = window_of(node1) == window_of(node2)
            return is_alike and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    codegen_node = require(CppScheduling, "codegen_node")

    def codegen_in_window(self: Any, node: Any) -> None:
        # all kernels of a C++ function get their buffers before it begins
        scheduled = self.kernel_group.scheduled_nodes
        if scheduled and window_of(scheduled[-1]) != window_of(node):
            scheduler = V.graph.scheduler
            # the last reader of these is the node itself
            waiting = scheduler.buffer_names_to_free & node.last_usage
            scheduler.buffer_names_to_free -= waiting
            scheduler.flush()
            scheduler.buffer_names_to_free |= waiting
        codegen_node(self, node)

    with (
        config.patch(post_grad_custom_post_pass=Windows()),
        V.set_choices_handler(Choices()),
        mock.patch.object(CppScheduling, "codegen_node", codegen_in_window),
    ):
        yield


def _with_loaders_that_remember() -> AbstractContextManager[Any]:
    """Let Inductor write an op whose result is read twice in a loop once.

    It writes two copies by itself, each with copies of the ops before: of a chain of n such ops, it writes 2^n copies.
    """
    from torch._inductor.ir import Pointwise
    from torch._inductor.utils import cache_on_self
    from torch._inductor.virtualized import V

    make_loader = require(Pointwise, "make_loader")

    @cache_on_self
    def make_loader_once(self: Any) -> Callable[[Sequence[Any]], Any]:
        load = make_loader(self)
        cached = functools.cache(lambda _, *index: load(list(index)))
        return lambda index: cached(V.get_ops_handler(), *index)

    return mock.patch.object(Pointwise, "make_loader", make_loader_once)
