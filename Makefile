.PHONY: quickstart test lint bench performance fuzz sbom

quickstart: ## a small cluster in one process, with real connections
	go run ./examples/quickstart

test: ## the gate: what CI runs
	./hack/test.sh

lint:
	./hack/lint.sh

bench: ## the table of speeds beside their floors; as root
	./hack/bench.sh

performance: ## measures, and writes docs/PERFORMANCE.md; as root, on a quiet machine
	./hack/bench.sh -write

fuzz: ## each fuzz target for a minute
	FUZZTIME=1m ./hack/fuzz.sh

sbom: ## writes which modules nodeproxy links: bin/nodeproxy.cdx.json
	mkdir -p bin
	./hack/supplychain.sh -sbom bin/nodeproxy.cdx.json
