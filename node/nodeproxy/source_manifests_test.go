package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// listener is a Provider that records events.
type listener struct {
	proxier.Provider

	mu     sync.Mutex
	events []string
}

func (l *listener) record(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, fmt.Sprintf(format, args...))
}

func (l *listener) OnServiceAdd(s *v1.Service) { l.record("+service %s %s", s.Name, s.Spec.ClusterIP) }

func (l *listener) OnServiceUpdate(o, s *v1.Service) {
	l.record("service %s %s %s", s.Name, o.Spec.ClusterIP, s.Spec.ClusterIP)
}
func (l *listener) OnServiceDelete(s *v1.Service) { l.record("-service %s", s.Name) }
func (l *listener) OnServiceSynced()              { l.record("services synced") }
func (l *listener) OnEndpointSliceAdd(s *discovery.EndpointSlice) {
	l.record("+slice %s %s", s.Name, s.Endpoints[0].Addresses[0])
}

func (l *listener) OnEndpointSliceUpdate(_, s *discovery.EndpointSlice) {
	l.record("slice %s %s", s.Name, s.Endpoints[0].Addresses[0])
}

func (l *listener) OnEndpointSliceDelete(s *discovery.EndpointSlice) {
	l.record("-slice %s", s.Name)
}
func (l *listener) OnEndpointSlicesSynced()           { l.record("slices synced") }
func (l *listener) OnNodeChange(n changetracker.Node) { l.record("node %s %v", n.Name, n.Addresses) }

// followed is a directory of manifests with a running source.
type followed struct {
	t        *testing.T
	dir      string
	listener *listener
	logs     *observer.ObservedLogs
}

// follow starts a source on the files. It ends with the test, without an error.
func follow(t *testing.T, files map[string]string) *followed {
	t.Helper()
	core, logs := observer.New(zap.WarnLevel)
	f := &followed{t, t.TempDir(), &listener{}, logs}
	for name, text := range files {
		f.write(name, text)
	}
	f.start(zap.New(core))
	return f
}

func (f *followed) start(log *zap.Logger) {
	f.t.Helper()
	run, err := manifestSource(f.dir, "node-1", f.listener, log)
	if err != nil {
		f.t.Fatalf("manifestSource: %v", err)
	}
	ctx, stop := context.WithCancel(f.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	f.t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			f.t.Errorf("run = %v, want nil", err)
		}
	})
}

