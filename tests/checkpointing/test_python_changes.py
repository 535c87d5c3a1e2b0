"""What a step's Python code changes beside tensors is named and left as it is, or refused; never frozen silently."""

import collections
import copy
import datetime
import functools
import itertools
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from rmm_linear.checkpointing import checkpoint_model, checkpoint_step
from rmm_linear.errors import CaptureError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
PLAN = {"budget": "100%", "strategy": "chen2016_sqrt"}


class Stats:
    def __init__(self):
        self.count = 0


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Namespace:
    count = 0


class Calls(nn.Module):
    calls = 0


ENTRIES, LOG, STATS, SLOTS, SEEN, RECENT, TIMES = (
    {"n": 0},
    [],
    Stats(),
    Slots(),
    set(),
    collections.deque(),
    np.zeros(2),
)
OUTSIDE = nn.Identity()
OUTSIDE.count = 0
SHARED: list = []
GENERATORS = {"numpy": np.random.default_rng(0), "random": random.Random(0), "older": np.random.RandomState(0)}


def counted(function):
    count = 0

    @functools.wraps(function)
    def wrapped(x):
        nonlocal count
        count += 1
        return function(x)

    return wrapped


@counted
def activation(x):
    return torch.tanh(x)


def add_to(name, holder=STATS):
    setattr(holder, name, getattr(holder, name) + 1)


def count_up(x):
    OUTSIDE.count += 1
    return x


def in_a_class(model):
    type(model).calls += 1


def in_a_namespace(model):
    Namespace.count += 1


# what is changed -> the code that changes it, and the name it is told by
CHANGES = {
    "an entry of a global dict": (lambda model: ENTRIES.__setitem__("n", ENTRIES["n"] + 1), r"ENTRIES\.n"),
    "a global list": (lambda model: LOG.append(1), "LOG"),
    "a global set": (lambda model: SEEN.add(len(SEEN)), "SEEN"),
    "a global deque": (lambda model: RECENT.append(1), "RECENT"),
    "a global array": (lambda model: TIMES.__setitem__(0, TIMES[0] + 1), "TIMES"),
    "a global object's field": (lambda model: add_to("count", STATS), r"STATS\.count"),
    "a slot": (lambda model: add_to("count", SLOTS), r"SLOTS\.count"),
    "a default argument's field": (lambda model: add_to("count"), r"STATS\.count|add_to\.count"),
    "a class": (in_a_class, r"Counting\.calls|Calls\.calls"),
    "a class as a namespace": (in_a_namespace, r"Namespace\.count"),
    "a variable that a function closes over": (lambda model: activation(X), r"activation\.count"),
    "another module": (lambda model: count_up(X), r"OUTSIDE\.count"),
    "an entry of a module's dict": (lambda model: model.own.__setitem__("n", model.own["n"] + 1), r"Counting\.own\.n"),
}


def state():
    return (
        dict(ENTRIES), list(LOG), STATS.count, SLOTS.count, set(SEEN), list(RECENT), TIMES.tolist(), Counting.calls,
        Calls.calls, Namespace.count, activation.__closure__[0].cell_contents, OUTSIDE.count,
    )  # fmt: skip


class Counting(Calls):
    def __init__(self, change):
        super().__init__()
        self.linear, self.own, self.change = nn.Linear(8, 8), {"n": 0}, change

    def forward(self, x):
        self.change(self)
        return self.linear(x).square().mean()


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_forward_pass_changes_is_named_and_left_as_it_is(what):
    change, name = CHANGES[what]
    model = Counting(change)
    before = state()
    with pytest.warns(UserWarning, match=rf"changes `({name})`.* each time it runs"):
        checkpoint_model(model, X, **PLAN)
    model(X).backward()
    assert state() == before
    assert model.own == {"n": 0}


@pytest.mark.parametrize("what", ["an entry of a global dict", "a global object's field", "a class as a namespace"])
def test_what_a_loss_depends_on_is_refused(what):
    change, _ = CHANGES[what]

    def loss_fn(model, x):
        change(model)
        return model(x) * (1 + ENTRIES["n"] + STATS.count + Namespace.count)

    before = state()
    with pytest.raises(CaptureError, match="computes something else when it runs again"):
        checkpoint_step(Counting(lambda model: None), loss_fn, X, **PLAN)
    assert state() == before


