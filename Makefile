# `make` lists what there is to do. Nothing here needs a GPU, a vLLM or a Prometheus of yours.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find exporter dashboards -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help run test check lab bench golden dashboards lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/run.stamp ## watch a replay of a real vLLM; TARGET=http://host:8000 or CONFIG=file.yaml: yours
	@exec $(BIN)/kvheadroom $(if $(TARGET)$(CONFIG),serve $(if $(TARGET),--target "$(TARGET)") $(if $(CONFIG),--config "$(CONFIG)"),demo) $(if $(LISTEN),--web.listen-address "$(LISTEN)")

test: check ## every test; the first time installs a real vLLM (2.5 GB) outside the clone
	@bash tests/system_packages.sh || [ "$$CI" != true ]
	$(BIN)/pytest $(PYTEST)

check: $(VENV)/tests.stamp ## formatting, lint, types, import contracts, generated files
	$(BIN)/ruff format --check --quiet exporter dashboards tests
	$(BIN)/ruff check --quiet exporter dashboards tests
	$(BIN)/mypy
	@told=$$($(BIN)/lint-imports pyproject.toml) || { echo "$$told"; exit 1; }; echo "import contracts kept"
	$(BIN)/python -m dashboards.build --check
	$(BIN)/python docs/reference.py --check
	$(BIN)/python -m docs.accuracy --check

lab: $(VENV)/tests.stamp ## long work: a soak, long fuzzing, pictures to look at, recordings made anew (an hour); PYTEST="-k burst": one
	@bash tests/system_packages.sh --lab
	$(BIN)/pytest -m lab -s $(PYTEST)

bench: $(VENV)/tests.stamp ## speed, as ratios against a peer in the same run
	@bash tests/system_packages.sh || true
	$(BIN)/python -m tests.bench.scan_page
	$(BIN)/python -m tests.bench.plan
	$(BIN)/python -m tests.bench.server_cost
	$(BIN)/python -m tests.bench.pages
	$(BIN)/python -m tests.bench.fleet

golden: $(VENV)/tests.stamp ## write the expected outputs anew, after a change that is meant
	KVHEADROOM_UPDATE_GOLDEN=1 $(BIN)/pytest -q tests/outputs tests/test_calibrate.py tests/lab/backtest/test_results.py
	$(BIN)/python docs/reference.py
	$(BIN)/python -m docs.accuracy

dashboards: $(VENV)/tests.stamp ## write the Grafana dashboards anew
	$(BIN)/python -m dashboards.build

lock: $(VENV)/tests.stamp ## lock the versions of all dependencies anew
	$(BIN)/python tests/lock.py

clean: ## remove what was built here; the cache outside the clone stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist

# A virtual environment needs Python 3.11 with venv; on Debian and Ubuntu that is a package of its own.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed as $(PYTHON): apt install python3, or make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv is missing: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The package is installed as its users get it, not linked: a file that the wheel lacks fails here first.
$(VENV)/run.stamp: requirements.lock pyproject.toml README.md LICENSE $(SOURCES) | $(VENV)/bin/python
	@echo "installing kvheadroom into $(VENV)"
	@$(PIP) install --quiet --require-hashes -r requirements.lock
	@$(PIP) install --quiet --no-deps --force-reinstall .
	@touch $@

$(VENV)/tests.stamp: tests/requirements.lock pyproject.toml README.md LICENSE $(SOURCES) | $(VENV)/bin/python
	@echo "installing kvheadroom and its tests' tools into $(VENV)"
	@$(PIP) install --quiet --require-hashes -r tests/requirements.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall .
	@touch $@ $(VENV)/run.stamp
