package nodeproxy

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// Irregular files do not block the proxy: it logs each of them, reads the others, and ends on SIGTERM.
func TestIrregularFilesDoNotBlock(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	netnstest.Check(t, syscall.Mkfifo(filepath.Join(d.path, "a-fifo.yaml"), 0o600))
	netnstest.Check(t, os.Symlink("/dev/zero", filepath.Join(d.path, "b-zero.yaml")))
	d.write("c-sparse.yaml", "")
	netnstest.Check(t, os.Truncate(filepath.Join(d.path, "c-sparse.yaml"), 2<<30))
	netnstest.Check(t, os.Mkdir(filepath.Join(d.path, "d-directory.yaml"), 0o700))
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir())
	p.waitHealthy()
	p.waitOutput("a-fifo.yaml: it is a FIFO", "b-zero.yaml: it is a device", "c-sparse.yaml: it is larger than 16 MiB", "d-directory.yaml: it is a directory")
	c.expectNow("pod-1")

	// If one replaces a file, the objects of the file stay.
	d.remove("service.yaml")
	netnstest.Check(t, syscall.Mkfifo(filepath.Join(d.path, "service.yaml"), 0o600))
	p.waitOutput("service.yaml: it is a FIFO")
	c.expectNow("pod-1")
	d.write("endpoints.yaml", webSlices(2))
	c.expectSoon("pod-2")
	if err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v, want exit code 0", err)
	}
}

// TestAnEmptyFile: its objects stay for a while, in which it may be written again.
func TestAnEmptyFile(t *testing.T) {
	t.Parallel()
	f := started(t)
	for i, nothing := range []string{"", "\n# soon\n---\n"} {
		f.write("web.yaml", nothing)
		f.expectLog("manifest is empty, its objects stay for a while", "web.yaml")
		f.write("web.yaml", service("web", "10.0.0.1")+slice("web", "10.1.0.1"))
		f.write("mark.yaml", service("mark", fmt.Sprintf("10.0.1.%d", i)))
		f.expect([]string{"+service mark 10.0.1.0", "service mark 10.0.1.0 10.0.1.1"}[i]) // and nothing about web
	}
	f.write("new.yaml", "") // not logged: it never had objects
	f.write("web.yaml", "")
	emptied := time.Now()
	f.expectLog("manifest is empty, its objects stay for a while")
	f.write("web.yaml", "# still empty\n") // does not restart the grace period
	f.expect("-service web", "-slice web")
	if waited := time.Since(emptied); waited < emptyGrace/2 {
		t.Errorf("Services went after %v, want them to stay for %v", waited, emptyGrace)
	}
	f.expectLog("manifest is empty, its objects are removed", "web.yaml")
}

// An empty file that becomes invalid keeps its objects while it is invalid.
func TestAnEmptyFileThatBecomesInvalid(t *testing.T) {
	path := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		m := newManifests(path, zap.NewNop())
		for _, text := range []string{service("web", "10.0.0.1"), "", "{", "{ {"} {
			netnstest.Check(t, os.WriteFile(filepath.Join(path, "web.yaml"), []byte(text), 0o600))
			for range 3 {
				if _, err := m.read(t.Context()); err != nil || len(m.objects()) != 1 {
					t.Fatalf("%q: %d objects, %v, want the previous one", text, len(m.objects()), err)
				}
				time.Sleep(emptyGrace / 3)
			}
		}
	})
}
