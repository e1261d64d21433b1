# Thin names over scripts/; each script says at its head what it does.
.DEFAULT_GOAL := help
.PHONY: help setup demo test rdmatest lint bench soak clean

help:   ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+): *## (.*)/  make \1\t\2/' | expand -t 16

setup:  ## SGLang on CPU, the kvc wheel and a tiny model into .env
	@scripts/setup-engine.sh

demo:   ## 1 prefill + 2 decode workers and the router replay real sessions
	@scripts/demo.sh

test:   ## every test: Rust, RDMA, Python, real engines, and the checks of make lint
	@scripts/test.sh

rdmatest: ## of these, RDMA over software RoCE in an emulated guest
	@scripts/rdma/test.sh

lint:   ## formatting, clippy, ruff, mypy, stubs, SPECIFICATION.md against the tests
	@scripts/lint.sh

bench:  ## the figures of docs/bench.md
	@scripts/bench.sh

soak:   ## the simulation for long: WORLDS=100000 SEED=10000000
	@cargo run --quiet -p kvc-tests --release --example soak -- $(or $(WORLDS),100000) $(or $(SEED),10000000)

clean:  ## remove .env and target
	@scripts/clean.sh
