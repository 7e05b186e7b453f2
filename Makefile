# Every target makes its own .venv first (tools/bootstrap.py; nothing to do by hand).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# No network at run time: models come from PyPI packages or are built by the tests.
export HF_HUB_OFFLINE ?= 1
export TRANSFORMERS_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: venv demo test test-fast bench bench-demo lint format clean docs dist

venv:
	@$(PYTHON) tools/bootstrap.py --venv $(VENV)

demo: venv
	$(BIN)/vllm-dspark demo $(ARGS)

test: venv
	@# Three runs: kernel tests change Triton's interpreter for their process, and engines rebind
	@# vLLM's kernels in theirs, which the CPU twins are compared with.
	$(PYTEST) -m "not engine" --ignore=tests/kernels $(ARGS)
	$(PYTEST) tests/kernels $(ARGS)
	$(PYTEST) -m engine $(ARGS)

test-fast: venv
	$(PYTEST) -m "not engine" --ignore=tests/kernels $(ARGS)

bench: venv
	$(BIN)/vllm-dspark bench $(ARGS)

bench-demo: venv
	$(BIN)/python benchmarks/cpu_demo.py $(ARGS)

lint: venv
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: venv
	$(BIN)/python tools/make_pages.py
	$(BIN)/python -m mkdocs build --strict

dist: venv
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_wheel.py dist/*.whl

format: venv
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
