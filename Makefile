# Podium's commands for people. `make` alone lists them; each target's line says what it does.
# The environment in .venv is made once and again when pyproject.toml, constraints.txt or the folder change.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run up test slow lint bench crash verifier ci setup constraints clean

TASK ?= What is gravity? Explain it to a child.
POOL ?= local
ARGS ?=
# Byte code is kept: without it every command would compile the program anew, which takes longer than it runs.
unexport PYTHONDONTWRITEBYTECODE
# A task may hold dollar signs, quotes and backquotes, so neither make nor the shell may read it: it goes by environment.
override TASK := $(value TASK)
export TASK

KEY := $(shell { cat pyproject.toml constraints.txt; pwd; } | sha256sum | cut -c1-16)
FOR_USE := .venv/installed-for-use-$(KEY)
FOR_DEVELOPMENT := .venv/installed-for-development-$(KEY)
BIN := .venv/bin

help: ## show this list
	@echo "Podium runs plans of model calls as durable workflows. README.md tells the rest."
	@echo
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1	\2/p' Makefile | expand -t 20
	@echo
	@echo '  make run TASK="Give three tips for a good night'"'"'s sleep." POOL=local'

run: $(FOR_USE) ## set up what is missing, plan a task with the small local model, run the plan (TASK=, POOL=, ARGS=)
	@$(BIN)/podium run --pool "$(POOL)" $(ARGS) -- "$$TASK"

up: $(FOR_USE) ## keep the embedded servers and their worker running in this terminal
	@$(BIN)/podium up $(ARGS)

test: $(FOR_DEVELOPMENT) ## run all tests but the long ones, with real servers (ARGS= goes to pytest)
	@$(BIN)/pytest -m "not slow" $(ARGS)

slow: $(FOR_DEVELOPMENT) ## run the long tests: deploys, clocks, a pooler, full disks, commands, kills (ARGS= too)
	@$(BIN)/pytest -m slow $(ARGS)

lint: $(FOR_DEVELOPMENT) ## style, format, types and import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(FOR_DEVELOPMENT) ## measure Podium against raw Temporal (ARGS= goes to the benchmarks)
	@$(BIN)/python -m benchmarks --json build/benchmarks.json $(ARGS)

crash: $(FOR_DEVELOPMENT) ## kill workers, Temporal and Postgres 200 times under load, then check the record (ARGS="--kills 20")
	@$(BIN)/python -m tests.support.crash $(ARGS)

verifier: $(FOR_USE) ## build podium-verify.pyz, which checks evidence bundles without Podium (needs Python and cryptography)
	@$(BIN)/python -m engine.verifier.build -o podium-verify.pyz

ci: ## all that must pass before a change lands, .ci/run: a first run, lint, tests, long tests
	@bash .ci/run

setup: $(FOR_DEVELOPMENT) ## install everything for development into .venv

constraints: ## resolve all dependencies anew and write constraints.txt
	@bash .ci/setup constraints

clean: ## delete .venv and caches; the data in .podium stays
	@if [ -x $(BIN)/podium ]; then $(BIN)/podium down || true; fi
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build ./*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(FOR_USE):
	@bash .ci/setup install "local" "$@"

$(FOR_DEVELOPMENT):
	@bash .ci/setup install "local,litellm,dev" "$@" "$(FOR_USE)"
