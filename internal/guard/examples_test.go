package guard

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	maxExample       = 150 // lines of Go in a program, tests apart
	maxExampleReadme = 30  // lines
)

// TestExamplesStaySmall: one idea each, so that they are read to the end. Nodeproxy and
// quickstart are programs.
func TestExamplesStaySmall(t *testing.T) {
	const examples = "../../examples"
	folders, err := os.ReadDir(examples)
	if err != nil {
		t.Fatal(err)
	}
	if len(folders) < 6 {
		t.Fatalf("%d examples, want 6 at least", len(folders))
	}
	for _, folder := range folders {
		name := folder.Name()
		if name == "nodeproxy" || name == "quickstart" {
			continue
		}
		for _, fault := range exampleFaults(t, filepath.Join(examples, name)) {
			t.Errorf("examples/%s: %s", name, fault)
		}
	}
}

// exampleFaults says what is wrong with the example in a folder.
func exampleFaults(t *testing.T, folder string) (faults []string) {
	t.Helper()
	code, tests, readme := map[string]int{}, 0, 0 // code is by folder: a plugin and its agent are two programs
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		lines := bytes.Count(text, []byte("\n"))
		switch name := d.Name(); {
		case strings.HasSuffix(name, "_test.go"):
			tests++
		case strings.HasSuffix(name, ".go"):
			code[filepath.Dir(path)] += lines
		case name == "README.md":
			readme += lines
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(code) == 0 {
		faults = append(faults, "no program")
	}
	for _, lines := range code {
		if lines > maxExample {
			faults = append(faults, fmt.Sprintf("%d lines of Go, want at most %d", lines, maxExample))
		}
	}
	if tests == 0 {
		faults = append(faults, "no test")
	}
	if readme == 0 || readme > maxExampleReadme {
		faults = append(faults, fmt.Sprintf("%d lines of README.md, want 1 to %d", readme, maxExampleReadme))
	}
	return faults
}

// TestWhatIsWrongWithAnExampleIsNoticed proves that the guard bites.
func TestWhatIsWrongWithAnExampleIsNoticed(t *testing.T) {
	folder := t.TempDir()
	if err := os.Mkdir(filepath.Join(folder, "part"), 0o700); err != nil {
		t.Fatal(err)
	}
	write := func(name string, lines int) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), bytes.Repeat([]byte("\n"), lines), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantFaults := func(want ...string) {
		t.Helper()
		if got := exampleFaults(t, folder); !slices.Equal(got, want) {
			t.Errorf("faults are %q, want %q", got, want)
		}
	}
	wantFaults("no program", "no test", "0 lines of README.md, want 1 to 30")
	write("main.go", 150)
	write("part/part.go", 100)
	write("part/more.go", 50)
	write("main_test.go", 500)
	write("README.md", 30)
	wantFaults()
	write("part/part.go", 101)
	write("README.md", 31)
	wantFaults("151 lines of Go, want at most 150", "31 lines of README.md, want 1 to 30")
}