def test_a_hook_of_a_tensor_that_records_is_refused_or_named():
    class Hooked(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(self.record)
            return y.square().mean()

        def record(self, grad):
            add(self, grad)

    def keep(self, grad):
        self.last = grad

    def count(self, grad):
        ENTRIES["n"] += 1

    add = keep
    model = Hooked(8, 8)
    with pytest.raises(CaptureError, match=r"sets `Hooked\.last` to a tensor"):
        checkpoint_model(model, X, **PLAN)
    assert not hasattr(model, "last")
    add = count
    with pytest.warns(UserWarning, match=r"changes `ENTRIES\.n`.* each time it runs"):
        checkpoint_model(model, X, **PLAN)
    assert ENTRIES == {"n": 0}


def test_a_global_list_of_tensors_is_refused_and_left_as_it_is():
    model = Counting(lambda model: LOG.append(model.linear.weight.sum()))
    with pytest.raises(CaptureError, match="sets `LOG` to a tensor"):
        checkpoint_model(model, X, **PLAN)
    assert LOG == []


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("where", ["GENERATORS", "Counting.generator"])
def test_draws_of_a_generator_of_ones_own_are_refused_and_taken_back(kind, where):
    def draw(model):
        generator = GENERATORS[kind] if where == "GENERATORS" else model.generator
        # each kind has it
        generator.shuffle([1, 2, 3, 4])

    model = Counting(draw)
    model.generator = copy.deepcopy(GENERATORS[kind])
    before = copy.deepcopy((GENERATORS[kind], model.generator))
    with pytest.raises(CaptureError, match=rf"draws from `{where}(\.\w+)?`.*freeze"):
        checkpoint_model(model, X, **PLAN)
    for old, new in zip(before, (GENERATORS[kind], model.generator), strict=True):
        lists = [list(range(20)), list(range(20))]
        old.shuffle(lists[0])
        new.shuffle(lists[1])
        assert lists[0] == lists[1]


def test_a_weight_in_a_global_list_is_the_models():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return nn.functional.linear(torch.tanh(self.linear(x)), SHARED[0]).square().mean()

    model = Tied()
    SHARED[:] = [model.linear.weight]
    model(X).backward()
    expected = model.linear.weight.grad
    model.zero_grad()
    checkpoint_model(model, X, **PLAN)
    assert SHARED[0] is model.linear.weight
    model(X).backward()
    assert torch.equal(model.linear.weight.grad, expected)


class Config:
    scale, nested, power = 1.0, Stats(), {"of": 2}


@pytest.mark.filterwarnings("ignore:a planned step is captured for 3")
def test_a_class_as_a_namespace_is_followed(monkeypatch):
    def loss_fn(model, x):
        return (model(x) * Config.scale + Config.nested.count).pow(Config.power["of"]).mean()

    model = nn.Linear(8, 8)
    step = checkpoint_step(model, loss_fn, X, **PLAN)
    for holder, name, value in ((Config, "scale", 3.0), (Config.nested, "count", 2), (Config.power, "of", 3)):
        (monkeypatch.setitem if isinstance(holder, dict) else monkeypatch.setattr)(holder, name, value)
        assert torch.equal(step(X), loss_fn(model, X))


def test_what_is_made_in_the_step_is_nobodys():
    class Makes(nn.Linear):
        def forward(self, x):
            stats, entries = Stats(), collections.defaultdict(list)
            add_to("count", stats)
            entries["x"].append(x)
            return super().forward(entries["x"][0]).square().mean() * stats.count

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_model(Makes(8, 8), X, **PLAN)


# Objects that are not as others


class Fields(collections.OrderedDict):
    """Writes through to its attributes, as the results of Hugging Face's models do, and refuses to be updated."""

    def __setitem__(self, key, value):
        super().__setitem__(key, ("wrapped", value))
        vars(self)[key] = value

    def update(self, *args, **kwargs):
        raise RuntimeError("not like this")


class Recent(collections.deque):
    def __init__(self, *, size):
        super().__init__(maxlen=size)


class Private:
    __slots__ = ("__n",)

    def __init__(self):
        self.__n = 0

    def add(self):
        self.__n += 1

    def n(self):
        return self.__n


class OfItsClass:
    n = 0

    def add(self):
        type(self).n += 1

    @staticmethod
    @counted
    def act(x):
        return x


@functools.lru_cache
def table(size):
    return torch.arange(size, dtype=torch.float32).cos()


FIELDS, FEW, PRIVATE, KIND = Fields(), Recent(size=3), Private(), OfItsClass()
OrderedDict = collections.OrderedDict
OrderedDict.__setitem__(FIELDS, "a", 1)
READ_ONLY = np.broadcast_to(np.float32(2.0), (3,))
TOO_LONG = [0.0] * 20_000
TENSOR = torch.zeros(())
SYSTEM = random.SystemRandom()
OLD_DICT = collections.UserDict(n=0)
ITERATORS = {"a count": itertools.count(), "a generator": (number for number in range(100))}


@pytest.mark.parametrize(
    ("change", "name", "present"),
    [
        (lambda: FIELDS.__setitem__("a", FIELDS["a"]), r"FIELDS\.a", lambda: (dict(FIELDS), vars(FIELDS))),
        (lambda: FEW.append(1), "FEW", lambda: list(FEW)),
        (lambda: PRIVATE.add(), r"PRIVATE\._Private__n", lambda: PRIVATE.n()),
        (lambda: KIND.add(), r"(KIND|OfItsClass)\.n", lambda: OfItsClass.n),
        (lambda: KIND.act(X), r"\w+\.act\.count", lambda: OfItsClass.act.__closure__[0].cell_contents),
        (lambda: OLD_DICT.update(n=OLD_DICT["n"] + 1), r"OLD_DICT\.n", lambda: OLD_DICT["n"]),
        (lambda: TOO_LONG.append(1.0), r"TOO_LONG\.its length", lambda: len(TOO_LONG)),
    ],
)
@pytest.mark.filterwarnings("ignore:a planned step won't notice")
def test_unusual_objects_are_told_and_are_as_they_were(change, name, present):
    before = copy.deepcopy(present())
    with pytest.warns(UserWarning, match=rf"changes `{name}`"):
        checkpoint_model(Counting(lambda model: change()), X, **PLAN)
    assert present() == before


def test_what_is_read_only_is_no_hindrance():
    def loss_fn(model, x):
        return (model.linear(x) * float(READ_ONLY[0]) * (SYSTEM.random() >= 0)).mean()

    model = Counting(lambda model: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = checkpoint_step(model, loss_fn, X, **PLAN)
    assert torch.equal(step(X), loss_fn(model, X))


def test_a_function_that_remembers_forgets_tensors_of_the_trace():
    table.cache_clear()
    model = Counting(lambda model: None)

    def loss_fn(model, x):
        return (model.linear(x) * table(8)).mean()

    step = checkpoint_step(model, loss_fn, X, **PLAN)
    assert type(table(8)) is torch.Tensor
    assert torch.equal(step(X), loss_fn(model, X))


def test_a_tensor_that_is_not_the_models_is_not_written_into():
    with pytest.raises(CaptureError, match="writes into the tensor `TENSOR`, which is not the model's"):
        checkpoint_model(Counting(lambda model: TENSOR.add_(1)), X, **PLAN)
    assert TENSOR == 0


@pytest.mark.parametrize("kind", ITERATORS)
def test_what_yields_its_values_once_is_refused(kind):
    with pytest.raises(CaptureError, match="takes from the iterator `ITERATORS"):
        checkpoint_model(Counting(lambda model: next(ITERATORS[kind])), X, **PLAN)


METRICS = Stats()
METRICS.losses = []


def test_what_the_code_does_not_mention_is_for_others_to_change():
    def write():
        METRICS.losses.append(1)

    def loss_fn(model, x):
        # another thread's work, which comes in between
        other = threading.Thread(target=write)
        other.start()
        other.join()
        return model.linear(x).mean() * (METRICS.count + 1)

    METRICS.losses.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_step(Counting(lambda model: None), loss_fn, X, **PLAN)
    assert len(METRICS.losses) > 1


def test_a_value_that_is_made_anew_is_no_change():
    class Sets(nn.Linear):
        def forward(self, x):
            self.at, self.length, self.act = datetime.timedelta(1), np.float64(2), self.double
            return self.act(super().forward(x)).mean()

        def double(self, x):
            return 2 * x

    model = Sets(8, 8)
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_model(model, X, **PLAN)


def test_a_user_iterates_over_a_deque_that_the_step_reads():
    RECENT.extend([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in RECENT:
            checkpoint_step(Counting(lambda model: None), lambda m, x: m.linear(x).mean() * len(RECENT), X, **PLAN)
    RECENT.clear()
