"""Launching a Triton kernel with little time of the host's.

`kernel[grid](...)` binds the arguments by name, writes the options into a string, and looks the compiled kernel up by
that and by the types of all arguments: tens of microseconds on a slow host, which a layer on a small input feels. What
it returns, the compiled kernel, can be launched directly, and is, for every launch that is like an earlier one.

Two launches are alike if Triton would choose the same compiled kernel for both. It does so by the device, by the
constants, and for each argument by

- a tensor's dtype and whether its address is a multiple of 16, on AMD's GPUs also whether its storage is below 2 GiB;
- an integer's width (32 bits or 64) and whether it is 1 or a multiple of 16: the integer itself decides here, which is
  finer. Of one that the kernel names in `do_not_specialize`, only the width counts;
- whether it is None, a number with a point, a truth value.

Two settings that may change between launches are respected as Triton does: `triton.knobs.runtime.debug`, and
`triton.knobs.compilation.instrumentation_mode` (what triton's profiler sets to count inside of kernels); while
`triton.knobs.runtime.add_stages_inspection_hook` or a `pre_run_hook` of the kernel is set, nothing is launched in the
short way. Hooks around launches, by which profilers see them, are called in either way. What is lost: Triton says with
every launch if a global constant that a kernel was compiled with has changed since, and here it does so only with the
first of each kind.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .allocation import empty
from .strides import ALIGNMENT

# Distinct launches of a kernel that are remembered. A model has a few dozen; more come of sizes that keep changing.
_MOST_REMEMBERED = 4096
_NUMBERS = (int, float, bool)
# Versions in which Triton itself calls a compiled kernel as it is called here, 2 us faster than in the public way.
_IS_CALL_KNOWN = tuple(triton.__version__.split(".")[:2]) in {("3", "6"), ("3", "7"), ("3", "8"), ("3", "9")}
_BACKEND_WITHOUT_RANGES = "cuda"


@dataclass(frozen=True, eq=False)
class Constants:
    """What a kernel is compiled with. Make one for each geometry, in a function under `functools.lru_cache`.

    Two objects are never equal, whatever they hold: comparing them takes no time, but a launch with a new one goes
    through Triton.

    Attributes:
        values: Each `tl.constexpr` argument of the kernel by its name, in any order.
        num_warps: Warps of a program.
        num_stages: Stages of software pipelining, or None for what Triton takes.
    """

    values: Mapping[str, Any]
    num_warps: int
    num_stages: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def __getitem__(self, name: str) -> Any:
        """Return the value of one constant."""
        return self.values[name]


# What Triton itself calls, its two arguments that are the kernel's own, the constants in the signature's order; and the
# compiled kernel, which Triton (3.8 on) unloads from the GPU once nobody has it.
_Call = tuple[Any, Any, Any, tuple[Any, ...], CompiledKernel]
# What is remembered of a launch: the compiled kernel; what Triton calls, where that is known; and the constants.
_Remembered = tuple[CompiledKernel, _Call | None, tuple[Any, ...]]
_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])
# Shape and dtype.
Result = tuple[tuple[int, ...], torch.dtype]


class _Plan:
    """Which arguments of a kernel tell launches apart, given their Python types, and the launches that were seen."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        # held as well because the plan is found by the kernel's id, which must not be given to another
        self.kernel = kernel
        self.constant_names = _constant_names(kernel, len(arguments))
        self.remembered: dict[tuple[Any, ...], _Remembered] = {}
        # in Triton's interpreter, a kernel is no JITFunction, and nothing is compiled
        self.is_remembering = isinstance(kernel, JITFunction) and all(
            argument is None or isinstance(argument, Tensor) or type(argument) in _NUMBERS for argument in arguments
        )
        if not self.is_remembering:
            return
        tensors, numbers, sizes = [], [], []
        for place, (argument, parameter) in enumerate(zip(arguments, kernel.params, strict=False)):
            if isinstance(argument, Tensor):
                tensors.append(place)
            elif type(argument) is int and parameter.do_not_specialize:
                sizes.append(place)
            elif type(argument) in (int, bool):
                numbers.append(place)
        self.tensors = _getter(tensors)
        self.numbers = _getter(numbers)
        self.sizes = tuple(sizes)
        self.has_ranges = driver.active.get_current_target().backend != _BACKEND_WITHOUT_RANGES


