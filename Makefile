# `make demo` and `make test` do everything on a machine with Python, gcc and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed

.PHONY: demo test test-slow check benchmark clean

demo: $(INSTALLED)
	$(BIN)/pbsim run mesh digits_cnn --method pb+lwpv+sc --out runs/demo --force

test: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow"

test-slow: $(DEVELOPED)
	$(BIN)/pytest -m slow

benchmark: $(DEVELOPED)
	$(BIN)/python benchmarks/timing_engines.py
	$(BIN)/python benchmarks/cifar_resnet20.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEVELOPED): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
