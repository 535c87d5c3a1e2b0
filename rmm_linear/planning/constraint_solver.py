"""OR-tools' solver of constraint programs (CP-SAT), with limits, and stopped by Ctrl-C."""

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple


class Search(NamedTuple):
    """A search that has ended.

    Attributes:
        solver: Has the values of the variables, if a solution was found.
        status: "optimal", "found" (a solution, perhaps not the best), "infeasible", or "nothing".
        is_interrupted: Whether Ctrl-C ended it.
    """

    solver: Any
    status: str
    is_interrupted: bool


def constraint_programs(paper: str) -> Any:
    """Return OR-tools' module of constraint programs.

    Raises:
        ImportError: If it is not installed; it names the paper that needs it.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(f"{paper} needs OR-tools: pip install rmm-linear[plan]") from error
    return cp_model


def search(
    programs: Any, model: Any, *, time_limit_s: float, deterministic_limit: float | None = None, **parameters: Any
) -> Search:
    """Solve a model until it is solved, a limit is reached, or Ctrl-C is pressed.

    `programs` is OR-tools' module, and the parameters are the solver's. The deterministic limit is the solver's own
    measure of work; unlike a time, it gives the same solution each time.
    """
    solver = programs.CpSolver()
    parameters["max_time_in_seconds"] = time_limit_s
    if deterministic_limit is not None:
        parameters["max_deterministic_time"] = deterministic_limit
    # its own handler takes the place of Python's for good: the next Ctrl-C would kill the process
    parameters["catch_sigint_signal"] = False
    for name, value in parameters.items():
        setattr(solver.parameters, name, value)
    is_interrupted = False
    with ThreadPoolExecutor(1) as thread:
        solving = thread.submit(solver.solve, model)
        try:
            solving.result()
        except KeyboardInterrupt:
            is_interrupted = True
            # it does nothing until the search has begun
            while not wait([solving], timeout=0.1).done:
                solver.stop_search()
        status = solving.result()
    names = {programs.OPTIMAL: "optimal", programs.FEASIBLE: "found", programs.INFEASIBLE: "infeasible"}
    return Search(solver, names.get(status, "nothing"), is_interrupted)
