// Command figures keeps the figures of the documents true. docs/benchmarks.txt is what
// hack/bench.sh has printed on the machine that it names, and the tables of
// docs/PERFORMANCE.md are made of it. To be run in the repository's directory:
//
//	figures print FILE   prints the tables, made of other benchmarks
//	figures write        rewrites the tables in docs/PERFORMANCE.md
//	figures check FILE   compares the documents with benchmarks that have just run
//
// FILE is the output of go test -bench, with or without -json. What is checked: the
// tables are those of docs/benchmarks.txt; every benchmark of it still exists, with its
// metrics; what does not depend on the machine is the same wherever the sizes are; every
// other figure in README.md and docs/ is in the list of claims, and proved. Times are
// printed side by side, and prove nothing.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Where the figures are, within the repository.
const (
	benchmarksFile = "docs/benchmarks.txt"
	documentFile   = "docs/PERFORMANCE.md"
)

// What to do about a failure.
const (
	remeasure = "run hack/bench.sh -write as root, on a machine that does nothing else"
	rewrite   = "run go run ./internal/guard/figures write"
	reclaim   = "mend internal/guard/figures/claims.go"
)

func main() {
	if err := run(".", os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run does what args say in the repository at root.
func run(root string, args []string, w io.Writer) error {
	switch {
	case len(args) == 2 && args[0] == "print":
		return printTables(args[1], w)
	case len(args) == 1 && args[0] == "write":
		return writeDocument(root)
	case len(args) == 2 && args[0] == "check":
		return check(root, args[1], w)
	default:
		return errors.New("want one of: print FILE, write, check FILE")
	}
}

func printTables(file string, w io.Writer) error {
	measured, err := readBenchmarks(file)
	if err != nil {
		return err
	}
	shown := map[string]bool{}
	for _, t := range tables() {
		text, err := t.render(measured, shown)
		if err != nil {
			return fmt.Errorf("make table %s of %s: %w", t.name, file, err)
		}
		if _, err := fmt.Fprintf(w, "\n%s", text); err != nil {
			return err
		}
	}
	return nil
}

func writeDocument(root string) error {
	written, want, err := document(root)
	if err != nil || written == want {
		return err
	}
	return os.WriteFile(filepath.Join(root, documentFile), []byte(want), 0o644)
}

func benchmarksOf(root string) string { return filepath.Join(root, benchmarksFile) }

// document returns the document as it is, and as the benchmarks' output would have it.
func document(root string) (written, want string, err error) {
	documented, err := readBenchmarks(benchmarksOf(root))
	if err != nil {
		return "", "", err
	}
	text, err := os.ReadFile(filepath.Join(root, documentFile))
	if err != nil {
		return "", "", err
	}
	want, err = fill(string(text), documented)
	return string(text), want, err
}
