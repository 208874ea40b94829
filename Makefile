# make lab | demo | test | test-machines | test-oldest | test-newest | mutants | sync | diagrams | publish REPO=owner/name | wheel
# Another Python: make PYTHON=python3.12 lab

PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/python -m
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)  # in a container

# The Pythons of test-oldest and test-newest. NEWEST is the newest Python found, pyenv's included.
OLDEST ?= python3.11
NEWEST ?= $(shell for v in 3.15 3.14 3.13 3.12 3.11; do \
  for p in python$$v $$HOME/.pyenv/versions/$$v.*/bin/python3; do \
    $$p -c '' 2>/dev/null && echo $$p && exit; done; done)
QUIETLY := --quiet --disable-pip-version-check --no-input

.PHONY: help lab demo test test-machines test-oldest test-newest mutants sync diagrams screens publish wheel
.DELETE_ON_ERROR:

help:
	@echo "make lab            install, fetch the model, open the course in JupyterLab"
	@echo "make demo           install, fetch the model, answer a question in the terminal"
	@echo "make test           install, then run all tests that CI runs"
	@echo "make test-machines  run the notebooks with the settings of other processors (about 25 minutes)"
	@echo "make test-oldest    run the tests on the oldest versions that pyproject.toml allows"
	@echo "make test-newest    run the tests on the newest versions and the newest Python found"
	@echo "make mutants        test the exercises' checks with mutants of right answers (about 15 minutes)"
	@echo "make sync           update lands cells and notebooks; run the notebooks whose code changed"
	@echo "make diagrams       draw the pictures again"
	@echo "make screens        take the README's screenshots of JupyterLab again (needs Chromium)"
	@echo "make publish REPO=owner/name   write the repository into badges and set-up cells"
	@echo "make wheel          build dist/nanoserve-*.whl"

lab: .venv/.course
	@$(RUN) nanoserve fetch
	@$(RUN) nanoserve course start
	@$(RUN) jupyter lab $(AS_ROOT) work/day00_start_here.ipynb

demo: .venv/.engine
	@$(RUN) nanoserve chat --max-tokens 200 "What is gravity?"

test: .venv/.dev
	@$(BIN)/python tests/run_all.py

test-machines: .venv/.dev
	@$(BIN)/python tests/run_all.py machines

# These two targets create separate environments. On Linux with an x86-64 processor, pip installs
# PyTorch's CUDA build: each environment needs about 6 GB.
test-oldest: .venv-oldest/.dev
	@.venv-oldest/bin/python tests/run_all.py versions

test-newest:
	@test -n "$(NEWEST)" || { echo "No Python 3.11 or newer found. Name one: make NEWEST=python3 $@"; exit 1; }
	@.venv-newest/bin/python -c '' 2>/dev/null || $(NEWEST) -m venv --clear .venv-newest
	@echo "Updating .venv-newest ($(NEWEST))"
	@.venv-newest/bin/python -m pip install $(QUIETLY) --upgrade --upgrade-strategy eager -e ".[dev]"
	@.venv-newest/bin/python tests/run_all.py versions

.venv-oldest/.dev: pyproject.toml tests/oldest.py
	@$(OLDEST) -c '' 2>/dev/null || { echo "$(OLDEST) not found. Name another: make OLDEST=python3.12 $@"; exit 1; }
	@$(OLDEST) -m venv --clear .venv-oldest
	@echo "Installing the oldest versions that pyproject.toml allows into .venv-oldest"
	@.venv-oldest/bin/python -m pip install $(QUIETLY) packaging
	@.venv-oldest/bin/python tests/oldest.py > .venv-oldest/oldest.txt
	@.venv-oldest/bin/python -m pip install $(QUIETLY) -c .venv-oldest/oldest.txt -e ".[dev]"
	@touch $@

mutants: .venv/.dev
	@$(RUN) tests.mutants --report $(ARGS)

sync: .venv/.dev
	@$(RUN) nanoserve.course.sync $(ARGS)

diagrams: .venv/.dev
	@$(BIN)/python diagrams/make.py

screens: .venv/.dev
	@NANOSERVE_SCREENSHOTS=diagrams/screens $(RUN) pytest -q tests/browser/test_lab.py

publish: .venv/.dev
	@$(RUN) nanoserve.course.sync --stamp "$(REPO)"

wheel: .venv/.engine
	@$(RUN) pip wheel --quiet --no-deps --wheel-dir dist . && ls dist/nanoserve-*.whl

# A stamp file marks an installed set of packages. A larger set touches the smaller sets' stamps too,
# so `make demo` after `make test` installs nothing.
.venv/.engine: WHAT := .
.venv/.course: WHAT := .[course]
.venv/.course: ALSO := .venv/.engine
.venv/.dev: WHAT := .[dev]
.venv/.dev: ALSO := .venv/.engine .venv/.course

.venv/.engine .venv/.course .venv/.dev: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "nanoserve needs Python 3.11 or newer; $(PYTHON) is not. If another is installed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv || { \
	  echo "Could not create .venv here. Check the free disk space and your right to write in this folder."; exit 1; }
	@echo "Installing nanoserve into .venv (the first time: PyTorch too, which takes minutes)"
	@$(RUN) pip install --disable-pip-version-check --no-input -c constraints.txt -e "$(WHAT)" || { \
	  echo "pip could not install nanoserve; the lines above give the reason. Check the network and the disk, then run make again."; exit 1; }
	@touch $@ $(ALSO)
