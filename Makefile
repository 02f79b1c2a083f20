# Two commands on a fresh machine with Python >= 3.11 and a C++ compiler:
#   make serve   build what is needed, fetch the default model, serve it at http://127.0.0.1:8000
#   make test    build what is needed, then lint, type-check and test
# More flags for the server: make serve ARGS="--port 9000 --dtype float32"
# The rest:
#   make lint, make unit         the two halves of make test
#   make gpu-check               the model tests on a GPU
#   make selftest, arm-check     the kernels without Python: of this CPU, of Arm by emulation
#   make docs, make wheel        docs/flags.md, dist/
#   make clean                   removes what make made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What tests compare with. Where there is a GPU it also computes; a CPU needs none.
TORCH := torch==2.13.0
GPU := $(wildcard /dev/nvidiactl)
NATIVE := $(shell find cuda_ext -type f) pyproject.toml

.PHONY: serve test help lint unit gpu-check selftest arm-check wheel docs clean

serve: $(VENV)/.installed
	@$(BIN)/streamkv serve $(ARGS) || { rc=$$?; \
	  case $$rc in 130 | 143) ;; *) exit $$rc ;; esac; }  # Ctrl-C and SIGTERM are its end

test: lint unit

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

# On a machine with CUDA: the model tests on the GPU.
gpu-check: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -v $(ARGS)

# Every kernel of every instruction set of this CPU, without Python. Needs CMake.
SELFTEST := -S cuda_ext -DSTREAMKV_MODULE=OFF -DSTREAMKV_SELFTEST=ON

selftest:
	@cmake -B build/selftest $(SELFTEST) >/dev/null
	@env -u MAKEFLAGS -u MAKELEVEL cmake --build build/selftest --parallel $$(nproc)
	@build/selftest/streamkv_selftest $(ARGS)

# The same for 64-bit Arm, by emulation. Debian: g++-aarch64-linux-gnu qemu-user-static cmake.
arm-check:
	@cmake -B build/arm $(SELFTEST) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
	@env -u MAKEFLAGS -u MAKELEVEL cmake --build build/arm --parallel $$(nproc)
	@qemu-aarch64-static -L /usr/aarch64-linux-gnu build/arm/streamkv_selftest $(ARGS)

# docs/flags.md, from the fields of streamkv/config.py.
docs: $(VENV)/.installed
	@$(BIN)/python -m streamkv.flags_page > docs/flags.md

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamkv needs Python 3.11 or newer: make PYTHON=python3.12 serve")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(NATIVE)
	@echo "fetching what streamkv needs and compiling its kernels: a few minutes, without a word"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . $(if $(GPU),"$(TORCH)")
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the test tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	@touch $@

clean:
	rm -rf $(VENV) build dist
