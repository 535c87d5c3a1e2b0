"""What two ranks do, and what one process does to replay them: the same micro-batches, from the same random states.

All ranks are seeded alike. A replay takes the part of each rank in turn, with that rank's number and random state, and
takes the mean: what the ranks compute together must be equal to it.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import CONFIG, batch_of, llama, roberta
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rmm_linear import convert_linears
from rmm_linear import ops as operators
from rmm_linear.convert import why_not
from tests.checkpointing.planned_models import Ops, planned_runs
from tests.checkpointing.planned_models import planned as planned_for

RANKS, STEPS, MICRO_STEPS = 2, 2, 2
IMPORTED_ONCE = [
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo.convert_frame"),
    *("torch._functorch.aot_autograd", "rmm_linear.checkpointing", "rmm_linear.compiler.backend"),
    *("transformers.models.llama.modeling_llama", "transformers.models.roberta.modeling_roberta"),
]
LEARNING_RATE = 0.1

Gradients = dict[str, Tensor]


@dataclass
class Run:
    """What came out: of each step the loss and the gradients, and the seeds of each micro-step, layer by layer."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    seeds: list[list[int]] = field(default_factory=list)
    weights: Gradients = field(default_factory=dict)


@dataclass(frozen=True)
class Stack:
    """One way to train on two ranks."""

    make: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    # around all micro-steps but the last
    unsynchronised: Callable[[nn.Module], AbstractContextManager[object]]
    converted_first: bool = True
    checkpointed: bool = False
    compiled: bool = False
    # what a replay computes in
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    micro_steps: int = MICRO_STEPS


def batch_for(stack, rank, step, micro_step):
    return batch_of(stack.make, number=(step * stack.micro_steps + micro_step) * RANKS + rank)


