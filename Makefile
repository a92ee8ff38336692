# make demo: set up .venv and train a tiny model.   make test: set up .venv and run every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVERS := .cache/language_servers
# DeepSpeed compiles its ops on first use; they are kept here
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

.PHONY: demo test check update servers clean

demo: $(VENV)/.installed
	$(BIN)/dstrain demo

test: check $(VENV)/.installed
	$(BIN)/pytest

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

update: $(VENV)/.installed
	$(BIN)/pytest --update

# what editors run to complete and check ds_config.json and job.yaml; without them their tests are skipped
servers: $(SERVERS)/.installed

$(SERVERS)/.installed: tests/render/package.json tests/render/package-lock.json
	mkdir -p $(SERVERS)
	cp tests/render/package.json tests/render/package-lock.json $(SERVERS)
	npm ci --prefix $(SERVERS) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .cache build dist dstrain-demo
