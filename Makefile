# Two commands on a fresh machine with Python >= 3.11 and a C++ compiler:
#   make serve   build what is needed, fetch the default model, serve it at http://127.0.0.1:8000
#   make test    build what is needed, then lint, type-check and test
# More flags for the server: make serve ARGS="--port 9000 --dtype float32"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
NATIVE := $(shell find cuda_ext -type f) pyproject.toml

.PHONY: serve test lint unit gpu-check wheel clean

serve: $(VENV)/.installed
	@$(BIN)/streamkv serve $(ARGS)

test: lint unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

# On a machine with CUDA: the model tests on the GPU.
gpu-check: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -v $(ARGS)

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamkv needs Python 3.11 or newer: make PYTHON=python3.12 serve")'
	@echo "installing $(TORCH) into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"

$(VENV)/.installed: $(VENV)/bin/python $(NATIVE)
	@echo "building streamkv (about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . "$(TORCH)"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the test tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	@touch $@

clean:
	rm -rf $(VENV) build dist
