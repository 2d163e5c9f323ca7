// Package documents reads the repository's files for tests that compare documents with code.
package documents

import (
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"
)

// Read returns the files below a folder whose names end with a suffix, by path. Files of tests' data are left out.
func Read(tb testing.TB, root, suffix string) map[string]string {
	tb.Helper()
	all := map[string]string{}
	if err := fs.WalkDir(os.DirFS(root), ".", func(name string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(name, suffix) && !strings.Contains(name, "testdata/") {
			var text []byte
			text, err = os.ReadFile(path.Join(root, name))
			all[name] = string(text)
		}
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	return all
}