_plans: dict[tuple[int, tuple[type, ...]], _Plan] = {}


class Prepared:
    """A launch of which all but the tensors is settled. Make one for each, in a function under `functools.lru_cache`.

    That function is asked with the dtypes of the tensors as well: of one `Prepared`, they are always the same, and so
    are those that are None. Called with the tensors that a kernel reads, it returns those that it writes.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[Any, ...],
        constants: Constants,
        results: tuple[Result | None, ...] = (),
    ) -> None:
        """Settle it."""
        self.kernel = kernel
        self.grid = grid
        self.numbers = numbers
        self.constants = constants
        self.results = results
        # in Triton's interpreter there is no driver to ask
        self.is_interpreted = not isinstance(kernel, JITFunction)

    def __call__(self, first: Tensor, *others: Tensor | None) -> list[Any]:
        """Launch the kernel, into new memory."""
        results = [None if result is None else empty(first, *result) for result in self.results]
        self.launch(first, *others, *results)
        return results

    def launch(self, *tensors: Tensor | None) -> None:
        """Launch the kernel, as the function `launch` does.

        Args:
            *tensors: On the current device, or None; those that are written as well.
        """
        if self.is_interpreted:
            launch(self.kernel, self.grid, (*tensors, *self.numbers), self.constants)
            return
        addresses = 0
        for tensor in tensors:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        active, runtime = driver.active, knobs.runtime
        device = active.get_current_device()
        key = self, device, runtime.debug, knobs.compilation.instrumentation_mode
        found = _prepared.get(key)
        if (
            found is None
            or addresses % ALIGNMENT
            or self.kernel.pre_run_hooks
            or runtime.add_stages_inspection_hook is not None
            or _calls(runtime.launch_enter_hook)
            or _calls(runtime.launch_exit_hook)
        ):
            found = launch(self.kernel, self.grid, (*tensors, *self.numbers), self.constants)
            if found is not None and addresses % ALIGNMENT == 0:
                if len(_prepared) >= _MOST_REMEMBERED:
                    _prepared.clear()
                _prepared[key] = found
            return
        run, function, metadata, values, _ = found
        stream = active.get_current_stream(device)
        # neither what hooks are told, nor hooks
        run(*self.grid, stream, function, metadata, None, None, None, *tensors, *self.numbers, *values)


def prepared_by(prepare: Callable[..., Prepared | None]) -> Callable[[_Launcher], _Launcher]:
    """Note by what the launch of the decorated launcher is prepared, in its attribute `prepared`.

    Args:
        prepare: A function of the launcher's arguments; None where the launcher launches nothing.
    """

    def noted(launcher: _Launcher) -> _Launcher:
        launcher.prepared = prepare  # type: ignore[attr-defined]
        return launcher

    return noted


# by the launch, the device, and two settings
_prepared: dict[tuple[Prepared, int, Any, Any], _Call] = {}


def launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Constants) -> _Call | None:
    """Launch a kernel on the current device, as `kernel[grid](*arguments, **constants)` does.

    Args:
        kernel: A `triton.jit` function whose `tl.constexpr` parameters come after all others.
        grid: Programs along each of three axes.
        arguments: All other arguments, in their order: tensors on the current device, None, and numbers.
        constants: The rest.

    Returns:
        What launches the same with other tensors, if their dtypes and alignments are all that the choice of a kernel
        depends on, and if it is remembered.

    Raises:
        ValueError: If arguments and constants are not those of the kernel.
    """
    types = tuple(map(type, arguments))
    plan = _plans.get((id(kernel), types))
    if plan is None:
        plan = _plans[id(kernel), types] = _Plan(kernel, arguments)
    runtime = knobs.runtime
    if not plan.is_remembering or kernel.pre_run_hooks or runtime.add_stages_inspection_hook is not None:
        _launch_by_triton(plan, grid, arguments, constants)
        return None
    active = driver.active
    device = active.get_current_device()
    dtypes, misaligned = [], []
    for tensor in plan.tensors(arguments):
        dtypes.append(tensor.dtype)
        misaligned.append(tensor.data_ptr() % ALIGNMENT != 0)
    key = (
        constants,
        device,
        runtime.debug,
        knobs.compilation.instrumentation_mode,
        plan.numbers(arguments),
        *dtypes,
        *misaligned,
    )
    for place in plan.sizes:
        size = arguments[place]
        if not -(2**31) <= size < 2**31:
            key = (*key, place, -(2**63) <= size < 2**63)
    if plan.has_ranges:
        key = (*key, *(tensor.untyped_storage().size() < 2**31 for tensor in plan.tensors(arguments)))
    remembered = plan.remembered.get(key)
    if remembered is not None:
        compiled, call, values = remembered
        stream = active.get_current_stream(device)
        if call is not None and not _calls(runtime.launch_enter_hook) and not _calls(runtime.launch_exit_hook):
            run, function, metadata, _, _ = call
            # neither what hooks are told, nor hooks
            run(*grid, stream, function, metadata, None, None, None, *arguments, *values)
        else:
            compiled[grid](*arguments, *values, stream=stream)
        return None if plan.has_ranges else call
    compiled = _launch_by_triton(plan, grid, arguments, constants)
    # None, or a promise of a kernel, if someone has told Triton to compile elsewhere or later
    if isinstance(compiled, CompiledKernel):
        if len(plan.remembered) >= _MOST_REMEMBERED:
            plan.remembered.clear()
        values = tuple(constants.values[name] for name in plan.constant_names)
        call = (compiled.run, compiled.function, compiled.packed_metadata, values, compiled) if _IS_CALL_KNOWN else None
        plan.remembered[key] = compiled, call, values
    return None


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks cover so many elements. `triton.cdiv` says the same, in 2 us."""
    return -(-size // block)


def _calls(hook: Any) -> Any:
    """What a hook of Triton's calls: a chain of them does nothing while it is empty."""
    return getattr(hook, "calls", hook)


def forget() -> None:
    """Forget all launches, after which the next of each kind goes through Triton.

    For whoever replaces Triton's driver, or what Triton has compiled: no training run has to.
    """
    _plans.clear()
    _prepared.clear()


def _launch_by_triton(plan: _Plan, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Constants) -> Any:
    if constants.values.keys() != set(plan.constant_names):
        raise ValueError(
            f"{plan.kernel.__name__} has the constants {sorted(plan.constant_names)} and was given"
            f" {sorted(constants.values)}"
        )
    options = {} if constants.num_stages is None else {"num_stages": constants.num_stages}
    return plan.kernel[grid](*arguments, **constants.values, num_warps=constants.num_warps, **options)


def _constant_names(kernel: Any, count: int) -> tuple[str, ...]:
    """Names of the constants in their order, of which none may be among the first `count` parameters, and all after."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    constants = [parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)]
    others = [parameter.name for parameter in parameters if parameter.name not in constants]
    if [*others, *constants] != [parameter.name for parameter in parameters]:
        raise ValueError(f"{kernel.__name__}: put its constants {constants} after all other parameters")
    if len(others) != count:
        raise ValueError(f"{kernel.__name__} was given {count} arguments; it has {len(others)}: {', '.join(others)}")
    return tuple(constants)


def _getter(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks the arguments at these places, as a tuple."""
    if not places:
        return lambda arguments: ()
    if len(places) == 1:
        place = places[0]
        return lambda arguments: (arguments[place],)
    return itemgetter(*places)
