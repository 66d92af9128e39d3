# Two commands: `make train` trains the demo, `make test` checks everything. Each builds .venv first.
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
OLDEST_JAX := 0.11.1
AOT_TESTS := tests/test_topologies.py tests/test_compile.py tests/attention/test_kernels_compile.py \
	tests/pipeline/test_compiled_overlap.py
# Not the exhaustive covers: those hold the arithmetic, these the programs.
OLDEST_TESTS := tests/sharding/test_exchange.py tests/attention/test_strategies.py \
	tests/attention/test_exactness.py::test_triton_kernel tests/test_model.py tests/test_hf.py \
	tests/pipeline/test_single_stream.py tests/pipeline/test_pipeline_runs.py::test_a_pipeline_follows_one_device \
	tests/test_train.py::test_resume_is_bitwise tests/test_train.py::test_resume_on_another_mesh \
	tests/test_train.py::test_a_strategy_that_moves_tokens_trains_alike

.PHONY: train test lint types pytest test-oldest-jax test-aot clean

$(VENV)/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "cad_jax needs Python 3.12 or later: install it, or name one with 'make PYTHON=/path/to/python3.12'"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(VENV)/installed
	$(BIN)/cad-jax train stdlib_demo $(ARGS)

test: lint types pytest

lint: $(VENV)/installed
	$(BIN)/ruff check cad_jax experiments tests
	$(BIN)/ruff format --check cad_jax experiments tests

types: $(VENV)/installed
	$(BIN)/basedpyright

pytest: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 $(ARGS)

# What touches jax, against the oldest one that pyproject.toml allows, in an environment of its own; make
# test-oldest-jax OLDEST_TESTS=tests runs everything.
$(VENV)-oldest/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	grep -vE '^(jax|jaxlib)==' constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(VENV)-oldest/constraints.txt -e '.[dev]' 'jax==$(OLDEST_JAX)' 'jaxlib==$(OLDEST_JAX)'
	touch $@

test-oldest-jax: $(VENV)-oldest/installed
	$(VENV)-oldest/bin/python -m pytest -n 2 $(OLDEST_TESTS) $(ARGS)

# Programs compiled for GPUs, on a machine without one: the CUDA compiler in an environment of its own,
# since its mere presence makes JAX look for a driver in every ordinary run.
$(VENV)-aot/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-aot
	$(VENV)-aot/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev,aot]'
	touch $@

test-aot: $(VENV)-aot/installed
	$(VENV)-aot/bin/python -m pytest -n 2 $(AOT_TESTS) $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-aot
