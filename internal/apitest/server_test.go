package apitest

import (
	"bufio"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func service(name, ip string, labels map[string]string) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: name, Labels: labels},
		Spec:       v1.ServiceSpec{ClusterIP: ip},
	}
}

func node(name string) *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// object has the fields of objects, lists and Statuses that the tests read.
type object struct {
	APIVersion string
	Kind       string
	Code       int
	Reason     string
	Metadata   struct {
		Name            string
		ResourceVersion string
		Annotations     map[string]string
	}
	Items []object
}

func get(t *testing.T, url string) (*http.Response, func()) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept", "application/vnd.kubernetes.protobuf,application/json")
	transport := &http.Transport{}
	response, err := (&http.Client{Transport: transport, Timeout: 20 * time.Second}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	if got := response.Header.Get("Content-Type"); got != "application/json" {
		t.Errorf("GET %s: Content-Type %q, want JSON", url, got)
	}
	return response, func() {
		_ = response.Body.Close()
		transport.CloseIdleConnections()
	}
}

// read returns the response to a request other than a watch.
func read(t *testing.T, url string) (code int, answer object) {
	t.Helper()
	response, done := get(t, url)
	defer done()
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatalf("GET %s: %v", url, err)
	}
	return response.StatusCode, answer
}

// events reads a watch line by line.
type events struct{ lines *bufio.Scanner }

func watchURL(t *testing.T, url string) *events {
	t.Helper()
	response, done := get(t, url)
	t.Cleanup(done)
	if response.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s", url, response.Status)
	}
	return &events{lines: bufio.NewScanner(response.Body)}
}

// next returns the type, kind, name and version of the next event.
func (e *events) next(t *testing.T) string {
	t.Helper()
	if !e.lines.Scan() {
		return "end"
	}
	var line struct {
		Type   string
		Object object
	}
	if err := json.Unmarshal(e.lines.Bytes(), &line); err != nil {
		t.Fatalf("event %s: %v", e.lines.Bytes(), err)
	}
	o := line.Object
	words := []string{line.Type, o.Kind}
	for _, word := range []string{o.Metadata.Name, o.Metadata.ResourceVersion, o.Reason} {
		if word != "" {
			words = append(words, word)
		}
	}
	if o.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true" {
		words = append(words, "initial events end")
	}
	return strings.Join(words, " ")
}

func (e *events) want(t *testing.T, want ...string) {
	t.Helper()
	for _, w := range want {
		if got := e.next(t); got != w {
			t.Fatalf("event %q, want %q", got, w)
		}
	}
}

// A list has selectors for labels and fields, and returns a version and kinds.
func TestListsHaveSelectors(t *testing.T) {
	s := New(t, Options{Hidden: []string{"servicecidrs"}})
	s.Put(t, service("b", "10.96.0.2", nil), service("a", "10.96.0.1", map[string]string{"proxy": "x"}),
		service("none", "None", nil), node("me"), node("other"),
		&discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: "s"}}, &networking.ServiceCIDR{})
	s.Delete(t, service("never", "", nil))
	for path, want := range map[string]string{
		"/api/v1/services": "v1 ServiceList 8: v1 Service a 3, v1 Service b 2, v1 Service none 4",
		"/api/v1/services?fieldSelector=spec.clusterIP!%3DNone&labelSelector=!proxy": "v1 ServiceList 8: v1 Service b 2",
		"/api/v1/services?labelSelector=proxy%3Dx":                                   "v1 ServiceList 8: v1 Service a 3",
		"/api/v1/nodes?fieldSelector=metadata.name%3Dme":                             "v1 NodeList 8: v1 Node me 5",
		"/apis/discovery.k8s.io/v1/endpointslices":                                   "discovery.k8s.io/v1 EndpointSliceList 8: discovery.k8s.io/v1 EndpointSlice s 7",
	} {
		code, l := read(t, s.URL()+path)
		var items []string
		for _, i := range l.Items {
			items = append(items, strings.Join([]string{i.APIVersion, i.Kind, i.Metadata.Name, i.Metadata.ResourceVersion}, " "))
		}
		got := l.APIVersion + " " + l.Kind + " " + l.Metadata.ResourceVersion + ": " + strings.Join(items, ", ")
		if code != http.StatusOK || got != want {
			t.Errorf("GET %s = %d %s, want %s", path, code, got, want)
		}
	}
}

