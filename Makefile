# make bench   the ladder on real logits and a sweep of widths; OUT=folder, ARGS="--widths 1024,4096 --dtype bfloat16"
# make test    the whole CPU suite, what CI runs
# Both create VENV with PYTHON and install the pinned requirements, once. With VENV= (empty) PYTHON is used as it is
# and nothing is installed: for a machine that has torch and triton already.
PYTHON ?= python3
VENV ?= .venv
OUT ?= out
ARGS ?=
# interpreted tests that run at a time
JOBS ?= 2

OLD_TRITON := 3.6.0
OLD_TRITON_DIR := $(or $(VENV),.venv)/triton-$(OLD_TRITON)

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif
RUN := PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY)
PIP = $(PY) -m pip --disable-pip-version-check --no-input

.PHONY: help bench test test-extended setup lint types interpreted compiled compiled-old gpu readme readme-check docs clean
.NOTPARALLEL:

help:
	@sed -n '/^#/!q;s/^# //p' Makefile

bench: $(READY)
	$(RUN) -m fused_softmax bench --out $(OUT) $(ARGS)

test: lint types interpreted compiled compiled-old readme-check

setup: $(READY)

# torch goes first, from whatever index serves it: what follows is held to that version by the constraints
$(VENV)/.installed: requirements/ci.txt requirements/constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10: name another with PYTHON=..."; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@echo "installing the pinned requirements into $(VENV), once"
	$(PIP) install -c requirements/constraints.txt torch
	$(PIP) install -r requirements/ci.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

interpreted: $(READY)
	TRITON_INTERPRET=1 $(RUN) -m pytest -q -n $(JOBS) -m "not compiled and not gpu" $(ARGS)

# what takes minutes: every planted fault with three seeds
test-extended: $(READY)
	FUSED_SOFTMAX_EXTENDED=1 TRITON_INTERPRET=1 $(RUN) -m pytest -q -n $(JOBS) -m extended $(ARGS)

compiled: $(READY)
	env -u TRITON_INTERPRET $(RUN) -m pytest -q -m compiled $(ARGS)

# the kernels compile under the older triton too; it lies beside the pinned one and is found first
compiled-old: $(READY) $(OLD_TRITON_DIR)/.installed
	env -u TRITON_INTERPRET PYTHONPATH=$(OLD_TRITON_DIR):src $(PY) -m pytest -q -m compiled $(ARGS)

$(OLD_TRITON_DIR)/.installed: | $(READY)
	$(PIP) install -q --no-deps --target $(OLD_TRITON_DIR) triton==$(OLD_TRITON)
	@touch $@

gpu: $(READY)
	env -u TRITON_INTERPRET $(RUN) -m pytest -q -m gpu $(ARGS)

readme: $(READY)
	$(RUN) -m fused_softmax report --readme

readme-check: $(READY)
	$(RUN) -m fused_softmax report --check

docs: $(READY)
	$(PIP) install -q -r requirements/docs.txt
	$(RUN) docs/write_lessons.py
	$(PY) -m mkdocs build --strict

clean:
	rm -rf $(OUT) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
