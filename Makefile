# Every target sets up .venv first, from plain python3, when it is missing, stale or broken.
PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
PRODUCT := mlx_serve.py server models cache
CODE := $(PRODUCT) scripts
# What is said of a platform in a type is checked on each; mypy's cache is for one.
OTHER := $(if $(filter Darwin,$(shell uname)),linux,darwin)

.DEFAULT_GOAL := help
.PHONY: help venv dev install run test check fix bench clients load architectures compat lock

help:
	@echo "make install         set up .venv with what running needs (CUDA=1: with the CUDA backend, on Linux)"
	@echo "make run             serve the built-in model on 127.0.0.1:8080"
	@echo "                     (PORT=9000, MODEL=name, ARGS='--slots 8 --context 32768')"
	@echo "make dev             the same, and what tests and checks need; test, check, fix and bench do it by themselves"
	@echo "make test            run the tests (ARGS='tests/server/cli/test_main.py -k port')"
	@echo "make check           formatting, lint, types, import rules"
	@echo "make fix             format, and mend what the linter can mend"
	@echo "make bench           run the benchmarks; results go to results/ (ARGS='decode trie')"
	@echo "make clients         try client packages and coding agents, as pip and npm bring them (ARGS='opencode litellm', ARGS=benchmarks)"
	@echo "make architectures   try every architecture of mlx-lm, built tiny, and write docs/architectures.md"
	@echo "                     (PROVIDER=1: those of mlx-vlm that mlx-lm lacks, and docs/architectures-mlx-vlm.md)"
	@echo "make compat          run the tests that touch mlx-lm with each version of it that is allowed (ARGS=0.32.1)"
	@echo "make load            prove that bad input, many clients and slow ones do no harm (ARGS='fuzz --seed 7')"
	@echo "make lock            resolve the dependencies anew into requirements.lock and requirements-dev.lock"

venv:
	@$(PYTHON) scripts/bootstrap.py $(if $(CUDA),--cuda)

dev:
	@$(PYTHON) scripts/bootstrap.py --dev $(if $(CUDA),--cuda)

install: venv
	@echo "Ready: $(BIN)/mlx-serve --help"

run: venv
	@exec $(BIN)/mlx-serve serve $(or $(MODEL),demo) $(if $(PORT),--port $(PORT)) $(ARGS)

test: dev
	@$(PY) -m pytest $(ARGS)

check: dev
	@$(PY) -m ruff format --check $(CODE) tests
	@$(PY) -m ruff check --quiet $(CODE) tests
	@$(PY) -m mypy --no-error-summary $(CODE) tests
	@$(PY) -m mypy --no-error-summary --platform $(OTHER) --cache-dir .mypy_cache/$(OTHER) $(PRODUCT)
	@$(BIN)/lint-imports --no-logo
	@echo "check: all good"

fix: dev
	@$(PY) -m ruff check --quiet --fix-only $(CODE) tests
	@$(PY) -m ruff format $(CODE) tests

bench: dev
	@$(PY) -m scripts.bench $(ARGS)

clients: dev
	@$(PY) -m scripts.clients $(ARGS)

architectures: dev
	@$(PY) -m scripts.architectures $(if $(PROVIDER),--provider --out docs/architectures-mlx-vlm.md --at-least 9,\
		--out docs/architectures.md --at-least 90) $(ARGS)

compat: dev
	@$(PY) -m scripts.compat $(ARGS)

load: dev
	@$(PY) -m scripts.load $(ARGS)

# Versions stay as they are unless UPGRADE=1; both files have the same ones. No address of an index may enter them.
COMPILE = $(PY) -m uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --extra checkout \
	--generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header

lock: dev
	@$(COMPILE) --extra dev $(if $(UPGRADE),--upgrade) --output-file requirements-dev.lock
	@$(COMPILE) --constraint requirements-dev.lock $(if $(UPGRADE),--upgrade) --output-file requirements.lock
	@for file in requirements.lock requirements-dev.lock; do \
		{ echo "# Every package of .venv for every platform, with hashes. Made by \`make lock\`; do not edit."; \
		cat $$file; } > $$file.new && mv $$file.new $$file; done
