# `make run` starts Shoal, `make test` checks it; both set up .venv first, once: with what Shoal runs with, and for the
# tests with their tools as well. SHOAL_TORCH=cpu, cuda or an index's address chooses torch (packaging/setup_venv.py).
# Plain GNU make 3.81, so that the one macOS ships will do.

CANDIDATES = python3.11 python3.12 python3.13 python3 python
IN_RANGE = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
VENV_PYTHON = .venv/bin/python
RUN_STAMP = .venv/setup.stamp
TEST_STAMP = .venv/test.stamp
RELEASE_STAMP = .venv/release.stamp
NEEDS = pyproject.toml constraints.txt packaging/setup_venv.py $(if $(SHOAL_TORCH),FORCE)

# Hundreds of processes that each compile every module again would take minutes of the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup run test lint types unit soak bench docs bundle release clean FORCE

help:
	@echo "make run     set up and start Shoal"
	@echo "make test    set up, then ruff, mypy and pytest"
	@echo "make soak    the long tests"
	@echo "make bench   the engine's benchmark beside transformers"
	@echo "make docs    write the generated pages of docs/ again"
	@echo "make bundle  a folder with Shoal that needs no Python, for this system, in dist/"
	@echo "make release everything of a release, in dist/ (KEY=FILE signs it)"
	@echo "make setup   build .venv (PYTHON=python3.12 picks the interpreter)"
	@echo "make clean   remove .venv and caches"

setup: $(RUN_STAMP)

# A Python that exists only as a version manager's stub fails the range check too, and is passed over.
define SET_UP
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		for candidate in $(CANDIDATES); do \
			if "$$candidate" -c "$(IN_RANGE)" >/dev/null 2>&1; then python="$$candidate"; break; fi; \
		done; \
	fi; \
	if [ -z "$$python" ]; then \
		echo "setup: no Python 3.11, 3.12 or 3.13 was found; install one, then run make again" >&2; exit 1; \
	fi; \
	"$$python" packaging/setup_venv.py
endef

$(RUN_STAMP): $(NEEDS)
	$(SET_UP)

$(TEST_STAMP): $(NEEDS)
	$(SET_UP) test

$(RELEASE_STAMP): $(NEEDS)
	$(SET_UP) release

FORCE:

run: $(RUN_STAMP)
	@$(VENV_PYTHON) -m app.cli

# mypy waits for one core while the tests wait for processes and clocks: together they fill two.
test: lint
	@$(MAKE) -j 2 types unit

lint: $(TEST_STAMP)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

types: $(TEST_STAMP)
	$(VENV_PYTHON) -m mypy

# Many tests wait for other processes or for a clock: four files at a time fill two cores. The first line compiles all
# modules once, which each of the four would do for itself.
unit: $(TEST_STAMP)
	@$(VENV_PYTHON) -m pytest --collect-only -qq >/dev/null 2>&1 || true
	$(VENV_PYTHON) -m pytest -n 4 --dist loadfile --no-loadscope-reorder

soak: $(TEST_STAMP)
	$(VENV_PYTHON) -m pytest -m soak --timeout 7200

bench: $(TEST_STAMP)
	$(VENV_PYTHON) -m tests.bench.engine

docs: $(RUN_STAMP)
	$(VENV_PYTHON) packaging/docs.py

bundle: $(RELEASE_STAMP)
	$(VENV_PYTHON) packaging/bundle.py

release: $(RELEASE_STAMP)
	$(VENV_PYTHON) packaging/release.py $(if $(KEY),--key "$(KEY)") $(if $(URL),--url "$(URL)") $(if $(LIST),--list "$(LIST)")

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
