# Needs git, make, gcc and Python 3.11 or newer; everything else goes into .venv, .models and .downloads.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
BIN := .venv/bin
SHIPPED := $(wildcard model_families/default_model/weights/*.safetensors)
MODEL := .models/$(if $(SHIPPED),omnistage-nano,omnistage-default)
WHISPER := .models/whisper-tiny-en
# Byte code of the packages is kept, whatever the environment prefers: without it every start takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: setup demo whisper test check bench clean

setup: .venv/.packages .venv/.compiled $(MODEL)/config.json
	@$(BIN)/python -m lm_engine.native.build
	@$(BIN)/python -m preprocess.native

demo: setup
	$(BIN)/python examples/demo.py

test: setup .venv/.test-packages
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: setup
	$(BIN)/python examples/bench.py

check: .venv/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "omnistage needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.packages: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing packages (a few minutes, in silence)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable '.[dev,model,nixl]'
	@touch $@

# The kernels' tests run in Triton's interpreter where there is no GPU; serving on a CPU needs no Triton.
.venv/.test-packages: .venv/.packages
	@echo "installing what the tests need besides"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable '.[triton]'
	@touch $@

# What a server imports, compiled once: a container may not let later processes write byte code.
.venv/.compiled: .venv/.packages
	@$(BIN)/python -c 'import api.cli, api.app, stages.launch, stages.build, transformers'
	@touch $@

$(MODEL)/config.json: $(wildcard $(addprefix model_families/default_model/,*.py *.jinja *.md weights/*)) | .venv/.packages
	@echo "building the default model (a minute or two)"
	@TQDM_DISABLE=1 $(BIN)/python -m model_families.default_model.build $(MODEL)

whisper: $(WHISPER)/config.json

$(WHISPER)/config.json: | .venv/.packages
	$(BIN)/python -m model_families.whisper.fetch $(WHISPER)

clean:
	rm -rf .venv .models build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
