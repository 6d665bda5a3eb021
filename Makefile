# All targets write to .venv and .pgcdc of this folder. `make help` lists the targets.

SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
BIN := .venv/bin
STAMP := .venv/.installed
PREPARED := .venv/.prepared
# Five processes, each with its own servers, keep two cores busy, because many tests wait.
# pgcdc_assets_tests/support/balance.py determines the order of the test files.
SIDE_BY_SIDE := -n 5 --dist loadscope --no-loadscope-reorder
# These tests use every package that setup.cfg requires.
LOWEST_TESTS := $(addprefix pgcdc_assets_tests/,cli spark/test_server.py protocol postgres raw \
    orchestration merge/test_run.py)

# Without bytecode, each process compiles the package again. pip does not compile what it installs here: the modules
# that are used are compiled by their first use.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: install
install: $(PREPARED) ## install the package and its tools into .venv

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	    { echo "Python's venv module is needed: apt-get install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv .venv

$(STAMP): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the package and its tools into .venv, which takes some minutes"
	@# pip builds a wheel of pyspark, whose jars are compressed already.
	@printf '[bdist_wheel]\ncompression = stored\n' >.venv/build.cfg
	@DIST_EXTRA_CONFIG=$(CURDIR)/.venv/build.cfg $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	    --constraint constraints.txt --editable '.[demo,dev]' & \
	    pip=$$!; trap 'kill $$pip' INT TERM; SECONDS=0; \
	    while sleep 0.2; kill -0 $$pip 2>/dev/null; do \
	        if (( SECONDS >= next )); then \
	            (( next = SECONDS + 5 )); \
	            (( SECONDS < 5 )) || echo "... $$(du -sm .venv | cut -f1) MB installed ($$SECONDS s)"; \
	        fi; \
	    done; wait $$pip
	@touch $@

# Without it, the first session downloads the jars, and each JVM starts more slowly.
$(PREPARED): $(STAMP)
	@if $(BIN)/pgcdc spark prepare; then touch $@; fi

.PHONY: s3-server
s3-server: | $(BIN)/python
	-@$(BIN)/python -m pgcdc_assets.demo.object_store_program

# Each test process would compile all tests again, because the five start at the same time.
.PHONY: compiled-tests
compiled-tests: $(STAMP)
	-@$(BIN)/python -m pytest --collect-only --quiet >/dev/null

.PHONY: java
java:
	@"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | grep -Eq 'version "(17|21)[.0-9]*"' || \
	    { echo "Spark needs Java 17 or 21: apt-get install openjdk-17-jre-headless" >&2; exit 2; }

.PHONY: format
format: $(STAMP) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(STAMP) ## check format, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# If a version of Postgres cannot be installed, its tests are skipped by name; in CI the run fails.
.PHONY: test
test: java ## run the tests and lint, and measure the coverage
	@# The S3 server's build needs a minute of CPU time, and pip mostly waits for downloads. Then Spark
	@# is prepared, and the tests are compiled.
	@$(MAKE) --no-print-directory --jobs=2 install s3-server compiled-tests
	-@$(BIN)/python -m pgcdc_assets_tests.support.postgres_binaries 18 15
	-@$(BIN)/pgcdc spark prepare
	$(BIN)/python -m slipcover --dont-wrap-pytest --json --out .coverage.json \
	    -m pytest $(SIDE_BY_SIDE) -m 'not soak' --pg=18,15
	@$(BIN)/python -m pgcdc_assets_tests.support.coverage_floor .coverage.json

.PHONY: mutation
mutation: $(PREPARED) java ## test mutants; SCOPE=protocol,slots,capture,snapshot,schema,fold,batch,merge SAMPLE=100 SEED=1 SECONDS=600
	$(BIN)/python -m pgcdc_assets_tests.mutation $(if $(SCOPE),--scope $(SCOPE)) \
	    $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY)) $(if $(SQL),--sql) \
	    $(if $(IMPORT),--import-time) $(if $(AGAIN),--again)

.PHONY: coverage
coverage: ## list the lines that the newest `make test` did not reach
	$(BIN)/python -m slipcover --skip-covered --merge .coverage.json --out /dev/null

.PHONY: test-all
test-all: $(PREPARED) s3-server java ## run all tests, including long ones, on Postgres 14 to 18
	-@$(BIN)/python -m pgcdc_assets_tests.support.postgres_binaries 18 17 16 15 14
	-@$(BIN)/pgcdc spark prepare
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --pg=18,17,16,15,14

.PHONY: test-lowest
test-lowest: java ## run selected tests on the lowest versions that setup.cfg allows
	@test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	@$(PYTHON) pgcdc_assets_tests/support/lowest_versions.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint .venv-lowest/constraints.txt --editable '.[demo,dev]'
	-@.venv-lowest/bin/python -m pgcdc_assets_tests.support.postgres_binaries 18 15
	@# Older releases warn about features that newer releases have changed.
	.venv-lowest/bin/python -m pytest $(SIDE_BY_SIDE) -m 'not soak' \
	    --override-ini filterwarnings=default $(LOWEST_TESTS)

.PHONY: constraints
constraints: ## write the newest versions that setup.cfg allows to constraints.txt
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	    $(PYTHON) -m venv "$$folder" && \
	    "$$folder/bin/python" -m pip install --quiet --disable-pip-version-check '.[demo,dev]' && \
	    "$$folder/bin/python" -m pip freeze --all --exclude pip \
	        --exclude pgcdc_assets > "$$folder/frozen" && \
	    { echo '# The versions of `make install` and CI, written by `make constraints`.'; \
	      cat "$$folder/frozen"; } > constraints.txt

.PHONY: docs
docs: $(STAMP) ## write the generated parts of the documentation, and build the site
	$(BIN)/python docs/generate.py
	$(BIN)/python -m mkdocs build

.PHONY: demo
demo: $(PREPARED) java ## run the whole pipeline once on a sample shop, and compare every value
	$(BIN)/python -m pgcdc_assets.demo $(if $(LAKE),--lake $(LAKE))

.PHONY: dev
dev: $(PREPARED) java ## run the sample shop and Dagster until Ctrl-C: http://127.0.0.1:3000
	@exec $(BIN)/python -m pgcdc_assets.demo dev $(if $(PORT),--port $(PORT)) $(if $(LAKE),--lake $(LAKE))

.PHONY: bench
bench: $(PREPARED) java ## run the benchmarks; ONLY=capture,merge selects some
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
