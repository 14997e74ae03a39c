# make bench   the ladder on real logits and a sweep of widths; OUT=folder, ARGS="--widths 1024,4096 --dtype bfloat16"
# make test    the whole CPU suite with the pinned versions
# make test-extended    what takes longer: other versions of torch and Triton, the site, tests marked `extended`
# Both create VENV with PYTHON and install the pinned requirements, once. With VENV= (empty) PYTHON is used as it is
# and nothing is installed: for a machine that has torch and triton already.
PYTHON ?= python3
VENV ?= .venv
OUT ?= out
ARGS ?=
# tests that run at a time
JOBS ?= 2

# what `make test` runs, in this order; it prints how long each took
STAGES := lint interpreted compiled-and-checks
EXTENDED_STAGES := typed-uses docs packages compiled-targets compiled-others interpreted-newest programs extended
# Tritons that the kernels are compiled with besides the pinned one, by the tests of the planner's kernels and of what
# versions change; and torches below the floor
OTHER_TRITONS ?= 3.6.0 newest
OTHER_TESTS ?= --tests $(addprefix tests/kernels/test_compiled_,kernels.py versions.py layouts.py)
OLD_TORCHES ?= 2.4.1 2.6.0 2.8.0

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif
RUN := PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY)
PIP = $(PY) -m pip --disable-pip-version-check --no-input

# each process gets neighboring tests, which share a fixture, and takes tests from another when it has none left
SPREAD := -n $(JOBS) --dist worksteal

VERSIONS := $(RUN) tests/extended/versions.py
PAGES := PYTHONPATH=src:tools$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m pages

# runs each stage and prints its seconds, and those of all; stops at the first that fails
define run_stages
	@begin=$$(date +%s); for stage in $(1); do \
	  start=$$(date +%s); \
	  $(MAKE) --no-print-directory $$stage || { echo "== $$stage failed after $$(($$(date +%s) - start)) s"; exit 1; }; \
	  echo "== $$stage: $$(($$(date +%s) - start)) s"; \
	done; echo "== all: $$(($$(date +%s) - begin)) s"
endef

.PHONY: help bench test test-extended setup lint types checks interpreted compiled compiled-and-checks
.PHONY: compiled-targets compiled-others below-floor
.PHONY: interpreted-others interpreted-newest programs extended gpu pages pages-check docs typed-uses packages style clean
.NOTPARALLEL:

help:
	@sed -n '/^#/!q;s/^# //p' Makefile

bench: $(READY)
	$(RUN) -m fused_softmax bench --out $(OUT) $(ARGS)

test: $(READY)
	$(call run_stages,$(STAGES))

test-extended: $(READY)
	$(call run_stages,$(EXTENDED_STAGES))

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

lint: $(READY) style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# sentences and words of the pages and docstrings
style:
	$(PYTHON) tools/style.py

types: $(READY)
	$(PY) -m mypy

# what a typed program writes, against the package's annotations
typed-uses: $(READY)
	$(RUN) -m mypy --config-file= --strict tests/typed_uses.py

interpreted: $(READY)
	TRITON_INTERPRET=1 $(RUN) -m pytest -q $(SPREAD) -m "not compiled and not gpu and not extended" $(ARGS)

# a file stays in one process: the kernels that a fixture compiles are those of all tests in it
compiled: $(READY)
	env -u TRITON_INTERPRET $(RUN) -m pytest -q -n $(JOBS) --dist loadfile -m "compiled and not extended" $(ARGS)

# the compiled tests, and next to them the checks that take one core
compiled-and-checks: $(READY)
	@log=$$(mktemp); $(MAKE) --no-print-directory checks > $$log 2>&1 & checks=$$!; \
	trap 'kill $$checks 2>/dev/null; rm -f $$log; exit 130' INT TERM; \
	$(MAKE) --no-print-directory compiled; status=$$?; \
	wait $$checks || status=1; cat $$log; rm $$log; exit $$status

checks: $(READY)
	$(call run_stages,types pages-check)

# the planner's kernels for all six targets, and the other compiled tests marked `extended`
compiled-targets: $(READY)
	env -u TRITON_INTERPRET FUSED_SOFTMAX_EXTENDED=1 $(RUN) -m pytest -q -m compiled tests/kernels/test_compiled_kernels.py $(ARGS)
	env -u TRITON_INTERPRET FUSED_SOFTMAX_EXTENDED=1 $(RUN) -m pytest -q $(SPREAD) -m "compiled and extended" $(ARGS)

# the compiled tests with other Tritons, each put before the installed one
compiled-others: $(READY)
	$(VERSIONS) compiled $(OTHER_TRITONS) $(OTHER_TESTS) $(ARGS)

# fresh environments of torches that are too old for the kernels; no part of test-extended, as they download gigabytes
below-floor: $(READY)
	$(VERSIONS) below-floor $(OLD_TORCHES) $(ARGS)

# fresh environments of other torches that the kernels run with; no part of test-extended, as it takes half an hour
interpreted-others: $(READY)
	$(VERSIONS) interpreted 2.10.0 newest --jobs $(JOBS) $(ARGS)

# the interpreted tests of the ops with the newest Triton, put before the installed one
interpreted-newest: $(READY)
	$(VERSIONS) interpreted newest --installed-torch --jobs $(JOBS) $(ARGS)

# the integrations in the pinned and the newest transformers, TRL, kernels and torchtitan, and examples/
programs: $(READY)
	$(RUN) tests/extended/programs.py pinned newest --jobs $(JOBS) $(ARGS)

# tests marked `extended`
extended: $(READY)
	$(PIP) install -q -r requirements/browser.txt
	FUSED_SOFTMAX_EXTENDED=1 TRITON_INTERPRET=1 $(RUN) -m pytest -q $(SPREAD) -m "extended and not compiled and not gpu" $(ARGS)

# wheel and source distribution, built into dist/ and installed into an empty environment, extra by extra
packages: $(READY)
	$(PY) tests/extended/packages.py dist

gpu: $(READY)
	env -u TRITON_INTERPRET $(RUN) -m pytest -q -m gpu $(ARGS)

# rewrites README, the notebook, and every table between markers in docs/, from the records
pages: $(READY)
	$(PAGES)
	$(RUN) -m fused_softmax.lab.kernel_count

pages-check: $(READY)
	$(PAGES) --check
	$(RUN) -m fused_softmax.lab.kernel_count --check

docs: $(READY)
	$(PIP) install -q -r requirements/docs.txt
	$(PAGES) --site
	$(RUN) -m mkdocs build --strict
	@large=$$(find site -name '*.html' -size +1000k); test -z "$$large" || { echo "pages above 1 MB: $$large"; exit 1; }

clean:
	rm -rf $(OUT) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
