package guard

import (
	"os"
	"path"
	"regexp"
	"testing"
)

// TestTheOldestKernelIsTested: documents and errors promise the oldest kernel that CI runs
// in a virtual machine.
func TestTheOldestKernelIsTested(t *testing.T) {
	for file, pattern := range map[string]string{
		"hack/vm/test.sh":                  `\noldest=(.*)`,
		"internal/nftables/probe_linux.go": `minKernel = "(.*)"`,
		"README.md":                        `\n\| Linux \| (\S+) or newer`,
		"docs/ENGINES.md":                  `Linux (\S+) or newer`,
		"docs/STABILITY.md":                `\*\*Linux\*\* \| (\S+) or newer`,
	} {
		text, err := os.ReadFile(path.Join(root, file))
		if named := regexp.MustCompile(pattern).FindSubmatch(text); named == nil || string(named[1]) != "5.10" {
			t.Errorf("%s names %q as the oldest kernel (%v), want 5.10", file, named, err)
		}
	}
}
