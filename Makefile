# make lab | demo | test | mutants | sync | diagrams | publish REPO=owner/name | wheel
# Another Python: make PYTHON=python3.12 lab

PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/python -m
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)  # in a container

.PHONY: help lab demo test mutants sync diagrams screens publish wheel
.DELETE_ON_ERROR:

help:
	@echo "make lab       set up, fetch the model, open the course in JupyterLab"
	@echo "make demo      set up, fetch the model, answer a question in the terminal"
	@echo "make test      set up and run everything CI runs"
	@echo "make mutants   run every exercise's check on mutants of right answers (about 15 minutes)"
	@echo "make sync      bring twins, lands cells and notebooks into step"
	@echo "make diagrams  draw the pictures again"
	@echo "make screens   take the README's picture of JupyterLab again (needs Chromium)"
	@echo "make publish REPO=owner/name   stamp badges and set-up cells"
	@echo "make wheel     build dist/nanoserve-*.whl"

lab: .venv/.course
	@$(RUN) nanoserve fetch
	@$(RUN) nanoserve course start
	@$(RUN) jupyter lab $(AS_ROOT) work/day00_start_here.ipynb

demo: .venv/.engine
	@$(RUN) nanoserve chat --max-tokens 200 "What is gravity?"

test: .venv/.dev
	@$(BIN)/python tests/run_all.py

mutants: .venv/.dev
	@$(RUN) tests.mutants --report $(ARGS)

sync: .venv/.dev
	@$(RUN) nanoserve.course.sync $(ARGS)

diagrams: .venv/.dev
	@$(BIN)/python diagrams/make.py

screens: .venv/.dev
	@NANOSERVE_SCREENSHOTS=diagrams/screens $(RUN) pytest -q tests/browser

publish: .venv/.dev
	@$(RUN) nanoserve.course.publish "$(REPO)"

wheel: .venv/.engine
	@$(RUN) pip wheel --quiet --no-deps --wheel-dir dist . && ls dist/nanoserve-*.whl

# A stamp says what the environment holds; each includes the one before, so that `make demo` after
# `make test` installs nothing.
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
	  echo "Could not make .venv here: is there room on the disk, and may you write to this folder?"; exit 1; }
	@echo "Installing nanoserve into .venv (the first time: PyTorch too, which takes minutes)"
	@$(RUN) pip install --disable-pip-version-check --no-input -c constraints.txt -e "$(WHAT)" || { \
	  echo "pip could not install nanoserve; its reason stands above. Check the network and the disk, then run make again."; exit 1; }
	@touch $@ $(ALSO)
