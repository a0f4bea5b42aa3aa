# Everything a person or CI does here. A fresh machine needs Python 3.10+, pip, a C++ compiler and git; no more.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-msprobe
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))
PYTEST := $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal
BENCHMARKS := $(filter-out benchmarks/gpt.py benchmarks/tables.py benchmarks/paddle_cpu.py,$(wildcard benchmarks/*.py))

unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of interpreters: without it each compiles astray again

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-paddle docs browser check sanitize sanitize-threads format peers bench clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

NATIVE := $(wildcard src/astray/stats/native/*) $(wildcard src/astray/stats/*.h src/astray/device/_launch.* src/astray/store/run_format/*.h src/astray/store/run_format/*.cpp) \
	$(wildcard src/astray/capture/native/*.h src/astray/capture/*/native/*)

$(READY): pyproject.toml setup.py constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing astray and its tools into $(VENV) (once; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m astray.capture.pytorch.native.build
	@touch $@

PAGE := src/astray/web/static/page.js

$(PAGE): $(wildcard page/*.* page/src/* page/src/views/* page/styles/*) | $(READY)
	@$(BIN)/python page/build.py || true  # it says what is missing; everything else works without the page

demo: $(READY) $(PAGE)  ## Train a small GPT twice, plant a fault in the second run, and find it
	@$(BIN)/python examples/demo.py

# The tests of the page drive Debian's chromium; where it cannot be had they are left out, and say so.
browser:
	@if ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null && test "$$(id -u)" = 0 && \
	  command -v apt-get >/dev/null; then echo "installing chromium for the tests of the page (once)"; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 || true; fi

test: $(READY) $(PAGE) browser  ## Run the tests, without the slow ones (a few minutes)
	@$(PYTEST) -m "not slow"

test-slow: $(READY) $(PAGE) browser  ## Run the slow tests, which CI runs too; some of them beside the real msprobe
	@$(MAKE) --no-print-directory peers || echo "MISSING: msprobe could not be installed; tests beside it will not run" >&2
	@$(PYTEST) -m slow

# Paddle and what its tests need have an environment of their own: it is large, and nothing else here needs it.
PADDLE := .venv-paddle
PADDLE_TESTS = $(shell find tests -name 'test_paddle_*.py')

$(PADDLE)/.ready: pyproject.toml setup.py constraints.txt $(NATIVE)
	@test -x $(PADDLE)/bin/python || $(PYTHON) -m venv $(PADDLE)
	@echo "installing astray, Paddle and torch into $(PADDLE) (once; a minute or two)"
	@$(PADDLE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[paddle]' torch pytest pytest-xdist hypothesis pandas pyarrow safetensors starlette uvicorn
	@$(PADDLE)/bin/python -W ignore -m astray.capture.paddle.native.build
	@touch $@

test-paddle: $(PADDLE)/.ready  ## Run the tests of Paddle programs, in an environment of their own
	@$(PADDLE)/bin/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal -m paddle $(PADDLE_TESTS)

# The tools of the site are the extra `docs` of pyproject.toml. They are installed when the site is first asked for.
DOCS := $(VENV)/.docs

$(DOCS): pyproject.toml constraints.txt | $(READY)
	@echo "installing the tools of the documentation into $(VENV) (once; half a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr ',' ' ')
	@touch $@

docs: $(DOCS)  ## Build the site of the documentation into site/, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the documentation is in site/index.html"

check: $(READY)  ## Lint, check the format and the types, of the page too
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python page/build.py --check

# The native parts are built apart, so that nothing else meets them. The sanitizers' libraries have to be there before
# anything else, with the one of C++ whose exceptions they look after. pytest keeps what a process says to itself, so what
# they find goes into a file for each process: one alone fails the run. Leaks: Python itself leaves too much behind.
SANITIZED = $(CURDIR)/$(VENV)/$@
COMPILED_BY = CC="cc -g1 -fno-omit-frame-pointer -fsanitize=$(SANITIZERS)" CXX="c++ -g1 -fno-omit-frame-pointer -fsanitize=$(SANITIZERS)"
SANITIZED_TESTS := $(addprefix tests/,sanitizers store/run_format/test_rows.py store/run_format/test_encoder.py device/test_native_measurer.py \
	capture/test_structure.py $(addprefix capture/pytorch/,native/test_tensor_observer.py native/test_calls.py native/test_hooks.py \
	native/test_call_gradients.py native/test_function_gradients.py native/test_node_gradients.py native/test_finalizer.py \
	test_value_numbers.py test_signals.py test_hard_programs.py test_copies.py calls/test_modules.py calls/test_functions.py \
	calls/test_unusual_modules.py))

define RUN_SANITIZED
	@$(COMPILED_BY) $(BIN)/python setup.py -q build --build-base $(SANITIZED)/base --build-lib $(SANITIZED)/lib
	@$(COMPILED_BY) ASTRAY_CACHE=$(SANITIZED)/cache $(BIN)/python -m astray.capture.pytorch.native.build
	@rm -f $(SANITIZED)/found.*
	@$(FIXED) env LD_PRELOAD="$(foreach name,$(LIBRARIES) stdc++,$(shell c++ -print-file-name=lib$(name).so))" $(COMPILED_BY) \
	  $(OPTIONS) PYTHONMALLOC=malloc PYTHONPATH=$(SANITIZED)/lib ASTRAY_CACHE=$(SANITIZED)/cache \
	  $(BIN)/python -m pytest -q -p no:xdist -p no:cacheprovider -m "not slow and not gpu" $(TESTS); \
	  status=$$?; ! cat $(SANITIZED)/found.* 2>/dev/null && exit $$status
endef

sanitize: SANITIZERS := address,undefined
sanitize: LIBRARIES := asan ubsan
sanitize: OPTIONS = ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:log_path=$(SANITIZED)/found \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:log_path=$(SANITIZED)/found
sanitize: TESTS := $(SANITIZED_TESTS)
sanitize: $(READY)  ## Run the tests of the native code under the address and undefined-behaviour sanitizers (six minutes)
	$(RUN_SANITIZED)

# Python and torch are not instrumented. What their mutexes order is seen, the interpreter's lock above all; what their
# atomics do is not (tests/sanitizers/threads.supp). Bugs of mutexes: we have none, and torch destroys some at the end of a
# process while threads still have them. A forked child is not looked at, and dies where it starts threads, as the worker
# of a data loader does. The library of an older compiler needs addresses that are not random.
THREADED_TESTS := $(addprefix tests/,stats/test_native.py stats/test_moments_native.py device/test_launcher.py device/test_slots.py \
	device/test_staging.py store/writing/test_flight_recorder.py store/writing/test_record_queue.py store/writing/test_step_listener.py \
	store/writing/test_dying_threads.py guarding/test_exact.py capture/test_selection.py \
	capture/pytorch/test_device_tensors.py capture/pytorch/experiments/test_perturbation.py)

sanitize-threads: SANITIZERS := thread
sanitize-threads: LIBRARIES := tsan
sanitize-threads: FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)
sanitize-threads: OPTIONS = TSAN_OPTIONS=suppressions=$(CURDIR)/tests/sanitizers/threads.supp:print_suppressions=0:report_mutex_bugs=0$\
	:die_after_fork=0:history_size=5:log_path=$(SANITIZED)/found
sanitize-threads: TESTS := $(SANITIZED_TESTS) $(THREADED_TESTS) \
	--deselect tests/capture/pytorch/calls/test_modules.py::test_workers_of_a_data_loader_do_not_record
sanitize-threads: $(READY)  ## Run them, and those of threads, under the thread sanitizer (nine minutes)
	$(RUN_SANITIZED)

format: $(READY)  ## Format the code and mend what the linter can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

$(PEERS)/.ready: benchmarks/peers/requirements.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing msprobe and its torch into $(PEERS) (once; a few minutes, 1.5 GB)"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

peers: $(PEERS)/.ready  ## Make the environment of the tool that benchmarks/capture_cpu.py compares with

bench: $(READY) $(PAGE) browser  ## Measure everything, beside peers where there are some; prints tables for benchmarks/RESULTS.md
	@$(MAKE) --no-print-directory peers || echo "MISSING: msprobe could not be installed; its columns will be empty" >&2
	@for script in $(BENCHMARKS); do echo "## $$script"; $(BIN)/python $$script || exit 1; done
	@echo "## benchmarks/paddle_cpu.py"; $(MAKE) --no-print-directory $(PADDLE)/.ready && $(PADDLE)/bin/python benchmarks/paddle_cpu.py

clean:  ## Remove the virtual environment and what was built
	rm -rf $(VENV) $(PEERS) build dist src/*.egg-info src/astray/*/*.so src/astray/*/*/*.so src/astray/*/*/*/*.so \
	  src/astray/web/static page/node_modules runs out site
