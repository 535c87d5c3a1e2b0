"""Launch every kernel once on tiny and ragged shapes, for compute-sanitizer to look over its shoulder.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python kernels/benchmarks/memory_checks.py

Without that variable, memcheck would see torch's large allocations and nothing of the tensors within them. The results
are compared with the twins' as well: a kernel that does nothing has no bad access. A run without the sanitizer fills
Triton's cache for one with it. `--share 2/8` is for the second of eight processes that share the launches.
"""

import argparse
import itertools
import sys

import torch
from each_kernel import cases as cases_of
from each_kernel import launcher_of, measured_errors
from measuring import share_of

# Whole blocks, and sizes that no tile divides.
SHAPES = ((128, 64, 64), (192, 37, 53), (203, 37, 53), (1, 5, 3))
DTYPES = (torch.bfloat16, torch.float32)


def check(device: torch.device, share: tuple[int, int] = (1, 1)) -> tuple[int, list[str]]:
    """Launch every kernel, and print each case: its name before the launch, how it went after it.

    Args:
        device: Where.
        share: (2, 8) to launch the second of every eight.

    Returns:
        How many were launched, and a sentence for each that raised or is wrong.
    """
    launched, wrong = 0, []
    torch.manual_seed(0)
    number, count = share
    cases = ((dtype, case) for dtype in DTYPES for case in cases_of(SHAPES, device=device, dtype=dtype))
    launchable = (found for found in cases if launcher_of(found[1], device) is not None)
    for dtype, case in itertools.islice(launchable, number - 1, None, count):
        launched += 1
        name = f"{case.name}, {case.rows} x {case.features}, {dtype}"
        print(name, end=": ", flush=True)
        try:
            twin, kernel = measured_errors(case, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            assert kernel is not None
            said = "" if kernel <= 2 * twin + 1e-5 else f"error {kernel:.3g}, the twin's {twin:.3g}"
        print(said or "right", flush=True)
        if said:
            wrong.append(f"{name}: {said}")
    return launched, wrong


def main(arguments: list[str] | None = None) -> int:
    """Launch every kernel, and say what is wrong.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 1 where a kernel raised or is wrong or there is none, 2 without a GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--share", type=share_of, default=(1, 1), metavar="K/N", help="only every Nth launch, from K on"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("memory_checks.py: kernels need a GPU, and there is none", file=sys.stderr)
        return 2
    launched, wrong = check(torch.device("cuda"), options.share)
    print("", *wrong, f"{launched} launches, {len(wrong)} wrong", sep="\n")
    return 1 if wrong or not launched else 0


if __name__ == "__main__":
    sys.exit(main())
