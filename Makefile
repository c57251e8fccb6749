# Everything a person types: `make run` and `make test`. Both set the machine up first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin
DATA_DIR ?= /var/lib/pykubelet
# Whole files to each worker, in the order of tests/durations.py. The paths of sockets must be short.
PYTEST = base=$$(mktemp -d /tmp/pyt-XXXX); trap 'rm -rf '$$base EXIT; $(PY)/pytest -q --basetemp=$$base/t \
	--numprocesses=$(WORKERS) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
# The tests that run anywhere, and further arguments for pytest.
UNIT := -m "not machine" --ignore=tests/cluster
ARGS ?=
# A file, directory or test id for `make test`.
ONE ?=
# 2: test on containerd 2.x and runc, built from source once, instead of the host's.
RUNTIME ?=
export RUNTIME
# Megabytes that `kubectl cp` and port-forward copy in tests/cluster/test_kubectl.py.
STREAM_MEGABYTES ?= 10
export PYKUBELET_STREAM_MEGABYTES = $(STREAM_MEGABYTES)
# Half of the tests' time is waiting for containers and control planes: one worker more than processors.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
N ?= 20
SECONDS ?= 600
TESTS ?=
SAMPLE ?= 150
VERSION ?=
RELEASE = $(PY)/python -m release $(if $(VERSION),--version=$(VERSION))
# Without compiled modules each worker and each process of the tests compiles hundreds of files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test pressure unit durations repeat chaos mutate vmtest kubeadm conformance check format docs bench fuzz \
	deb wheel image clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing (Debian/Ubuntu) and make .venv
	@scripts/setup

run: setup ## start a node: the agent with its own container runtime
	@exec $(PY)/pykubelet up --data-dir $(DATA_DIR)

test: ## run the whole test suite, or ONE= of it (as root: it runs real containers; RUNTIME=2: on containerd 2.x)
	@scripts/setup --test
	@$(PYTEST) $(ONE) $(ARGS) || $(PY)/python -m tests.second_run $$?

pressure: ## put the node under pressure, with the upstream kubelet as well (15 minutes; alone on the machine; PRESSURE_TABLE= is a file for the results)
	@scripts/setup --test
	@export PYKUBELET_PRESSURE=1; $(PYTEST) --maxprocesses=1 -m pressure tests/cluster $(ARGS)

unit: WORKERS = 4
unit: setup ## run the tests that need neither root, containers nor a control plane, with fewer random examples
	@$(PYTEST) $(UNIT) --hypothesis-profile=quick $(ARGS)

durations: ## run the whole test suite and store how long each file took, for the order of the next runs
	@scripts/setup --test
	@$(PYTEST) --store-durations $(ARGS)

repeat: setup ## run the unit tests N= times, each with another seed, until one fails or hangs
	@$(PY)/python -m tests.repeat --times=$(N) -- $(UNIT) $(ARGS)

chaos: ## stop random processes while tests with real containers run (SECONDS=, TESTS=, PYKUBELET_SEED=)
	@scripts/setup --test
	@$(PY)/python -m tests.chaos --seconds=$(SECONDS) $(TESTS)

mutate: setup ## mutate the imperative code; which share do the unit tests catch? (SAMPLE=, PYKUBELET_SEED=)
	@$(PY)/python -m tests.mutation --sample=$(SAMPLE)

vmtest: ## run what needs systemd, on cgroup v2 and on v1, in virtual machines (three quarters of an hour)
	@scripts/setup --vm
	$(PY)/python -m tests.vm
	$(PY)/python -m tests.vm.packages

kubeadm: ## make a cluster of two virtual machines with an unmodified kubeadm, PACKAGE= the kubelet's deb (an hour or more)
	@scripts/setup --vm
	$(PY)/python -m tests.kubeadm

conformance: ## run the upstream node suite (40 minutes); PASS=host, vm or pressure (hours), AGENT=reference FOCUS= SKIP= PROCS= RUNTIME=2 choose
	@scripts/setup --conformance
	$(PY)/python -m tests.conformance

check: setup ## formatting, lint, types, layers, architecture figure, generated pages, wording, links of the docs
	$(PY)/ruff format --check .
	$(PY)/ruff check .
	$(PY)/mypy
	$(PY)/lint-imports
	scripts/diagram --check
	$(PY)/python scripts/flags --check
	$(PY)/python scripts/reference --check
	scripts/wording
	@site=$$(mktemp -d); scripts/docs $$site; status=$$?; rm -rf $$site; exit $$status

format: setup ## format and fix what can be fixed
	$(PY)/ruff format .
	$(PY)/ruff check --fix .

docs: setup ## build the documentation as a site in site/, with checked links
	@scripts/docs

bench: setup ## measure the agent against the CRI floor
	$(PY)/python -m bench

fuzz: setup ## fuzz the parsers, a minute each
	$(PY)/python -m tests.fuzz

deb: ## build the Debian package dist/pykubelet_VERSION_ARCH.deb (VERSION= replaces the version)
	@scripts/setup --package
	@$(RELEASE) deb

wheel: ## build the wheel and the sdist for PyPI in dist (VERSION=)
	@scripts/setup --package
	@$(RELEASE) wheel

image: ## build the OCI image of the agent dist/pykubelet-image.tar (as root; VERSION=)
	@scripts/setup --package
	@$(RELEASE) image

clean: ## remove the node's data and the build's products
	@if [ -x $(PY)/pykubelet ]; then $(PY)/pykubelet down --data-dir $(DATA_DIR); fi
	rm -rf .venv .venv-docs site .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find src -name '*_pb2.py*' -delete
