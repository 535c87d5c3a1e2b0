"""Graphs: parts that are accepted and refused, and the fingerprint."""

from dataclasses import replace

import pytest

from experiments.checkpointing.generators import chain, random_layers, star, u_shape, with_backward
from rmm_linear.checkpointing import Graph, Op, Storage

GRAPHS = {
    "chain": chain([3, 1, 4, 1, 5]),
    "u": u_shape(3),
    "star": star(5),
    "layers": random_layers(12, seed=3),
    "training": with_backward(random_layers(9, seed=1)),
}


def test_fingerprint_depends_on_all_but_names_and_temporaries():
    graph = GRAPHS["training"]
    renamed = replace(graph, storages=tuple(replace(storage, name="x") for storage in graph.storages))
    assert renamed.fingerprint == graph.fingerprint
    first = graph.ops[0]
    assert replace(graph, ops=(replace(first, temporary_bytes=1), *graph.ops[1:])).fingerprint == graph.fingerprint
    for changed in (
        replace(graph, outputs=graph.outputs[:1]),
        replace(graph, results=()),
        replace(graph, cost_unit="flops"),
        replace(graph, storages=(replace(graph.storages[0], size_bytes=99), *graph.storages[1:])),
        replace(graph, ops=(replace(first, cost=99.0), *graph.ops[1:])),
        replace(graph, ops=(replace(first, is_recomputable=False), *graph.ops[1:])),
        replace(graph, ops=(replace(first, is_random=True), *graph.ops[1:])),
    ):
        assert changed.fingerprint != graph.fingerprint


A, B = Storage("a", 1), Storage("b", 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Graph((), ()), "no ops"),
        (lambda: Graph((Op("f", 0.0, (), (0,)),), (A,)), "cost=0.0; costs are positive"),
        (lambda: Graph((Op("f", float("inf"), (), (0,)),), (A,)), "cost=inf"),
        (lambda: Graph((Op("f", float("nan"), (), (0,)),), (A,)), "cost=nan"),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (Storage("a", -1),)), "size_bytes=-1; sizes are at least 0"),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (Storage("a", 1.5),)), "no int"),
        (lambda: Graph((Op("f", 1.0, (), (0,), temporary_bytes=-1),), (A,)), "temporary_bytes=-1"),
        (lambda: Graph((Op("f", 1.0, (1,), (0,)), Op("g", 1.0, (0,), (1,))), (A, B)), "'f' reads 'b' before"),
        (lambda: Graph((Op("f", 1.0, (0,), (0,)),), (A,)), "cyclic"),
        (lambda: Graph((Op("f", 1.0, (), (0,)), Op("g", 1.0, (), (0,))), (A,)), "by 'f' and by 'g'"),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (A, B)), "'b' is written by no op"),
        (lambda: Graph((Op("f", 1.0, (), (3,)),), (A,)), "names storage 3, of which there are 1"),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (A,), outputs=(5,)), "outputs names storage 5"),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (A,), gradients=(0,)), "gradient 'a' is written by a forward op"),
        (lambda: Graph((Op("f", 1.0, (), (0,), is_backward=True),), (A,), (0,), (0,)), "backward op"),
        (
            lambda: Graph((Op("f", 1.0, (), (0,), is_backward=True), Op("g", 1.0, (), (1,))), (A, B)),
            "forward op 'g' comes after backward op 'f'",
        ),
        (lambda: with_backward(GRAPHS["training"]), "forward ops"),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("temporary_bytes", float("nan"), "temporary_bytes=nan, which is no int"),
        ("state_bytes", -(10**9), "state_bytes=-1000000000; sizes are at least 0"),
        ("state_bytes", "x", "state_bytes='x', which is no int"),
        ("reads", (0.0,), "reads=.0.0,., which is not a tuple of ints"),
        ("reads", (True,), "which is not a tuple of ints"),
        ("writes", "0", "which is not a tuple of ints"),
        ("holds_back", [0], "which is not a tuple of ints"),
        ("cost", "1", "cost='1'; costs are positive and finite"),
        ("cost", True, "cost=True; costs are positive and finite"),
        ("is_random", "yes", "is_random='yes', which is no bool"),
        ("is_backward", 0, "is_backward=0, which is no bool"),
        ("name", None, "name=None, which is no text"),
        ("kind", 7, "kind=7, which is no text"),
        ("outputs", (0.0,), "outputs=.0.0,., which is not a tuple of ints"),
        ("results", ("0",), "results=.'0',., which is not a tuple of ints"),
        ("gradients", None, "gradients=None, which is not a tuple of ints"),
        ("cost_unit", 3, "cost_unit=3, which is no text"),
        ("ops", {}, "no ops"),
        ("storages", (Storage("a", float("inf")),), "size_bytes=inf, which is no int"),
        ("storages", (Storage(1, 1),), "name=1, which is no text"),
    ],
)
def test_a_part_of_an_op_or_a_graph_of_another_type_is_named(part, value, message):
    graph, changed = GRAPHS["training"], {part: value}
    if hasattr(graph.ops[1], part):
        changed = {"ops": (graph.ops[0], replace(graph.ops[1], **changed), *graph.ops[2:])}
    with pytest.raises(ValueError, match=message):
        replace(graph, **changed)
