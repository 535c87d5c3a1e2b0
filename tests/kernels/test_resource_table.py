"""The committed table of the kernels' resources is of these sources, has all that ships, and all of it fits."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'rmm-linear[kernels]'")

from rmm_linear_kernels import ahead_of_time
from rmm_linear_kernels.interpreter import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

SHIPPED = ahead_of_time.all_builds()


@pytest.fixture
def resources(benchmark_script):
    return benchmark_script("resources")


def test_what_ships_is_in_the_table_as_it_is_and_nothing_else(resources):
    assert ahead_of_time.unlisted_kernels() == []
    assert resources.out_of_date(SHIPPED, resources.read_table(resources.TABLE)) == [], "run `make resources`"


def test_what_ships_fits(resources):
    builds = {build.name: build for build in SHIPPED}
    table = resources.read_table(resources.TABLE)
    assert [said for (name, _), line in table.items() for said in ahead_of_time.problems(builds[name], line)] == []
