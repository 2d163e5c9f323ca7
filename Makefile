.PHONY: quickstart test lint bench fuzz

quickstart: ## a small cluster in one process, with real connections
	go run ./examples/quickstart

test: ## everything that CI runs
	./hack/test.sh

lint:
	./hack/lint.sh

bench: ## the table of speeds beside their floors; as root
	./hack/bench.sh

fuzz: ## all of test, with a million runs of each fuzz target
	FUZZ_RUNS=1000000 ./hack/test.sh