func (f *followed) write(name, text string) {
	f.t.Helper()
	if err := os.WriteFile(filepath.Join(f.dir, name), []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *followed) remove(name string) {
	f.t.Helper()
	if err := os.Remove(filepath.Join(f.dir, name)); err != nil {
		f.t.Fatal(err)
	}
}

func (f *followed) rename(from, to string) {
	f.t.Helper()
	if err := os.Rename(filepath.Join(f.dir, from), filepath.Join(f.dir, to)); err != nil {
		f.t.Fatal(err)
	}
}

// expect waits for exactly these events after those that were expected before.
func (f *followed) expect(want ...string) {
	f.t.Helper()
	var got []string
	poll.Soon(func() bool {
		f.listener.mu.Lock()
		defer f.listener.mu.Unlock()
		got = slices.Clone(f.listener.events)
		return len(got) >= len(want)
	})
	if !slices.Equal(got, want) {
		f.t.Fatalf("events\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	f.listener.mu.Lock()
	defer f.listener.mu.Unlock()
	f.listener.events = f.listener.events[len(want):]
}

// expectLog waits for one line with all snippets, wants no other line, and removes it.
func (f *followed) expectLog(snippets ...string) {
	f.t.Helper()
	poll.Soon(func() bool { return f.logs.Len() > 0 })
	lines := f.logs.TakeAll()
	if len(lines) != 1 {
		f.t.Fatalf("log %v, want one line with %q", lines, snippets)
	}
	line := fmt.Sprint(lines[0].Message, lines[0].ContextMap())
	for _, snippet := range snippets {
		if !strings.Contains(line, snippet) {
			f.t.Errorf("log line %q, want %q in it", line, snippet)
		}
	}
}

func service(name, ip string) string {
	return "apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: {clusterIP: " + ip + ", ports: [{port: 80}]}\n---\n"
}

func slice(name, addr string) string {
	return "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: " + name + ", labels: {kubernetes.io/service-name: " + name + "}}\n" +
		"addressType: IPv4\nports: [{port: 8080}]\nendpoints: [{addresses: [" + addr + "]}]\n---\n"
}

func node(name, addr string) string {
	return "apiVersion: v1\nkind: Node\nmetadata: {name: " + name + "}\nstatus: {addresses: [{type: InternalIP, address: " + addr + "}]}\n---\n"
}

// started starts a source on files of a Node and a Service.
func started(t *testing.T) *followed {
	t.Helper()
	f := follow(t, map[string]string{"node.yaml": node("node-1", "192.0.2.1"), "web.yaml": service("web", "10.0.0.1") + slice("web", "10.1.0.1")})
	f.expect("node node-1 [192.0.2.1]", "+service web 10.0.0.1", "+slice web 10.1.0.1", "services synced", "slices synced")
	return f
}

func TestFilesBecomeEvents(t *testing.T) {
	f := follow(t, map[string]string{
		"b.json":    `{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b"}, "spec": {"clusterIP": "10.0.0.2"}}]}`,
		"a.yaml":    service("a", "10.0.0.1") + slice("a", "10.1.0.1"),
		"node.yml":  node("node-2", "192.0.2.2") + node("node-1", "192.0.2.1"),
		"notes.txt": service("c", "10.0.0.3"), ".hidden.yaml": service("d", "10.0.0.4"), "a.yaml~": service("e", "10.0.0.5"),
	})
	f.expect("node node-1 [192.0.2.1]", "+service a 10.0.0.1", "+service b 10.0.0.2", "+slice a 10.1.0.1", "services synced", "slices synced")
	f.write("a.yaml", service("a", "10.0.0.9")+slice("a", "10.1.0.1"))
	f.expect("service a 10.0.0.1 10.0.0.9")
	f.write("c.yaml", slice("c", "10.1.0.3"))
	f.expect("+slice c 10.1.0.3")
	f.write("node.yml", node("node-1", "192.0.2.9"))
	f.expect("node node-1 [192.0.2.9]")
	f.remove("a.yaml")
	f.expect("-service a", "-slice a")
	f.remove("node.yml") // the node stays as it was
	f.remove("b.json")
	f.expect("-service b")
	if f.logs.Len() > 0 {
		t.Errorf("log %v, want nothing", f.logs.All())
	}
}

func TestAnInvalidFileKeepsItsObjects(t *testing.T) {
	f := started(t)
	broken := service("web", "10.0.0.1") + "spek: 1\n"
	f.write("web.yaml", broken)
	f.expectLog("manifest is invalid", "web.yaml:6: want an object")
	f.write("other.yaml", service("other", "10.0.0.2"))
	f.expect("+service other 10.0.0.2") // web.yaml is not logged again
	f.write("web.yaml", broken+"spec: [\n")
	f.expectLog("web.yaml:7: ")
	f.write("web.yaml", service("web", "10.0.0.1")+slice("web", "10.1.0.2"))
	f.expect("slice web 10.1.0.2")
	if f.logs.Len() > 0 {
		t.Errorf("log %v, want nothing more", f.logs.All())
	}
}

func TestAllErrorsOfAFileAreInOneLine(t *testing.T) {
	f := started(t)
	f.write("bad.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  ports: 1\n  prots: 2\n")
	f.expectLog("bad.yaml:5: spec.ports: want a list", "bad.yaml:6: spec.prots: unknown field")
}

func TestSyncedIsReportedEvenIfAFileIsInvalid(t *testing.T) {
	f := follow(t, map[string]string{"a.yaml": "a: [", "b.yaml": node("node-1", "192.0.2.1")})
	f.expect("node node-1 [192.0.2.1]", "services synced", "slices synced")
	f.expectLog("a.yaml:1: ")
}

func TestAMissingNodeIsLogged(t *testing.T) {
	f := follow(t, nil)
	f.expect("node node-1 []", "services synced", "slices synced")
	f.expectLog("no manifest has this Node", "node-1")
}

func TestObjectsOfOtherKindsAreReportedAndIgnored(t *testing.T) {
	f := started(t)
	f.write("mixed.yaml", service("b", "10.0.0.2")+"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n")
	f.expect("+service b 10.0.0.2")
	f.expectLog("mixed.yaml:6: ", "Deployment")
}

func TestTheFirstOfDuplicatesCounts(t *testing.T) {
	f := started(t)
	f.write("zoo.yaml", service("web", "10.0.0.2"))
	f.expectLog("zoo.yaml:1: Service default/web is at web.yaml:1 already")
	f.write("bar.yaml", service("bar", "10.0.0.4"))
	f.expect("+service bar 10.0.0.4") // zoo.yaml is not logged again
	f.write("abc.yaml", service("web", "10.0.0.3"))
	f.expect("service web 10.0.0.1 10.0.0.3")
	if got := f.logs.FilterMessage("duplicate object is ignored").Len(); got != 2 {
		t.Errorf("%d lines about ignored objects, want one for each place, web.yaml and zoo.yaml", got)
	}
	f.logs.TakeAll()
	f.remove("abc.yaml")
	f.expect("service web 10.0.0.3 10.0.0.1")
	f.expectLog("zoo.yaml:1: Service default/web is at web.yaml:1 already")
	f.remove("web.yaml")
	f.expect("service web 10.0.0.1 10.0.0.2", "-slice web")
}

func TestRenamedFiles(t *testing.T) {
	f := started(t)
	f.write("web.yaml.new", service("web", "10.0.0.1")+slice("web", "10.1.0.2"))
	f.rename("web.yaml", "web.yaml~")
	f.rename("web.yaml.new", "web.yaml")
	f.expect("slice web 10.1.0.2")
}

// TestAFileIsReadAfterItWasWritten: incomplete content causes no events and no errors.
func TestAFileIsReadAfterItWasWritten(t *testing.T) {
	f := started(t)
	text := service("web", "10.0.0.7") + slice("web", "10.1.0.7")
	file, err := os.Create(filepath.Join(f.dir, "web.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range len(text) {
		if _, err := file.WriteString(text[i : i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	f.expect("service web 10.0.0.1 10.0.0.7", "slice web 10.1.0.7")
	if f.logs.Len() > 0 {
		t.Errorf("log %v, want nothing", f.logs.All())
	}
}

// TestAMountedConfigMap: the files are links into ..data, a link that the kubelet replaces.
func TestAMountedConfigMap(t *testing.T) {
	f := &followed{t: t, dir: t.TempDir(), listener: &listener{}}
	link := func(to, from string) {
		t.Helper()
		if err := os.Symlink(to, filepath.Join(f.dir, from)); err != nil {
			t.Fatal(err)
		}
	}
	for version, ip := range map[string]string{"..1": "10.0.0.1", "..2": "10.0.0.2"} {
		if err := os.Mkdir(filepath.Join(f.dir, version), 0o755); err != nil {
			t.Fatal(err)
		}
		f.write(version+"/web.yaml", service("web", ip))
	}
	link("..1", "..data")
	link("..data/web.yaml", "web.yaml")
	f.start(zap.NewNop())
	f.expect("+service web 10.0.0.1", "node node-1 []", "services synced", "slices synced")
	link("..2", "..data_tmp")
	f.rename("..data_tmp", "..data")
	f.expect("service web 10.0.0.1 10.0.0.2")
}

func TestADirectoryMayBeReplaced(t *testing.T) {
	f := started(t)
	parent := filepath.Dir(f.dir)
	gone := filepath.Join(parent, "gone")
	if err := os.Rename(f.dir, gone); err != nil {
		t.Fatal(err)
	}
	f.expectLog("cannot be read, its objects stay", f.dir)
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f.write("web.yaml", service("web", "10.0.0.2"))
	f.expect("service web 10.0.0.1 10.0.0.2", "-slice web")
	f.write("web.yaml", service("web", "10.0.0.3"))
	f.expect("service web 10.0.0.2 10.0.0.3")
}

// TestWithoutInotify: files are read all the same, the log says once that changes come late, and each
// time it tries to watch.
func TestWithoutInotify(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.WarnLevel)
		attempts := 0
		f := &followed{t, t.TempDir(), &listener{}, logs}
		f.write("web.yaml", service("web", "10.0.0.1"))
		log := zap.New(core)
		w := &directoryWatch{path: f.dir, log: log, files: newManifests(f.dir, log), feed: &feed{node: "node-1", provider: f.listener, log: zap.NewNop()}}
		w.newWatcher = func() (*fsnotify.Watcher, error) {
			attempts++
			return nil, syscall.EMFILE
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.run(ctx) }()
		synctest.Wait()
		f.expect("+service web 10.0.0.1", "node node-1 []", "services synced", "slices synced")
		f.expectLog("not notified", f.dir, "too many open files")
		f.write("web.yaml", service("web", "10.0.0.2"))
		time.Sleep(5 * rereadInterval)
		synctest.Wait()
		f.expect("service web 10.0.0.1 10.0.0.2")
		if logs.Len() > 0 || attempts < 5 {
			t.Errorf("log %v, %d attempts, want no more lines, and an attempt each time", logs.All(), attempts)
		}
		stop()
		if err := <-ended; err != nil {
			t.Errorf("run = %v", err)
		}
	})
}

func TestAMissingDirectoryIsAnErrorAtStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if _, err := manifestSource(file, "node-1", nil, zap.NewNop()); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("manifestSource = %v, want an error that names the directory", err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := manifestSource(file, "node-1", nil, zap.NewNop()); err == nil || !strings.Contains(err.Error(), file+" is a file") {
		t.Errorf("manifestSource = %v, want an error about a file", err)
	}
}

func TestReturnSoonDoesNotWaitForABlockedFileSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		ended := time.AfterFunc(time.Hour, stop)
		defer ended.Stop()
		began := time.Now()
		slow := func() error { <-ctx.Done(); time.Sleep(time.Minute); return nil }
		if err := returnSoon(ctx, slow); err != nil || time.Since(began) > time.Hour+time.Second {
			t.Errorf("returnSoon = %v after %v, want nil after little more than 1h", err, time.Since(began))
		}
		time.Sleep(time.Minute)
	})
	broken := errors.New("broken")
	if err := returnSoon(t.Context(), func() error { return broken }); !errors.Is(err, broken) {
		t.Errorf("returnSoon = %v, want %v", err, broken)
	}
}
