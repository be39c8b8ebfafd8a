# Every target sets up what it needs: python3 (3.11 or later) with pip and venv is all a fresh machine must have.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp per Python version: with another PYTHON the environment is made anew.
READY := $(VENV)/.ready-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
DOCS_READY := $(VENV)/.docs-ready
# Exact: equal specs train equal weights only with equal kernels. doctor checks for the same version.
TORCH := torch==2.13.0
BENCHES := $(wildcard bench/*.py bench/*/*.py)
# Three processes for two cores, because tests wait for processes that they start; a file's tests stay in one
# process; this order does not leave the long files to the end.
WORKERS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() * 3 // 2)')
PYTEST_ARGS ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

# Half of what pip installs, which nearly no test imports: what is imported after all is compiled then.
RARELY_IMPORTED := /(tests?|testing|_inductor|_dynamo|onnx|transformers/models|graph_objs|sympy|networkx|rllib|mypy|pip)/
# Tests start many processes: what one of them has compiled, also pytest's own form of the tests, the others read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check types collected compiled pytest fleet-test coverage fuzz soak chaos format docs results clean
.DELETE_ON_ERROR:

# A coordinator and four workers train a small model on this machine, three stages and a gateway serve it.
demo: $(READY)
	$(BIN)/blocktrain demo

# What CI runs.
test: check

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory -j 2 collected fleet-test  # the one waits much, the other has one process
	$(MAKE) --no-print-directory pytest

types: $(READY)
	$(BIN)/mypy src $(BENCHES)

# Pytest compiles the tests in a way of its own. It takes a third of collecting them, which each of its processes does.
collected: types compiled
	@$(BIN)/pytest --collect-only -qq > /dev/null || true  # what is wrong with a test is told when it runs

# Before many processes start at once and each compiles the same.
compiled: $(READY)
	@$(BIN)/python -m compileall -qq src bench

pytest: compiled
	$(BIN)/pytest $(PYTEST_ARGS) --ignore=tests/e2e/test_fleet.py

# A fleet on a Ray cluster of two nodes on this machine: not beside the others, because its processes need the cores.
fleet-test: compiled
	$(BIN)/pytest tests/e2e/test_fleet.py

# How much of the package the tests run, with all processes that they start; fails below the floor in pyproject.toml.
coverage: compiled
	rm -f .coverage .coverage.*
	$(BIN)/pytest $(PYTEST_ARGS) --cov --cov-report= --cov-fail-under=0  # the report below decides
	$(BIN)/coverage report

# Every parser of foreign bytes gets changed inputs for FUZZ_SECONDS each. The tests replay tests/fuzz/corpus.
FUZZ_SECONDS ?= 60
fuzz: $(READY)
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(FUZZ_SECONDS)

# The simulator's seeds until Ctrl-C, on every core; SOAK_ARGS="--seeds 500" runs so many.
soak: $(READY)
	$(BIN)/python tests/sim/soak.py $(SOAK_ARGS)

# Real processes behind a bad network, killed and stopped at random, for CHAOS_SECONDS; each run is verified at its end.
CHAOS_SECONDS ?= 3600
chaos: $(READY)
	$(BIN)/python tests/e2e/chaos.py --seconds $(CHAOS_SECONDS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents as a site in site/, which works without a server and without a network. Broken links are errors.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# docs/results.md and its pictures, made of the files in bench/results; the pictures take a Chromium.
results: $(READY)
	$(BIN)/python bench/page.py

clean:
	rm -rf $(VENV) demo-run build dist site src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself, so that no other requirement chooses its build. The stamp is written last: a broken
# installation is started again, a finished one is used until pyproject.toml changes.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: install a later one, or run make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $$([ -e $@ ] || echo --clear) $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --editable ".[dev]"
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARELY_IMPORTED)' $(VENV)/lib || true  # some files are no programs
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[docs]"
	@touch $@
