"""Fixtures for the whole suite: devices, seeds, offline transformers, and memory that is not zero by luck."""

import gc
import logging
import os

# Before anything imports huggingface_hub, which reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A plan that is found on disk would hide what a test is about.
os.environ["RMM_LINEAR_PLANS"] = "off"

import pytest
import torch

# pytest listens to loggers that pass nothing on, such as that of torch's traces; and torch writes its traces, each
# graph as a text among them, wherever somebody listens.
logging.getLogger("torch.__trace").propagate = True

# The tests' matrices are tiny: two threads would wait for each other most of the time. OMP_NUM_THREADS asks for more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

DEVICES = [pytest.param("cpu")]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seeded():
    """The same random state at the start of each test, whatever ran before it."""
    torch.manual_seed(0)


# Files that test plans themselves; other tests test steps that run by plan.
PLANNERS = ("strategies", "test_local_search", "test_budget", "test_stored_plans")


@pytest.fixture(autouse=True)
def short_searches(request, monkeypatch):
    """Search briefly for plans, which takes half of a small step's capture, but in slow tests and tests of planners."""
    is_of_planners = any(name in request.node.nodeid for name in PLANNERS)
    if not is_of_planners and request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("rmm_linear.planning.strategies.auto._WORK", 3_000)


@pytest.fixture
def draws_of_a_gpu():
    """A CPU draws what a GPU draws, as in a process of Triton's interpreter, to stand in for one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rmm_linear_kernels.random.STANDS_IN_FOR_GPU", True)
        yield


@pytest.fixture
def process_group():
    """A group of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def nan_poison():
    """Uninitialised memory holds NaN instead of what happened to lie there, so that an unwritten element shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def pytest_addoption(parser):
    """Processes may share the tests."""
    parser.addoption("--share", metavar="K/N", help="run only every Nth test, from the Kth on: one of N processes")


def pytest_configure(config):
    """Refuse a share that is none."""
    share = config.getoption("share")
    if share is not None:
        number, _, count = share.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(f"--share {share}: K/N is needed, of which K is at least 1 and at most N")


# After what `-m` and `-k` leave out.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU are left out where there is none, or skipped if asked for; so are others' shares."""
    share = config.getoption("share")
    if share is not None:
        number, count = map(int, share.split("/"))
        others = list(items)
        del others[number - 1 :: count]
        config.hook.pytest_deselected(items=others)
        items[:] = items[number - 1 :: count]
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if "gpu" in config.option.markexpr:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    else:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Objects that a file's tests find stay: collections, of which compilers and Trainers cause many, pass over them.

    Collections are rarer than usual as well; a test of garbage calls the collector. Both spare a fifth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish(session, exitstatus):
    """A share of few tests may be none, which is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("share") is not None:
        session.exitstatus = pytest.ExitCode.OK
