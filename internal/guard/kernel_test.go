package guard

import (
	"os"
	"path"
	"regexp"
	"testing"
)

var (
	testedKernel = regexp.MustCompile(`(?m)^oldest=(\d+\.\d+)$`)                                            // read-only
	codeKernel   = regexp.MustCompile(`const minKernel = "(\d+\.\d+)"`)                                     // read-only
	promised     = regexp.MustCompile(`Linux(?:\*\*| \|)? (\d+\.\d+)(?: or newer| with [a-z]|, nf_tables)`) // read-only
)

// TestTheOldestKernelIsTested: documents and errors promise the oldest kernel that CI runs
// in a virtual machine, no older and no newer one.
func TestTheOldestKernelIsTested(t *testing.T) {
	t.Parallel()
	tested := kernelsIn(t, "hack/vm/test.sh", testedKernel)[0]
	for file, pattern := range map[string]*regexp.Regexp{
		"internal/nftables/probe_linux.go": codeKernel,
		"README.md":                        promised,
		"docs/ENGINES.md":                  promised,
		"docs/STABILITY.md":                promised,
	} {
		for _, kernel := range kernelsIn(t, file, pattern) {
			if kernel != tested {
				t.Errorf("%s names Linux %s as the oldest, want %s, which hack/vm/test.sh runs", file, kernel, tested)
			}
		}
	}
}

// kernelsIn returns what a pattern finds in a file, at least one.
func kernelsIn(t *testing.T, file string, pattern *regexp.Regexp) (all []string) {
	t.Helper()
	text, err := os.ReadFile(path.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range pattern.FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1])
	}
	if len(all) == 0 {
		t.Fatalf("%s names no oldest kernel", file)
	}
	return all
}
