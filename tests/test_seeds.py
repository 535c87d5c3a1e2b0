"""Seeds: one for every forward, governed by the generator, and different on every data-parallel rank."""

import pytest
import torch

from rmm_linear import RMMConfig, RMMLinear, ops


def test_seed_is_a_fresh_int64_scalar(device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device)
    seeds = [ops.draw_seed(x) for _ in range(1000)]
    assert all(seed.dtype == torch.int64 and seed.dim() == 0 and seed.device == x.device for seed in seeds)
    values = torch.stack(seeds).cpu()
    assert values.unique().numel() == 1000
    # Both halves of the key vary: Philox takes all of it, and 32 bits that it is mixed to on a CPU are of both.
    assert (values >> 32).unique().numel() > 990
    assert (values & 0xFFFFFFFF).unique().numel() > 990


def test_manual_seed_governs_the_draws() -> None:
    x = torch.zeros(1)
    torch.manual_seed(3)
    first = ops.draw_seed(x)
    assert not torch.equal(ops.draw_seed(x), first)
    torch.manual_seed(3)
    assert torch.equal(ops.draw_seed(x), first)


def test_ranks_that_were_seeded_alike_draw_different_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RMMLinear(8, 4, config=RMMConfig(ratio=0.3, min_rows=1))
    x, g = torch.randn(200, 8), torch.randn(200, 4)
    gradients = []
    for rank in range(4):
        monkeypatch.setattr("rmm_linear.ops.data_parallel_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        layer.zero_grad()
        layer(x).backward(g)
        gradients.append(layer.weight.grad.clone())
    for one in range(4):
        for other in range(one):
            assert not torch.equal(gradients[one], gradients[other])


def test_a_real_process_group_supplies_the_rank(tmp_path) -> None:
    assert ops.data_parallel_rank() == 0
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert ops.data_parallel_rank() == 0
    finally:
        torch.distributed.destroy_process_group()


def test_a_huge_rank_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    seeds = set()
    for rank in (0, 1, 2, 3, 1023, 2**20):
        monkeypatch.setattr("rmm_linear.ops.data_parallel_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        seeds.add(int(ops.draw_seed(x)))
    assert len(seeds) == 6


def test_the_shift_of_rank_0_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch less on a GPU; the seeds of all ranks are multiples of one stride apart."""
    x, stride = torch.zeros(1), 0x9E3779B97F4A7C15
    seeds = []
    for rank in range(3):
        monkeypatch.setattr("rmm_linear.ops.data_parallel_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            seeds.append(int(ops.draw_seed(x)))
        assert ("aten::add" in [event.name for event in profile.events()]) == (rank > 0)
    torch.manual_seed(0)
    drawn = int(torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64))
    assert [(seed - drawn) % (1 << 64) for seed in seeds] == [rank * stride % (1 << 64) for rank in range(3)]