// An error is a status object with code and reason.
func TestErrorsAreStatusObjects(t *testing.T) {
	s := New(t, Options{Hidden: []string{"servicecidrs"}})
	for path, want := range map[string]int{
		"/apis/networking.k8s.io/v1/servicecidrs": http.StatusNotFound,
		"/apis/apps/v1/deployments":               http.StatusNotFound,
		"/api/v1/services?labelSelector=%25":      http.StatusBadRequest,
		"/api/v1/services?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan":             http.StatusUnprocessableEntity,
		"/api/v1/services?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&labelSelector=": http.StatusUnprocessableEntity,
	} {
		code, status := read(t, s.URL()+path)
		if code != want || status.Code != want || status.Kind != "Status" || status.Reason == "" {
			t.Errorf("GET %s = %d %+v, want a Status with %d", path, code, status, want)
		}
	}
}

// TestWatchesHaveSelectors: an object that starts to match is added, one that stops to
// match is deleted, each with the version of that change. Other changes are bookmarks.
func TestWatchesHaveSelectors(t *testing.T) {
	s := New(t, Options{})
	labels := map[string]string{"proxy": "x"}
	s.Put(t, service("a", "10.96.0.1", nil)) // version 2
	const path = "/api/v1/services?watch=true&labelSelector=!proxy"
	plain := watchURL(t, s.URL()+path+"&resourceVersion=2")
	marked := watchURL(t, s.URL()+path+"&resourceVersion=2&allowWatchBookmarks=true")
	fresh := watchURL(t, s.URL()+path)
	fresh.want(t, "ADDED Service a 2")
	s.Put(t, node("me")) // version 3
	marked.want(t, "BOOKMARK Service 3")
	s.Put(t, service("a", "10.96.0.9", nil), service("a", "10.96.0.9", labels), service("a", "10.96.0.8", labels), service("a", "10.96.0.8", nil))
	s.Delete(t, service("a", "", nil))
	changes := []string{"MODIFIED Service a 4", "DELETED Service a 5", "ADDED Service a 7", "DELETED Service a 8"}
	plain.want(t, changes...)
	fresh.want(t, changes...)
	watchURL(t, s.URL()+path+"&resourceVersion=4").want(t, changes[1:]...)
	watchURL(t, s.URL()+path+"&resourceVersion=8&timeoutSeconds=0").want(t, "end")
}

// With the option, a list is streamed: all objects, a bookmark, then changes.
func TestListsAreStreamed(t *testing.T) {
	s := New(t, Options{WatchList: true})
	s.Put(t, service("b", "", nil), service("a", "", nil))
	s.Compact() // a list needs no history
	const query = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
	e := watchURL(t, s.URL()+"/api/v1/services?watch=true&resourceVersion=1"+query)
	e.want(t, "ADDED Service a 3", "ADDED Service b 2", "BOOKMARK Service 4 initial events end")
	s.Put(t, service("c", "", nil))
	e.want(t, "ADDED Service c 5")
	got := s.Requests()
	want := []string{"WATCH services?sendInitialEvents=true&allowWatchBookmarks=true&resourceVersion=1&resourceVersionMatch=NotOlderThan"}
	if !slices.Equal(got, want) {
		t.Errorf("requests %q, want %q", got, want)
	}
}

// A compacted version is expired, and a watch that has sent all changes continues.
func TestCompactedVersionsAreExpired(t *testing.T) {
	s := New(t, Options{})
	s.Put(t, service("a", "", nil))
	running := watchURL(t, s.URL()+"/api/v1/services?watch=true")
	running.want(t, "ADDED Service a 2")
	s.Compact()
	late := watchURL(t, s.URL()+"/api/v1/services?watch=true&resourceVersion=2")
	late.want(t, "ERROR Status Expired", "end")
	s.Put(t, service("b", "", nil))
	running.want(t, "ADDED Service b 4")
	watchURL(t, s.URL()+"/api/v1/services?watch=true&resourceVersion=3").want(t, "ADDED Service b 4")

	st := &stream{Server: s, seen: 2}
	s.Compact()
	if _, _, lost := st.since(); !lost {
		t.Error("a watch that has missed compacted changes continues, want an end")
	}
}

// Stop closes all connections, and Start serves the same objects.
func TestStopClosesConnections(t *testing.T) {
	s := New(t, Options{})
	e := watchURL(t, s.URL()+"/api/v1/services?watch=true")
	s.Stop()
	e.want(t, "end")
	if response, err := http.Get(s.URL() + "/api/v1/services"); err == nil {
		_ = response.Body.Close()
		t.Errorf("GET of a stopped server = %s, want an error", response.Status)
	}
	s.Stop()
	s.Put(t, service("a", "", nil))
	s.Start(t)
	if _, l := read(t, s.URL()+"/api/v1/services"); len(l.Items) != 1 {
		t.Errorf("%d services after Start, want 1", len(l.Items))
	}
}
