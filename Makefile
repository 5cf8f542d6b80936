# `make serve` chats with the built-in pair, `make test` runs every test. Both set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test lint clean

serve: $(VENV)/.installed
	$(BIN)/python launch_server.py --speculative-algorithm EAGLE3 $(ARGS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
	find eagle_rt \( -name '*.nbi' -o -name '*.nbc' \) -delete