@contextmanager
def collected_seeds(seeds):
    """Collect the seeds that the layers' graphs hold."""

    def pack(tensor):
        if tensor.dtype == torch.int64 and tensor.dim() == 0:
            seeds.append(int(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def accumulate(stack, model, rank, step, run):
    total = 0.0
    for micro_step in range(stack.micro_steps):
        is_last = micro_step == stack.micro_steps - 1
        seeds = []
        with nullcontext() if is_last else stack.unsynchronised(model):
            # a checkpoint, or a compiler, must not meet hooks that it did not expect
            watched = not stack.checkpointed and not stack.compiled
            with collected_seeds(seeds) if watched else nullcontext():
                loss = model(**batch_for(stack, rank, step, micro_step)).loss
            (loss / stack.micro_steps).backward()
        run.seeds.append(seeds)
        total += float(loss.detach())
    return total / stack.micro_steps


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def plain_name(name):
    for part in ("_orig_mod.", "module."):
        name = name.removeprefix(part)
    return name


def make_model(stack):
    model = stack.make()
    if stack.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def run_on_rank(stack, rank):
    run, model = Run(), make_model(stack)
    if stack.converted_first:
        convert_linears(model, config=CONFIG)
    wrapped = stack.wrap(model)
    if not stack.converted_first:
        convert_linears(wrapped, config=CONFIG)
    called = torch.compile(wrapped, backend="aot_eager") if stack.compiled else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(0)
    for step in range(stack.steps):
        optimizer.zero_grad()
        run.losses.append(accumulate(stack, called, rank, step, run))
        run.gradients.append(
            {plain_name(name): whole(p.grad) for name, p in wrapped.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    run.weights = {plain_name(name): whole(p) for name, p in wrapped.named_parameters()}
    return run


def replayed(stack):
    """What one process computes for each rank; the gradients of each are the mean of all."""
    runs, model = [Run() for _ in range(RANKS)], make_model(stack).to(stack.dtype)
    convert_linears(model, config=CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(0)
    states = [torch.get_rng_state()] * RANKS
    own_rank, plain = operators.data_parallel_rank, replace(stack, unsynchronised=lambda model: nullcontext())
    for step in range(stack.steps):
        found = []
        for rank, run in enumerate(runs):
            torch.set_rng_state(states[rank])
            operators.data_parallel_rank = lambda rank=rank: rank
            try:
                model.zero_grad()
                run.losses.append(accumulate(plain, model, rank, step, run))
            finally:
                operators.data_parallel_rank = own_rank
            states[rank] = torch.get_rng_state()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        mean = {name: sum(grads[name].float() for grads in found) / RANKS for name in found[0]}
        for run in runs:
            run.gradients.append(mean)
        for name, parameter in model.named_parameters():
            parameter.grad = mean[name].to(stack.dtype) if name in mean else None
        optimizer.step()
    for run in runs:
        run.weights = {name: whole(p) for name, p in model.named_parameters()}
    return runs


def _ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def _no_sync(model):
    return model.no_sync()


def _blocks(model):
    return model.model.layers if hasattr(model, "model") else model.roberta.encoder.layer


def _fsdp(model, **options):
    for block in _blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _fsdp_in_bfloat16(model):
    return _fsdp(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@contextmanager
def _no_reduction(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


STACKS = {
    "ddp": Stack(llama, _ddp, _no_sync),
    "ddp, converted after wrapping": Stack(llama, _ddp, _no_sync, converted_first=False),
    "ddp, checkpointed": Stack(llama, _ddp, _no_sync, checkpointed=True),
    "ddp, roberta": Stack(roberta, _ddp, _no_sync),
    "fsdp2": Stack(llama, _fsdp, _no_reduction),
    "fsdp2, converted after wrapping": Stack(llama, _fsdp, _no_reduction, converted_first=False),
    "fsdp2, checkpointed": Stack(llama, _fsdp, _no_reduction, checkpointed=True),
    "fsdp2, bfloat16": Stack(
        roberta, _fsdp_in_bfloat16, _no_reduction, dtype=torch.bfloat16, steps=1, micro_steps=1
    ),
}  # fmt: skip
# the order in which a compiled graph draws is its own: no replay has the same seeds
COMPILED = {
    "ddp, compiled": Stack(llama, _ddp, _no_sync, compiled=True),
    "fsdp2, compiled": Stack(llama, _fsdp, _no_reduction, compiled=True),
}


def three():
    """One layer on all ranks alike before two that are distributed over them."""
    torch.manual_seed(1)
    return nn.Sequential(OrderedDict((name, nn.Linear(16, 16)) for name in ("replicated", "first", "second")))


def told(kind, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    return ""


def tensor_parallel(rank):
    """A model of which some layers are distributed over the ranks, and the others replicated."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(three(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    x = torch.randn(160, 16, generator=torch.Generator().manual_seed(0))
    found = {name: why_not(layer, model) for name, layer in model.named_children()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["error"] = told(ValueError, convert_linears, model, config=CONFIG)
    torch.manual_seed(0)
    model(x).square().sum().backward()
    found["gradient"] = model.replicated.weight.grad.clone()
    converted = parallelize_module(
        convert_linears(three(), config=CONFIG), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    found["converted before"] = told(NotImplementedError, converted, x)
    return found


def flattened(rank):
    """FSDP of old, which makes one flat parameter of all."""
    wrapped = partial(FullyShardedDataParallel, use_orig_params=False, device_id=torch.device("cpu"))
    found = {"converted after": told(ValueError, convert_linears, wrapped(three()), config=CONFIG)}
    model = wrapped(convert_linears(three(), config=CONFIG))
    x, gradients = torch.randn(160, 16, generator=torch.Generator().manual_seed(rank)), []
    for seed in (0, 0, 1):
        model.zero_grad()
        torch.manual_seed(seed)
        model(x).square().sum().backward()
        gradients.append(next(model.parameters()).grad.clone())
    found["gradients"] = gradients
    return found


def planned(rank, budget):
    """A step by plan under DDP: its gradients, and the part of the backward pass that was over at each reduction."""
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())))
    batches = torch.randn(3, 256, 32, generator=torch.Generator().manual_seed(rank))
    if budget is not None:
        planned_for(model, batches[0], budget)
    # a bucket a layer
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    launched, ops = [], Ops()

    def reduce(state, bucket):
        launched.append(ops.count)
        return allreduce_hook(dist.group.WORLD, bucket)

    wrapped.register_comm_hook(None, reduce)
    gradients = []
    for number, batch in enumerate(batches):
        launched.clear()
        # the second batch waits for the third
        with wrapped.no_sync() if number == 1 else nullcontext():
            out = wrapped(batch).square().sum()
            ops.count = 0
            with ops:
                out.backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        if number != 1:
            wrapped.zero_grad()
    runs = 0 if budget is None else planned_runs(model)
    return {"gradients": gradients, "launched": [count / ops.count for count in launched], "runs": runs}


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def planned_shards(rank, *, by_plan):
    """Steps of blocks that are planned, and sharded after that."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)))
    batches = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(rank))
    for block in model if by_plan else ():
        planned_for(block, batches[0].clone().requires_grad_())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(model(batch).square().mean())
        losses[-1].backward()
        optimizer.step()
    runs = list(map(planned_runs, model)) if by_plan else []
    found = {"losses": torch.stack(losses).detach(), "runs": runs}
    found["weights"] = [whole(parameter) for parameter in model.parameters()]
    found["planned after"] = told(ValueError, planned_for, model, batches[0])
    return found


def work(rank, folder, names, threads):
    # as many as the process that computes the same: another number rounds otherwise
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    every = {**STACKS, **COMPILED}
    found = {name: run_on_rank(every[name], rank) for name in names}
    if names == list(STACKS):
        found["tensor parallel"], found["flattened"] = tensor_parallel(rank), flattened(rank)
        found["planned"] = {budget: planned(rank, budget) for budget in (None, "80%")}
        found["planned shards"] = {by_plan: planned_shards(rank, by_plan=by_plan) for by_plan in (False, True)}
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def launched(folder, names):
    """Run stacks on two processes; what each of them found."""
    how = "spawn"
    if "forkserver" in torch.multiprocessing.get_all_start_methods():
        # both begin as copies of one process, which has imported what takes seconds
        how = "forkserver"
        torch.multiprocessing.get_context(how).set_forkserver_preload(IMPORTED_ONCE)
    torch.multiprocessing.start_processes(
        work, (str(folder), names, torch.get_num_threads()), nprocs=RANKS, start_method=how
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
