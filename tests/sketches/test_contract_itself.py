"""The contract as a tool: what it needs, and what it says to someone who uses it wrongly."""

import os
import subprocess
import sys

import pytest
from sketch_contract import SketchContract

from rmm_linear.sketches import Gaussian, Hadamard, SavedSketch


class Few(SketchContract):
    identity_draws = gradient_draws = 300

    def make(self, ratio):
        return Hadamard(ratio=ratio)


FewGaussians = type("FewGaussians", (Few,), {"make": lambda self, ratio: Gaussian(ratio=ratio)})


@pytest.mark.parametrize(
    ("contract", "check", "message"),
    [
        (Few, "test_gradient_is_unbiased", r"draws=300 give a standard error of .* a bias of 1.* make it \d+"),
        (Few, "test_variance_equals_the_closed_form", "a variance off by 2.2 %"),
        (FewGaussians, "test_mean_of_s_s_transposed_is_identity", "one row scaled by 1 %"),
    ],
)
def test_too_few_draws_are_refused_with_the_number_that_would_do(contract, check, message):
    with pytest.raises(ValueError, match=message):
        getattr(contract(), check)()


def test_make_has_to_be_defined():
    class Empty(SketchContract):
        pass

    with pytest.raises(NotImplementedError, match="Empty has to define make"):
        Empty().test_zeros_give_zeros()


def test_a_failure_names_the_case():
    class Doubled(Hadamard):
        def compress(self, x, seed, *, mean=None):
            saved = super().compress(x, seed, mean=mean)
            return SavedSketch(seed, (2 * saved.tensors[0],))

    class Contract(SketchContract):
        def make(self, ratio):
            return Doubled(ratio=ratio)

    with pytest.raises(AssertionError, match="1 rows, ratio 0.01, seed 0: the gradient differs"):
        Contract().test_gradient_is_the_product_with_dense()


def test_subclasses_share_no_results():
    """The draws of one contract are not another's, not even a subclass's."""
    assert len({id(owner._estimates) for owner in (SketchContract, Few, FewGaussians)}) == 3


def test_neither_the_library_nor_the_contract_needs_pytest():
    code = (
        "import sys\n"
        "sys.modules['pytest'] = None\n"
        "import rmm_linear\n"
        "print('sketch_contract' in sys.modules)\n"
        "from sketch_contract import SketchContract\n"
        "print(len(SketchContract.montecarlo))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "3"], done.stderr
