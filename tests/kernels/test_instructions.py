"""What is predicted from counted instructions is what the table of resources and the formulas give."""

import pytest


@pytest.fixture
def instructions(benchmark_script):
    return benchmark_script("instructions")


def test_instructions_a_value_are_those_of_the_table(instructions) -> None:
    counts = instructions.counted()
    rows = {(row["name"], row["target"]): row for row in instructions.read_csv(instructions.RESULTS / "resources.csv")}
    for name, values, warps, lots in (
        # 4 tiles of 64 features of a block of 64 rows, one after the other; 4 blocks for a tile; 64 rows of 128 codes
        ("hadamard_sketch x bf16 order=64 kept=32", 64 * 256, 4, 4),
        ("hadamard_sketch_quantized int8 bf16 kept=32 centred", 4 * 64 * 64, 4, 1),
        ("dequantize int8 bf16", 64 * 128, 4, 1),
        ("quantize int8 bf16", 128 * 64, 4, 1),
        ("quantize_and_mean int8 bf16 order=64 share=32", 128 * 32, 4, 1),
    ):
        row = rows[name, "sm_90"]
        assert counts[name].each == int(row["instructions"]) * 32 * warps / values
        assert counts[name].at_once == 132 * int(row["resident_warps"]) / warps * values / lots


def test_the_longest_of_three_times_counts(instructions) -> None:
    gpu = instructions.GPU
    for cost, each, expected in (
        (instructions.Cost(10**9, 1), 1e-6, 10**9 / (0.9 * gpu.bandwidth)),
        (instructions.Cost(1, 10**15), 1e-6, 10**15 / (0.75 * gpu.multiplication)),
        (instructions.Cost(1, 1), 64.0, 64.0 * 3200 / 32 / (0.5 * gpu.issues)),
    ):
        kernel = instructions.Kernel("some", 3200, cost)
        counts = {"some": instructions.Counted(each, 1000.0)}
        assert instructions.seconds(kernel, counts, 0.5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("at_once", "lots"), [(1000.0, 3.2), (3200.0, 1), (1e6, 1)])
def test_what_is_read_in_turn_takes_both_times_once(instructions, at_once, lots) -> None:
    """The shorter time of each lot of programs but one is hidden by others."""
    gpu = instructions.GPU
    counts = {"some": instructions.Counted(64.0, at_once)}
    issuing = 64.0 * 3200 / 32 / (0.5 * gpu.issues)
    for moved in (1, 10**9):
        kernel = instructions.Kernel("some", 3200, instructions.Cost(moved, 1))
        copying = moved / (0.9 * gpu.bandwidth)
        expected = max(copying, issuing) + min(copying, issuing) / lots
        assert instructions.seconds(kernel, counts, 0.5, in_turn=True) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.1])
def test_low_bits_take_what_their_kernels_take_more(instructions, ratio) -> None:
    counts = instructions.counted()
    rows, features = 8192, 768
    more = [*instructions.codes_of_x(rows, features, ratio), instructions.decoded(rows, features, ratio)]
    assert len(more) == (2 if ratio > 0.1 else 3)
    # nothing but instructions counts where few of the slots are used
    rest = instructions.sketch_of_x(rows, features, ratio)
    issued = sum(counts[kernel.build].each * kernel.values for kernel in more) - counts[rest.build].each * rest.values
    expected = issued / 32 / (1e-3 * instructions.GPU.issues)
    assert instructions.low_bit_seconds(rows, features, ratio, counts, 1e-3) == pytest.approx(expected, rel=1e-9)
