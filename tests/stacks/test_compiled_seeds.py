"""A compiled layer's seed: one draw a call, and the same one in both passes, whatever the compiler moves or merges."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.sketches.contract import assert_unbiased

CONFIG = RMMConfig(ratio=0.6, min_rows=1, share_sketch=False)
ROWS, WIDTH = 96, 16
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Residual(nn.Module):
    """Keeps its input for its own sake: what is computed from it may be computed in the backward pass as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (RMMLinear(WIDTH, WIDTH, config=CONFIG) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + self.first(x))
        return hidden * hidden.exp() + self.second(hidden)


class Checkpointed(Residual):
    """Computed once more in the backward pass, draws and all."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.montecarlo
@pytest.mark.parametrize("of", [Residual, Checkpointed])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_backward_pass_has_the_seed_of_the_sketch(backend: str, autocast: bool, of: type[Residual]) -> None:
    """Under autocast x is at hand in the backward pass, and its cast, which the sketch is made of, is not.

    A seed drawn once more there has the slope 0. 300 draws see a bias of 10 % at 6 standard errors; false-alarm rate
    3e-6.
    """
    model, x, weighting = of(), torch.randn(ROWS, WIDTH) + 0.5, torch.randn(ROWS, WIDTH) + 0.3

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run(x)
        (output.float() * weighting).sum().backward()
        return [model.first.weight.grad, model.second.weight.grad]

    model.eval()
    exact = gradients(model)
    model.train()
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def relative(found: list[Tensor]) -> Tensor:
        return torch.cat([(one / other.norm()).flatten() for one, other in zip(found, exact, strict=True)])

    assert_unbiased(
        lambda: relative(gradients(compiled)), relative(exact), draws=300, bias=0.1, rounding=1e-2 if autocast else 1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_with_one_tensor_draw_twice(backend: str) -> None:
    """Their exact gradients cancel; with one S for both the estimates would cancel as well."""

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = RMMLinear(WIDTH, WIDTH, config=CONFIG)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) - self.layer(x)

    model, x = Difference(), torch.randn(ROWS, WIDTH)
    torch.compile(model, backend=backend, fullgraph=True)(x).backward(torch.randn(ROWS, WIDTH))
    assert model.layer.weight.grad.norm() > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_do_not_share_draw_one_by_one(backend: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (RMMLinear(WIDTH, WIDTH, config=CONFIG) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    model, x = Two(), torch.randn(ROWS, WIDTH)
    torch.compile(model, backend=backend, fullgraph=True)(x).backward(torch.randn(ROWS, WIDTH))
    assert not torch.equal(model.first.weight.grad, model.second.weight.grad)
