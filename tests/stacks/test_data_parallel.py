"""DDP and FSDP2 on two processes, converted before and after wrapping; and what FSDP of old and tensor parallel do."""

import itertools
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not available", allow_module_level=True)

from data_parallel_ranks import COMPILED, RANKS, STACKS, batch_for, launched, replayed
from tiny_models import CONFIG, assert_estimates, llama, sketched_weights

from rmm_linear import convert_linears

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
WATCHED = [name for name, stack in STACKS.items() if not stack.checkpointed]
# one for query, key and value, one for gate and up, and one for down, in two blocks: attention keeps its own output
GROUPS = 6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process found: all stacks in one launch."""
    return launched(tmp_path_factory.mktemp("ranks"), list(STACKS))


@pytest.mark.parametrize("name", STACKS)
def test_gradients_are_those_of_one_process_with_the_same_seeds_and_weights_those_of_all_ranks(ranks, name):
    for rank, want in enumerate(replayed(STACKS[name])):
        got = ranks[rank][name]
        assert got.losses == want.losses
        for step, gradients in enumerate(want.gradients):
            assert got.gradients[step].keys() == gradients.keys()
            for parameter, gradient in gradients.items():
                assert torch.equal(got.gradients[step][parameter], gradient), (step, parameter)
        assert all(torch.equal(value, ranks[0][name].weights[parameter]) for parameter, value in got.weights.items())


@pytest.mark.parametrize("name", WATCHED)
def test_every_rank_group_step_and_micro_step_has_an_s_of_its_own(ranks, name):
    """Although all ranks are seeded alike."""
    stack = STACKS[name]
    drawn = [set(seeds) for rank in range(RANKS) for seeds in ranks[rank][name].seeds]
    assert len(drawn) == RANKS * stack.steps * stack.micro_steps
    assert [len(seeds) for seeds in drawn] == [GROUPS] * len(drawn)
    assert len(set.union(*drawn)) == GROUPS * len(drawn)


def exact_gradients(stack):
    """Of the first step, in one process, the mean over the ranks."""
    model, total = stack.make(), {}
    for rank in range(RANKS):
        model.zero_grad()
        for micro_step in range(stack.micro_steps):
            (model(**batch_for(stack, rank, 0, micro_step)).loss / stack.micro_steps).backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad / RANKS
    return total


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_gradients_are_estimates_and_the_others_exact(ranks, name):
    names = sketched_weights(convert_linears(llama(), config=CONFIG))
    assert_estimates(ranks[0][name].gradients[0], exact_gradients(STACKS[name]), names)


def test_layers_beside_tensor_parallel_ones_are_left_exact(ranks):
    """Ranks that hold one weight, and do not average its gradients, would drift apart."""
    found = [rank["tensor parallel"] for rank in ranks]
    assert "its weight is distributed over devices" in found[0]["first"]
    assert "other layers of the model are distributed over devices (tensor parallel)" in found[0]["replicated"]
    assert "tensor parallel" in found[0]["error"]
    assert torch.equal(found[0]["gradient"], found[1]["gradient"])


def test_what_is_distributed_after_its_conversion_raises(ranks):
    assert "rmm_linear.draw_seed" in ranks[0]["tensor parallel"]["converted before"]


def test_a_flat_parameter_is_refused_by_name_after_wrapping_and_sketched_before(ranks):
    for rank in ranks:
        assert "FSDP's flat parameter" in rank["flattened"]["converted after"]
        first, again, other = rank["flattened"]["gradients"]
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_gradients_of_a_planned_step_are_reduced_while_its_backward_pass_runs(ranks):
    for rank in ranks:
        plain, ours = rank["planned"][None], rank["planned"]["80%"]
        assert all(torch.equal(a, b) for a, b in zip(plain["gradients"], ours["gradients"], strict=True))
        assert ours["runs"] == 3
        assert len(plain["launched"]) == len(ours["launched"]) == 6
        # the last layer's first, and one after the other
        assert ours["launched"][0] < 0.3
        gaps = [later - earlier for earlier, later in itertools.pairwise([*ours["launched"], 1.0])]
        assert max(gaps) < 0.35


def test_blocks_that_are_planned_before_they_are_sharded_run_by_plan(ranks):
    for rank in ranks:
        plain, ours = rank["planned shards"][False], rank["planned shards"][True]
        assert ours["runs"] == [3, 3]
        assert torch.equal(plain["losses"], ours["losses"])
        assert all(torch.equal(a, b) for a, b in zip(plain["weights"], ours["weights"], strict=True))
        assert "plan the blocks before you shard them" in plain["planned after"]


@pytest.mark.slow
def test_compiled_ranks_agree_on_estimates(tmp_path):
    found = launched(tmp_path, list(COMPILED))
    names = sketched_weights(convert_linears(llama(), config=CONFIG))
    for name, stack in COMPILED.items():
        first, second = (rank[name] for rank in found)
        assert all(torch.equal(value, second.weights[parameter]) for parameter, value in first.weights.items())
        same = partial(torch.allclose, rtol=1e-3, atol=1e-5)
        assert_estimates(first.gradients[0], exact_gradients(stack), names, same=same)
