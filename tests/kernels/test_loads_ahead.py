"""What a kernel reads ahead is on its way while it computes: programs of few warps would wait for it otherwise."""

import importlib.util
import os
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'rmm-linear[kernels]'", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from rmm_linear_kernels.ahead_of_time import all_builds, intermediate_code

pytestmark = pytest.mark.slow
SHIPPED = {build.name: build for build in all_builds()}
# Halves of 64 rows of x in tiles of 64 features.
LOAD = re.compile(r"(%\S+) = tt\.load .*tensor<32x64x!tt\.ptr<")
SHARED = re.compile(r"ttg\.local_alloc (%\S+) :")


def operations(name: str) -> list[str]:
    """Loads of x, those of them that are handed to the shared memory, and products, in their order."""
    loads, found = set(), []
    for line in intermediate_code(SHIPPED[name], "sm_90").splitlines():
        loaded, handed = LOAD.search(line), SHARED.search(line)
        if loaded:
            loads.add(loaded[1])
            found.append("load")
        elif handed and handed[1] in loads:
            found.append("shared at once")
        elif " tt.dot " in line:
            found.append("product")
    return found


@pytest.mark.parametrize("kept", [32, 16])
@pytest.mark.parametrize("of", ["x", "g"])
def test_the_next_tile_is_read_while_one_is_multiplied(of, kept):
    """Two loads a tile, the next tile's before the products of this one; none is waited for where it is loaded."""
    build = SHIPPED[f"hadamard_sketch {of} bf16 order=64 kept={kept}"]
    found = operations(build.name)
    assert "shared at once" not in found
    tiles = build.constants["TILES"]
    assert tiles > 1
    # the sketch's products and the sums'
    products = ["product"] * 4
    assert found == ["load"] * 4 + [*products, "load", "load"] * (tiles - 2) + products * 2


@pytest.mark.parametrize(("kept", "is_awaited"), [(32, True), (16, False)])
def test_codes_blocks_are_read_four_at_a_time(kept, is_awaited):
    """Of 4 blocks, none is waited for before what is random has been drawn; of 8, 4 are waited for together."""
    build = SHIPPED[f"hadamard_sketch_quantized int8 bf16 kept={kept} centred"]
    found = operations(build.name)
    assert ("shared at once" in found) == (not is_awaited)
    found = [operation for operation in found if operation != "shared at once"]
    blocks, at_once = build.constants["BLOCKS"], build.constants["AT_ONCE"]
    assert (blocks, at_once) == (128 // kept, 4)
    # two loads a block, and its products and those of the sums
    assert found == (["load"] * 2 * at_once + ["product"] * 4 * at_once) * (blocks // at_once)


@pytest.mark.parametrize(("target", "has_assembly"), [("sm_90", True), ("gfx942", False)])
def test_nvidia_s_assembly_is_for_nvidia_s_gpus(target, has_assembly):
    code = intermediate_code(SHIPPED["hadamard_sketch x bf16 order=64 kept=16"], target)
    assert ("mov.b32" in code) == has_assembly
