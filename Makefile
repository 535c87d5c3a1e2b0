# Every target sets up what it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
#   make PYTHON=/path/to/python test       another interpreter (>= 3.10); `make clean` first if .venv exists already
#   make PIP_FLAGS="--find-links DIR" test  more options for pip; its PIP_* environment variables count as well
#   make PY=python3 gpu                    an interpreter that has all that is needed: nothing is set up or downloaded

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHON ?=
PIP_FLAGS ?=
PYTEST_FLAGS ?=
GLUE_FLAGS ?=
GLUE_DIR ?= GLUE
MODEL ?= all-MiniLM-L6-v2
STUDY_FLAGS ?=
BENCH_FLAGS ?=
GPU_FLAGS ?=
PIP_INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)

# Tests run side by side, one process a core, each with one thread; a process that has done its own takes others' over.
PARALLEL := OMP_NUM_THREADS=1
PYTEST_PARALLEL := -n auto --dist worksteal
# Tests of what rounds: under other instructions of MKL they round as another make of processor does.
ROUNDED := tests/sketches tests/test_functional.py tests/test_linear.py tests/variance tests/checkpointing

# With an interpreter given, the sources are found by their path and there is nothing to set up.
READY := $(STAMP)
ifneq ($(PY),$(VENV)/bin/python)
READY :=
PARALLEL :=
PYTEST_PARALLEL :=
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

.PHONY: help venv glue study test machines check lint bench gpu readme docs report clean

help:
	@echo "make glue   fine-tune a small Transformer with each tool on the demo task: table and figure, within 6 minutes on 2 cores"
	@echo "make study GLUE_DIR=... MODEL=...  the GLUE study on real data: hours, resumable, beside other work"
	@echo "make test   the test suite (CPU is enough)"
	@echo "make machines  the tests of what rounds, rounded as on other processors"
	@echo "make check  lint, types and the whole test suite, slow tests included"
	@echo "make lint   ruff and mypy"
	@echo "make bench  time the layer against nn.Linear"
	@echo "make gpu    what only a GPU can say, within 8 minutes: layer, kernels, memory, tests, fine-tuning"
	@echo "make readme fill the tables of README.md and docs from the committed results"
	@echo "make docs   README.md, docs/ and the docstrings as a site, in build/site"
	@echo "make report the measurements of docs/ as one HTML file with its figures, in build/results.html"
	@echo "make clean  remove the virtual environment and the caches"

venv: $(STAMP)

# torch goes first: what is installed after it takes the build that is there, instead of looking for another one
$(STAMP): pyproject.toml constraints.txt .ci/make-venv
	@PYTHON="$(PYTHON)" sh .ci/make-venv $(VENV)
	@rm -f $@
	$(PIP_INSTALL) torch setuptools
	$(PIP_INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

glue: $(READY)
	$(PY) -m experiments.glue.run --config demo --grid --report $(GLUE_FLAGS)

study: $(READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m experiments.glue.study --data "$(GLUE_DIR)" --model "$(MODEL)" $(STUDY_FLAGS)

test: $(READY)
	$(PARALLEL) $(PY) -m pytest $(PYTEST_PARALLEL) $(PYTEST_FLAGS)

machines: $(READY)
	MKL_CBWR=COMPATIBLE $(PARALLEL) $(PY) -m pytest $(PYTEST_PARALLEL) $(PYTEST_FLAGS) $(ROUNDED)
	MKL_CBWR=AVX2 $(PARALLEL) $(PY) -m pytest $(PYTEST_PARALLEL) $(PYTEST_FLAGS) $(ROUNDED)

# -m "" lifts the default selection, which leaves the slow tests out
check: lint
	$(PARALLEL) $(PY) -m pytest $(PYTEST_PARALLEL) -m "" $(PYTEST_FLAGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(READY)
	$(PY) kernels/benchmarks/layer.py $(BENCH_FLAGS)

gpu: $(READY)
	$(PY) kernels/benchmarks/gpu.py $(GPU_FLAGS)

readme: $(READY)
	$(PY) -m experiments.readme

docs: $(READY)
	$(if $(READY),$(PIP_INSTALL) -e ".[docs]")
	rm -rf build/pages && mkdir -p build/pages
	git ls-files "*.md" "*.png" | tar cf - -T - | tar xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

report: $(READY)
	$(if $(READY),$(PIP_INSTALL) -e ".[docs]")
	$(PY) -m experiments.results_html

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
