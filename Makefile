# Each target sets up what it needs. `make serve`, then `make test`.
# `make serve PORT=31000 MODEL=/models/qwen CONFIG=my.toml` serves another way.

VENV := .venv
PYTHON := $(VENV)/bin/python
UV := $(VENV)/bin/uv
SETUP_FILES := pyproject.toml hatch_build.py launch/cpu/pyproject.toml launch/cpu/overrides.txt Makefile

# Local wheels that pip knows of are for uv too; without any, torch's CPU build
# comes from where uv's --torch-backend finds it.
UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_FIND_LINKS
TORCH := $(if $(UV_FIND_LINKS),,--torch-backend=cpu)
EXTRAS := engine,epp,kubernetes,postgres,ray,redis,dev
# What there is of these decides what is installed, and so which stamp says that it is: torch is
# built for CUDA or for the CPU alone. nvidia-smi that fails is an error of `make serve`, not a CPU.
GPU := $(shell command -v nvidia-smi)
READY := $(VENV)/.ready$(if $(GPU),-gpu)
OTHER := $(VENV)/.ready$(if $(GPU),,-gpu)
# uv shows what it downloads, but not in a log of CI.
CALM := $(if $(CI),--quiet)

MODEL ?= .models/tiny
# One more than cores: a test often waits for another process.
TEST_PROCESSES ?= 3
INSTANCES ?= 2
AUDIT_URL ?= https://api.osv.dev/v1/querybatch
CONFIG ?= $(if $(GPU),launch/gpu.toml,launch/cpu.toml)
GPU_TESTS := $(addprefix tests/engine/,scheduler/test_pins.py scheduler/test_preemption.py scheduler/test_priority.py \
	scheduler/test_single_flight.py prefill_ahead/test_prefill.py)
BENCHES := $(patsubst bench/%.py,%,$(filter-out bench/__init__.py,$(wildcard bench/*.py)))

.PHONY: setup serve serve-ray check t test test-sglang test-speeds test-slow test-clients test-gpu gpu-report report pure lint audit constraints wheels bench clean

setup: $(READY)

$(READY): $(SETUP_FILES)
	@echo "Setting up $(VENV): SGLang, torch and the rest, several GB of downloads at the first time."
	python3 -m venv $(if $(wildcard $(OTHER)),--clear) $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check uv
ifeq ($(GPU),)
	$(UV) pip install $(CALM) --compile-bytecode --python $(PYTHON) $(TORCH) --overrides launch/cpu/overrides.txt -e '.[$(EXTRAS)]' -e launch/cpu
else
	$(UV) pip install $(CALM) --compile-bytecode --python $(PYTHON) -e '.[$(EXTRAS)]' -e launch/cpu
endif
	touch $(READY)

serve: setup
	$(if $(filter .models/%,$(MODEL)),$(PYTHON) -m sgl_ext_cpu.model $(MODEL) >/dev/null)
	$(PYTHON) -m sgl_ext.launch --config $(CONFIG) --model-path $(MODEL) $(if $(PORT),--port $(PORT))

# The same with Ray in between: a cluster of this machine alone, and engines on it.
serve-ray: setup
	$(if $(filter .models/%,$(MODEL)),$(PYTHON) -m sgl_ext_cpu.model $(MODEL) >/dev/null)
	launch/ray.sh $(PYTHON) --config $(CONFIG) --model-path $(MODEL) --instances $(INSTANCES)

# All but the tests that start SGLang or take long, in about a minute.
check: setup
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint pure

test: setup
	$(PYTHON) -m pytest -n $(TEST_PROCESSES)

# One part, in one process: `make t T=tests/radix`, `make t T="tests/engine -k pins"`.
t: setup
	$(PYTHON) -m pytest $(T)

# Whether tests of engines hold on a machine of any speed, in some hours: for before a release.
test-speeds: setup
	$(PYTHON) -m tests.speeds $(SPEEDS)

# Tests of engines with an older SGLang, in an environment of its own: docs/how/upstream.md.
SGLANG ?= 0.5.22
SGLANG_VENV := .sglang/$(SGLANG)
test-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_VENV)/bin/python -m pytest -n $(TEST_PROCESSES) $(or $(T),tests/engine tests/radix tests/scheduler)

$(SGLANG_VENV)/.ready: $(SETUP_FILES)
	$(MAKE) --no-print-directory setup
	python3 -m venv --clear $(SGLANG_VENV)
	$(UV) pip install $(CALM) --compile-bytecode --python $(SGLANG_VENV)/bin/python $(TORCH) \
		--overrides launch/cpu/overrides.txt -e '.[$(EXTRAS)]' -e launch/cpu sglang==$(SGLANG)
	touch $@

# The tests that take longest: benches, Ray, wheels, other kinds of engines, more of the fuzzers.
test-slow: setup
	$(PYTHON) -m pytest -n $(TEST_PROCESSES) -m slow

# All real clients, and the table of docs/reference/clients.md from what was measured.
test-clients: setup
	$(PYTHON) -m pytest -n $(TEST_PROCESSES) -m installs
	$(PYTHON) -m docs.clients_table

# Engine tests with engines on this machine's GPU; skipped without one: docs/how/measuring.md.
test-gpu: setup
	$(PYTHON) -m pytest --gpu $(GPU_TESTS)

# What this GPU machine is, what SGLang chooses on it, and whether our features hold there.
gpu-report: setup
	$(PYTHON) -m bench.gpu

# docs/measured.md and the README's table, measured here in about 45 minutes.
# `make report REPORT='--full --gpu'`; see `python -m bench.report --help`.
report: setup
	$(PYTHON) -m bench.report $(REPORT)

pure: setup
	$(PYTHON) -m pytest -n $(TEST_PROCESSES) -m "not engine and not long and not slow" --hypothesis-profile=quick

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(MAKE) --no-print-directory audit

# Names known vulnerabilities of installed packages; never fails. `AUDIT_URL=` leaves it out.
audit: setup
	$(PYTHON) -m launch.audit '$(AUDIT_URL)'

# What a release is installed with, beside SGLang: exact versions, with hashes.
constraints: setup
	env -u UV_FIND_LINKS $(UV) pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 \
		--generate-hashes --no-annotate --no-header --output-file launch/constraints.txt

# Both distributions, and what installs them, for machines that have no checkout: docs/guide/operations.md.
wheels: setup
	rm -rf dist
	$(PYTHON) -m hatchling build --target wheel --directory dist
	cd launch/cpu && $(CURDIR)/$(PYTHON) -m hatchling build --target wheel --directory $(CURDIR)/dist
	cp launch/constraints.txt dist/
	cp launch/cpu/overrides.txt dist/cpu-overrides.txt

bench: setup
	for name in $(BENCHES); do $(PYTHON) -m bench.$$name --quick || exit 1; done

clean:
	rm -rf $(VENV) .sglang .models .run
