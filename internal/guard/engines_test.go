package guard

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEnginesHaveTheSameFiles: who knows one engine finds the same function of another in the file of the same
// name. What an engine lacks has no file.
func TestEnginesHaveTheSameFiles(t *testing.T) {
	t.Parallel()
	files := map[string]string{
		"NewEngine": "engine", "New": "engine", "Abilities": "engine", "Traits": "engine", "Close": "engine", "Plan": "plan", "Dump": "observe",
		"Apply": "apply", "Watch": "watch", "Verify": "verify", "Counts": "counts", "Cleanup": "cleanup",
	}
	function := regexp.MustCompile(`(?m)^func (?:\(e \*[Ee]ngine\) )?(\w+)\(`)
	for _, engine := range []string{"internal/nftables", "iptables", "ipvs", "ebpf", "userspace"} {
		paths, err := filepath.Glob("../../" + engine + "/*.go")
		if err != nil || len(paths) == 0 {
			t.Fatalf("list %s: %v", engine, err)
		}
		found := 0
		for _, path := range paths {
			name := filepath.Base(path)
			if strings.HasSuffix(name, "_test.go") || name == "unsupported.go" {
				continue
			}
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range function.FindAllSubmatch(text, -1) {
				want, is := files[string(m[1])]
				if !is {
					continue
				}
				found++
				if strings.TrimSuffix(strings.TrimSuffix(name, ".go"), "_linux") != want {
					t.Errorf("%s of %s is in %s, want it in %s.go or %s_linux.go", m[1], engine, name, want, want)
				}
			}
		}
		if found < len(files)-2 { // an engine may lack Watch and Counts
			t.Errorf("%s has %d of the functions, want at least %d", engine, found, len(files)-2)
		}
	}
}
