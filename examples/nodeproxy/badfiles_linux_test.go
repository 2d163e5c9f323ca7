package main

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

// TestFilesThatAreNoneHoldUpNobody: the process proxies what the other files say,
// names each of those, and ends when it is told to.
func TestFilesThatAreNoneHoldUpNobody(t *testing.T) {
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

	// One that takes the place of a file keeps what the file held.
	d.remove("service.yaml")
	netnstest.Check(t, syscall.Mkfifo(filepath.Join(d.path, "service.yaml"), 0o600))
	p.waitOutput("service.yaml: it is a FIFO")
	c.expectNow("pod-1")
	d.write("endpoints.yaml", webSlices(2))
	c.expectSoon("pod-2")
	if _, err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v, want exit code 0", err)
	}
}

// TestAFileThatIsEmptyWaits: its Services stay for a while, and until then it may
// get content again.
func TestAFileThatIsEmptyWaits(t *testing.T) {
	f := started(t)
	for i, nothing := range []string{"", "\n# soon\n---\n"} {
		f.write("web.yaml", nothing)
		f.expectLog("manifest is empty now, what it held stays for 5s", "web.yaml")
		f.write("web.yaml", service("web", "10.0.0.1")+slice("web", "10.1.0.1"))
		f.write("mark.yaml", service("mark", fmt.Sprintf("10.0.1.%d", i)))
		f.expect([]string{"+service mark 10.0.1.0", "service mark 10.0.1.0 10.0.1.1"}[i]) // and nothing about web
	}
	f.write("new.yaml", "") // one that never had any is no news
	f.write("web.yaml", "")
	emptied := time.Now()
	f.expectLog("manifest is empty now")
	f.write("web.yaml", "# still nothing\n") // does not begin anew
	f.expect("-service web", "-slice web")
	if waited := time.Since(emptied); waited < emptyFor/2 {
		t.Errorf("Services went after %v, want them to stay for %v", waited, emptyFor)
	}
	f.expectLog("manifest is empty, what it held is removed", "web.yaml")
}

// TestAFileThatIsEmptyAndThenBroken keeps what it held, for as long as it is broken.
func TestAFileThatIsEmptyAndThenBroken(t *testing.T) {
	path := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		m := newManifests(path, zap.NewNop())
		for _, text := range []string{service("web", "10.0.0.1"), "", "{", "{ {"} {
			netnstest.Check(t, os.WriteFile(filepath.Join(path, "web.yaml"), []byte(text), 0o600))
			for range 3 {
				if _, err := m.read(t.Context()); err != nil || len(m.objects()) != 1 {
					t.Fatalf("%q: %d objects, %v, want the one of before", text, len(m.objects()), err)
				}
				time.Sleep(emptyFor / 3)
			}
		}
	})
}
