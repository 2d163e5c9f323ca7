// Package weight has the least programs with parts of this module, and a test of what they link.
package weight

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

const document = "../../../docs/EMBEDDING.md"

// TestWhatAProgramLinks: docs/EMBEDDING.md has the modules and the size of each program.
func TestWhatAProgramLinks(t *testing.T) {
	t.Parallel()
	read, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	programs := []string{"./internal/guard/weight/kubernetes", "./internal/guard/weight/trackers", "./internal/guard/weight/engine", "./examples/first", "./node/nodeproxy/cmd/nodeproxy"}
	folder := t.TempDir()
	build := []string{"go", "build", "-trimpath", "-ldflags=-s -w", "-o", folder + "/"}
	if _, err := gocmd.Output(t.Context(), "../../..", []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64"}, append(build, programs...)...); err != nil {
		t.Fatal(err)
	}
	for _, program := range programs {
		binary := filepath.Join(folder, filepath.Base(program))
		info, errInfo := buildinfo.ReadFile(binary)
		file, errFile := os.Stat(binary)
		if err := errors.Join(errInfo, errFile); err != nil {
			t.Fatal(err)
		}
		info.Deps = slices.DeleteFunc(info.Deps, func(m *debug.Module) bool { return strings.HasPrefix(m.Path, gocmd.Module) })
		modules, size := len(info.Deps), float64(file.Size())/1e6
		row := regexp.MustCompile(fmt.Sprintf(`(?m)^\|.*\]\(\.%s\).*\| (\d+) \| ([0-9.]+) MB \|$`, regexp.QuoteMeta(program))).FindSubmatch(read)
		if row == nil {
			t.Errorf("%s has no row with %s, %d modules, %.1f MB", document, program, modules, size)
			continue
		}
		said, err := strconv.ParseFloat(string(row[2]), 64)
		const tolerance = 0.02 // versions of Go differ
		if err != nil || string(row[1]) != strconv.Itoa(modules) || size < said*(1-tolerance) || size > said*(1+tolerance) {
			t.Errorf("%s has %d modules and %.1f MB, and %s says %s and %s MB", program, modules, size, document, row[1], row[2])
		}
	}
}
