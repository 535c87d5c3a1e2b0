"""Measure backward passes that read codes: `python -m experiments.checkpointing.codes`.

Each way of running a model's step has a copy of the model: eager mode, checkpointing in each block, torch.compile,
both together, and the backend with 8 bits, with 4 bits for activations and 8 for all else, with 4 bits, with a budget
for the peak, and as `fit` chooses for a budget. Their bytes and gradients are taken first, then steps are timed by
turns. With `--noise` the gradients of real minibatches are compared: what codes add to them, as a share of how much
minibatches differ. With `--device cuda` models are larger, and their steps run under autocast to bfloat16.
"""

from __future__ import annotations

import copy
import csv
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from experiments import provenance
from experiments.command_line import Parser, exit_status
from experiments.glue import settings
from experiments.glue.tasks import TASKS, load_task
from rmm_linear import fit
from rmm_linear.compiler import plans
from rmm_linear.compiler.torch_private import dynamo_options
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.variance import measure_step_noise

from .instruments import allocator_peaks, interleaved
from .models import WORKLOADS
from .run import RESULTS, origin

ROWS_FILE, NOISE_FILE = "codes.csv", "codes_noise.csv"
BITS = {"8 bits": settings.BITS["8"], "activations 4, rest 8": settings.BITS["4/8"], "4 bits": settings.BITS["4"]}
EAGER, BLOCKS, COMPILED = "eager", "checkpointing in each block", "torch.compile"
BOTH = "both"
PLANNED: dict[str, dict[str, Any]] = {way: {"bits": bits} for way, bits in BITS.items()} | {
    "budget 60%": {"budget": "60%"},
    "budget 35%": {"budget": "35%"},
    "8 bits, budget 75%": {"bits": 8, "budget": "75%"},
}
FITTED = {"fit 60%": "60%", "fit 40%": "40%"}
WAYS = (EAGER, BLOCKS, COMPILED, BOTH, *PLANNED, *FITTED)
_WIDTH, _HEADS, _WORDS = 768, 12, 1000
_DRAWS = 8
_CPU = torch.device("cpu")


class Case(NamedTuple):
    """A model.

    Attributes:
        make: Makes it, with so many layers.
        layers: Layers.
        batch: Sequences of a batch.
        length: Their length.
    """

    make: Callable[[int, int], nn.Module]
    layers: int
    batch: int = 16
    length: int = 128


def _roberta(layers: int, length: int) -> nn.Module:
    config = transformers.RobertaConfig(
        num_hidden_layers=layers,
        hidden_size=_WIDTH,
        num_attention_heads=_HEADS,
        intermediate_size=4 * _WIDTH,
        vocab_size=_WORDS,
        max_position_embeddings=length + 4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )
    return transformers.RobertaForSequenceClassification(config)


