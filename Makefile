# make demo: set up .venv and train a tiny model, with options in DEMO.   make test: set up .venv and run every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what a process has compiled is there for the next one
unexport PYTHONDONTWRITEBYTECODE
# only what is imported is compiled, which is a small part of torch and transformers
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --no-compile -c constraints.txt
# packages beside those of a user; all at once, as each call of pip looks at all that is installed
EXTRAS ?= test
SERVERS := .cache/language_servers
QLORA := .cache/qlora
VIDEOS := .cache/videos
# one more than cores: a worker that runs tests of a cluster waits for time-outs most of the time
WORKERS := $(shell echo $$(($$(nproc) + 1)))
# DeepSpeed compiles its ops on first use; they are kept here
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions
# one ninja for all that builds them: another release does not read its log, and compiles everything again
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test suite fast fast-torch fast-plain sweep ops check update docs servers qlora videos wheelhouse clean

demo: $(VENV)/.installed
	$(BIN)/dstrain demo $(DEMO)

# `make -j2 test` checks while extensions are compiled, which takes one core most of the time
test: check suite

# sweeps, which are too much for one run, have fixed parts: the mark `parts`
PART ?= 0
# what else is there before the suite begins
FIRST ?=
suite: $(VENV)/.installed ops $(FIRST)
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --part $(PART)

# what needs no engine, no cluster, no sweep, no editor and no whole command, on all cores: one process has all that imports
# torch, which takes as long as many tests, and with tests/launch half of the work; no process imports what types commands
FAST := -m "not (engine or cluster or sweep or editors or commands)"
TORCH := $(wildcard dstrain/train tests/train dstrain/monitor tests/monitor tests/facts/cluster/test_hostfile.py \
  tests/facts/data tests/facts/model tests/plan/memory/layers tests/plan/memory/test_muon.py \
  tests/plan/test_named_parts.py tests/job/test_file.py tests/test_health_exam.py tests/test_overhead.py tests/test_peers.py \
  tests/launch)
fast: $(VENV)/.installed
	$(MAKE) --no-print-directory -j2 -Otarget fast-torch fast-plain

fast-torch: $(VENV)/.installed
	$(BIN)/pytest $(FAST) $(TORCH)

fast-plain: $(VENV)/.installed
	$(BIN)/pytest $(FAST) $(TORCH:%=--ignore=%) --ignore=tests/cli -n $$(($$(nproc) > 2 ? $$(nproc) - 1 : 0)) --dist loadgroup

# all parts of the sweeps
sweep: $(VENV)/.installed
	$(BIN)/pytest -m sweep --part all -n auto --dist loadgroup --no-loadscope-reorder

# the extensions that training on a CPU needs, built before several tests ask for them at once; without what a debugger
# needs, without the C++ frontend of torch and with few optimizations, which is a quarter of the time: found by name, as the
# command that ranks compare must be the same
ops: $(VENV)/.installed
	mkdir -p .cache/compiler
	printf '#!/bin/sh\nexec %s "$$@" -g0 -O1 -DTORCH_INDUCTOR_CPP_WRAPPER\n' "$$(command -v c++)" > .cache/compiler/c++
	chmod +x .cache/compiler/c++
	PATH="$(CURDIR)/.cache/compiler:$$PATH" DS_ACCELERATOR=cpu $(BIN)/python -P -m dstrain.train.build_ops deepspeed_shm_comm cpu_adam fused_adam

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

update: $(VENV)/.installed
	$(BIN)/pytest --update

# the pages of docs/ as two sites with search that need no network: build/site/index.html
SITE ?= build/site
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going docs $(SITE)/en
	$(BIN)/sphinx-build -q -W --keep-going -c docs -t zh docs/zh $(SITE)/zh
	cp -r docs/gallery $(SITE)
	cp docs/languages.html $(SITE)/index.html

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

# what editors run to complete and check ds_config.json and job.yaml; without them their tests are skipped
servers: $(SERVERS)/.installed

$(SERVERS)/.installed: tests/config/package.json tests/config/package-lock.json
	mkdir -p $(SERVERS)
	cp tests/config/package.json tests/config/package-lock.json $(SERVERS)
	npm ci --prefix $(SERVERS) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# bitsandbytes, apart from .venv: every rank that finds it imports it, 5 s of CPU; without it QLoRA's tests are skipped
qlora: $(QLORA)/.installed

$(QLORA)/.installed: constraints.txt | $(VENV)/.installed
	$(PIP) --no-deps --target $(QLORA) --upgrade bitsandbytes
	touch $@

# the processors of videos and a decoder, apart from .venv: so tests tell what runs without them; without them those of
# videos are skipped. PyPI's torchvision is built for CUDA: beside a PyTorch for CPUs, its import asks for two operators
# that are not there, which resizing frames does not need
videos: $(VIDEOS)/.installed

$(VIDEOS)/.installed: constraints.txt | $(VENV)/.installed
	$(PIP) --no-deps --target $(VIDEOS) --upgrade torchvision av
	printf '%s\n' '' 'for name in () if _has_ops() else ("nms", "qnms"):' \
	  '    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")' \
	  >> $(VIDEOS)/torchvision/extension.py
	touch $@

# all wheels of an installation for machines without a network, for a Python and an architecture of Linux that need not be
# those of this machine: docs/quickstart.md. Packages without a wheel on PyPI, all pure Python, are built here
WHEELHOUSE ?= build/wheelhouse
WHEELHOUSE_PYTHON ?= $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
WHEELHOUSE_ARCH ?= x86_64
# glibc 2.28 and older; pip takes what each name says and nothing older
PLATFORMS := $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 \
  manylinux_2_12 manylinux2010 manylinux_2_5 manylinux1,--platform $(tag)_$(WHEELHOUSE_ARCH))
# extras, such as [qlora,wandb]
WITH ?=
WITHOUT_WHEEL := deepspeed pwinput

wheelhouse: $(VENV)/.installed
	mkdir -p $(WHEELHOUSE)
	rm -f $(WHEELHOUSE)/dstrain-*.whl
	DS_BUILD_OPS=0 $(BIN)/pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation \
	  --wheel-dir $(WHEELHOUSE) . $$(grep $(WITHOUT_WHEEL:%=-e '^%==') constraints.txt)
	$(BIN)/pip --quiet --disable-pip-version-check download --only-binary :all: $(PLATFORMS) \
	  --python-version $(WHEELHOUSE_PYTHON) --find-links $(WHEELHOUSE) --dest $(WHEELHOUSE) -c constraints.txt \
	  "$$(echo $(WHEELHOUSE)/dstrain-*.whl)$(WITH)"
	cp constraints.txt $(WHEELHOUSE)

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) .cache build dist dstrain-demo