def _gpt2(layers: int, length: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=_WIDTH,
        n_head=_HEADS,
        vocab_size=_WORDS,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama(layers: int, length: int) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=_WIDTH,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        intermediate_size=2048,
        vocab_size=_WORDS,
        max_position_embeddings=length,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _vit(layers: int, length: int) -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=_WIDTH,
        num_attention_heads=_HEADS,
        intermediate_size=4 * _WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def _t5(layers: int, length: int) -> nn.Module:
    config = transformers.T5Config(
        num_layers=layers,
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        num_heads=_HEADS,
        d_ff=4 * _WIDTH,
        vocab_size=_WORDS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def _modernbert(layers: int, length: int) -> nn.Module:
    config = transformers.ModernBertConfig(
        num_hidden_layers=layers,
        hidden_size=_WIDTH,
        num_attention_heads=_HEADS,
        intermediate_size=1152,
        vocab_size=_WORDS,
        max_position_embeddings=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        problem_type="single_label_classification",
    )
    return transformers.ModernBertForSequenceClassification(config)


CASES = {
    "roberta": Case(_roberta, 12),
    "gpt2": Case(_gpt2, 4),
    "llama": Case(_llama, 4),
    "vit": Case(_vit, 4),
    "t5": Case(_t5, 2),
    "modernbert": Case(_modernbert, 4),
}
GPU_CASES = {
    "roberta": Case(_roberta, 12, 32, 512),
    "gpt2": Case(_gpt2, 12, 16, 1024),
    "llama": Case(_llama, 12, 16, 1024),
}


def rows_of(
    name: str, case: Case, rounds: int, device: torch.device = _CPU, named_ways: Sequence[str] = WAYS
) -> Iterator[dict[str, Any]]:
    """Measure ways of running a model's step.

    Args:
        name: The model's name.
        case: The model.
        rounds: How often each step is timed.
        device: Where to run; on a GPU under autocast.
        named_ways: Which ways, eager mode the first.
    """
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = case.make(case.layers, case.length).train().to(device)
    words = torch.randint(4, _WORDS, (case.batch, case.length), device=device)
    batch = {"input_ids": words, "labels": words}
    if name == "vit":
        batch = {"pixel_values": torch.randn(case.batch, 3, 224, 224, device=device), "labels": words[:, 0] % 2}
    if name in ("roberta", "modernbert"):
        lengths = torch.randint(case.length // 2, case.length + 1, (case.batch, 1), device=device)
        mask = (torch.arange(case.length, device=device) < lengths).long()
        batch |= {"attention_mask": mask, "labels": torch.randint(0, 2, (case.batch,), device=device)}
    ways: dict[str, tuple[nn.Module, Callable[[], None], dict[str, Any]]] = {}
    exact: list[Tensor] = []
    for way in named_ways:
        own = copy.deepcopy(model)
        if way in (BLOCKS, BOTH):
            own.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        run: Callable[..., Any] = own
        if way in (COMPILED, BOTH):
            run = torch.compile(own)
        elif way in PLANNED:
            run = torch.compile(own, backend="rmm_linear", options=PLANNED[way])
        elif way in FITTED:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                print(fit(own, batch, FITTED[way]), flush=True)

        def step(own: nn.Module = own, run: Callable[..., Any] = run) -> None:
            own.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = run(**batch).loss
            loss.backward()
            if on_gpu:
                torch.cuda.synchronize(device)

        began = time.perf_counter()
        try:
            step()
        except InfeasibleBudgetError as error:
            print(f"{name}, {way}: {error}", flush=True)
            continue
        row: dict[str, Any] = {"model": name, "layers": case.layers, "batch": case.batch, "length": case.length}
        row |= {"precision": "autocast to bfloat16" if on_gpu else "float32", "way": way}
        row |= {"compile_s": round(time.perf_counter() - began, 1), "saved_bytes": None}
        if way == EAGER:
            exact = [each.grad.clone() for each in own.parameters() if each.grad is not None]
            row["saved_bytes"] = _saved_bytes(own, step)
        plan = next(iter(plans(own)), None)
        if plan is not None:
            row["saved_bytes"] = plan.planned.forward_bytes
        row |= _errors(own, step, exact, _DRAWS if plan is not None and plan.coding.coded else 1)
        own.zero_grad(set_to_none=True)
        gradient_bytes = sum(each.nbytes for each in exact)
        row["peak_bytes"] = _gpu_peak(step, device) if on_gpu else allocator_peaks(step)[0]
        row["activation_peak_bytes"] = row["peak_bytes"] - gradient_bytes
        ways[way] = own, step, row
        own.zero_grad(set_to_none=True)
        print(
            f"{name}, {way}: peak {row['peak_bytes'] / 2**20:.0f} MiB, error {row['error']:.1e},"
            f" compiled in {row['compile_s']} s",
            flush=True,
        )
    gc.collect()
    times = interleaved([(way, step) for way, (_, step, _) in ways.items()], rounds)
    for way, (_, _, row) in ways.items():
        low, *_, high = statistics.quantiles(times[way], n=5, method="inclusive")
        row |= {"step_s": statistics.median(times[way]), "step_s_q20": low, "step_s_q80": high, "rounds": rounds}
        row["eager_step_s"] = statistics.median(times[EAGER])
        yield row | _origin(device)


def _gpu_peak(step: Callable[[], None], device: torch.device) -> int:
    """Bytes that CUDA's allocator has given out at the peak of a step, beyond those before."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def _origin(device: torch.device) -> dict[str, Any]:
    found = origin(WORKLOADS[0])
    gpu = provenance.hardware(device)["gpu"]
    return found | ({"hardware": gpu} if gpu else {})


def _saved_bytes(model: nn.Module, step: Callable[[], None]) -> int:
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(found.values())


def _errors(model: nn.Module, step: Callable[[], None], exact: Sequence[Tensor], draws: int) -> dict[str, float]:
    """The relative error of the gradient: of one draw, and of the mean of several."""
    size = sum(float((each.double() ** 2).sum()) for each in exact)
    total = [torch.zeros_like(each, dtype=torch.float64) for each in exact]
    one = 0.0
    for _ in range(draws):
        step()
        found = [each.grad for each in model.parameters() if each.grad is not None]
        one += sum(float(((a - b).double() ** 2).sum()) for a, b in zip(found, exact, strict=True)) / draws
        for sofar, each in zip(total, found, strict=True):
            sofar += each / draws
    mean = sum(float(((a - b) ** 2).sum()) for a, b in zip(total, exact, strict=True))
    return {"error": (one / size) ** 0.5, "mean_error": (mean / size) ** 0.5, "draws": draws}


def noise_rows(model_name: str, data: str, batches: int, size: int) -> Iterator[dict[str, Any]]:
    """Compare what codes add to a gradient with how much minibatches differ, on MRPC.

    Args:
        model_name: A folder or name of a pretrained model.
        data: A folder in the official GLUE layout.
        batches: How many minibatches, an even number.
        size: Sequences of a minibatch.
    """
    torch.manual_seed(0)
    task = TASKS["mrpc"]
    split = load_task(task, data)["train"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=2)
    model.config.problem_type = "single_label_classification"
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    order = torch.randperm(len(split)).tolist()
    made = []
    for number in range(batches):
        rows = split.select(order[number * size : (number + 1) * size])
        texts = [list(rows[name]) for name in task.text_keys]
        batch = tokenizer(*texts, padding="max_length", truncation=True, max_length=128, return_tensors="pt")
        made.append({**batch, "labels": torch.tensor(list(rows["label"]))})
    for way, bits in BITS.items():
        noise = measure_step_noise(torch.compile(model, backend="rmm_linear", options={"bits": bits}), made)
        row = {"way": way, "batches": batches, "batch": size, "share": noise.noise_ratio}
        yield row | {"relative_variance": noise.relative_variance} | origin(WORKLOADS[0])


def codes_table(folder: Path) -> str:
    """Return what was measured, as tables."""
    lines: list[str] = []
    for rows in _by_model(read_rows(folder / ROWS_FILE)):
        first = rows[0]
        lines += [
            f"{first['model']}, {first['layers']} layers of {_WIDTH}, batch {first['batch']} x {first['length']},",
            f"{first['precision']}: {first['hardware']}, torch {first['torch']}",
            "",
            "| way | step time | saved for the backward pass | activation peak | error of one draw (mean of n) |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            saved = (
                f"{100 * float(row['saved_bytes']) / float(first['saved_bytes']):.0f} %" if row["saved_bytes"] else ""
            )
            peak = float(row["activation_peak_bytes"]) / float(first["activation_peak_bytes"])
            error = f"{float(row['error']):.1e} ({float(row['mean_error']):.1e} of {row['draws']})"
            ratio = float(row["step_s"]) / float(row["eager_step_s"])
            lines.append(f"| {row['way']} | {ratio:.2f} | {saved} | {100 * peak:.0f} % | {error} |")
        lines.append("")
    if (folder / NOISE_FILE).exists():
        lines += ["MiniLM on MRPC: variance that codes add, as a share of the minibatches' own.", ""]
        lines += ["| way | share | relative variance |", "|---|---|---|"]
        for row in read_rows(folder / NOISE_FILE):
            lines.append(
                f"| {row['way']} | {100 * float(row['share']):.3f} % | {float(row['relative_variance']):.1e} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def _by_model(rows: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    keys = dict.fromkeys((row["model"], row["precision"]) for row in rows)
    return [[row for row in rows if (row["model"], row["precision"]) == key] for key in keys]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a file of results; no rows if there is none."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m experiments.checkpointing.codes", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=CASES, default=list(CASES), help="which models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--ways", nargs="*", choices=WAYS[1:], default=WAYS[1:], help="which ways beside eager mode")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way (default: 7)")
    parser.add_argument("--noise", metavar="MODEL", help="compare minibatches of this pretrained model's on MRPC")
    parser.add_argument("--data", default="GLUE", help="a folder in the official GLUE layout, for --noise")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(2)
    with dynamo_options():
        if options.noise is not None:
            _write(options.results / NOISE_FILE, list(noise_rows(options.noise, options.data, 12, 32)))
        for name in options.models:
            torch._dynamo.reset()
            case = (GPU_CASES if options.device == "cuda" else CASES)[name]
            rows = list(rows_of(name, case, options.rounds, torch.device(options.device), (EAGER, *options.ways)))
            old = read_rows(options.results / ROWS_FILE)
            kept = [row for row in old if (row["model"], row["precision"]) != (name, rows[0]["precision"])]
            _write(options.results / ROWS_FILE, [*kept, *rows])
    print(codes_table(options.results))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
