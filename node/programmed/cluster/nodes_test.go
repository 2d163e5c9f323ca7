package cluster

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// usualNode is about what a kubelet reports: 50 images, and the usual labels, conditions and numbers.
func usualNode(i int) v1.Node {
	name := fmt.Sprintf("node-%05d.region.example.com", i)
	n := v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: "0a9ba3b4-7a55-4d4b-a1f1-5f7f3f2c8f10", ResourceVersion: "1234567890", Labels: map[string]string{
			v1.LabelHostname: name, v1.LabelOSStable: "linux", v1.LabelArchStable: "amd64", v1.LabelTopologyZone: "zone-a", v1.LabelTopologyRegion: "region", v1.LabelInstanceTypeStable: "large",
		}},
		Spec: v1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24"}, ProviderID: "example://zone-a/" + name},
		Status: v1.NodeStatus{
			Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)}, {Type: v1.NodeHostName, Address: name}},
			NodeInfo:  v1.NodeSystemInfo{MachineID: strings.Repeat("f", 32), SystemUUID: strings.Repeat("f", 36), BootID: strings.Repeat("f", 36), KernelVersion: "6.12.0", OSImage: "Linux", KubeletVersion: "v1.36.0"},
		},
	}
	for _, c := range []v1.NodeConditionType{v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure, v1.NodeReady} {
		n.Status.Conditions = append(n.Status.Conditions, v1.NodeCondition{Type: c, Status: v1.ConditionTrue, Reason: "KubeletHasSufficient" + string(c), Message: "kubelet has sufficient " + string(c)})
	}
	for k := range 50 {
		image := fmt.Sprintf("registry.example.com/team/program-%d", k)
		n.Status.Images = append(n.Status.Images, v1.ContainerImage{Names: []string{image + "@sha256:" + strings.Repeat("a", 64), image + ":v1.2.3"}, SizeBytes: 123456789})
	}
	return n
}

// protobufNodes is an API server that has Nodes and answers as it is asked to.
type protobufNodes struct {
	mu       sync.Mutex // guards all below
	nodes    v1.NodeList
	requests []string
	refuses  bool
}

func (s *protobufNodes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r.URL.String()+" "+r.Header.Get("Accept"))
	if s.refuses {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	scheme := runtime.NewScheme()
	_ = v1.AddToScheme(scheme) // it never fails
	info, _ := runtime.SerializerInfoForMediaType(serializer.NewCodecFactory(scheme).SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_ = info.Serializer.Encode(&s.nodes, w) // the client may be gone
}

// A waiter lists Nodes as protobuf from the API server's memory, and not often: also after a failure.
// A list that fails leaves those of the last one.
func TestNodesAreListedCheaply(t *testing.T) {
	const count = 2000
	s := &protobufNodes{}
	s.nodes.SetGroupVersionKind(v1.SchemeGroupVersion.WithKind("NodeList"))
	for i := range count {
		s.nodes.Items = append(s.nodes.Items, usualNode(i))
	}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	c, err := New(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.core.Client.CloseIdleConnections)
	n := &nodes{client: c}
	list := func() {
		t.Helper()
		names, err := n.list(t.Context())
		if err != nil || len(names) != count || names[7] != s.nodes.Items[7].Name || n.address(names[7]) != "10.0.0.7" {
			t.Fatalf("the list has %d names, %v, want %d", len(names), err, count)
		}
	}
	before := time.Now()
	list()
	if at := n.next.Sub(before); at < refreshFor(count) || time.Until(n.next) > refreshFor(count) {
		t.Errorf("the next list of %d Nodes is %v after the first one began, want at least %v", count, at, refreshFor(count))
	}
	n.next = n.next.Add(time.Hour) // it is not due, however slow the machine is
	list()
	if want := "/api/v1/nodes?resourceVersion=0 application/vnd.kubernetes.protobuf,application/json"; len(s.requests) != 1 || s.requests[0] != want {
		t.Errorf("requests are %q, want one: %q", s.requests, want)
	}
	s.refuses, n.next = true, time.Now()
	list()
	if n.failed == nil || time.Until(n.next) > listRetry {
		t.Errorf("after a failure, %v, the next list is in %v", n.failed, time.Until(n.next))
	}
}

// The first list fails: the reason stays until the next try.
func TestNodesCannotBeListed(t *testing.T) {
	s := &protobufNodes{refuses: true}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	c, err := New(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.core.Client.CloseIdleConnections)
	n := &nodes{client: c}
	for range 10 {
		if _, err := n.list(t.Context()); err == nil {
			t.Error("a list without an error")
		}
		n.next = n.next.Add(time.Hour) // no other try, however slow the machine is
	}
	if len(s.requests) != 1 {
		t.Errorf("%d requests, want one", len(s.requests))
	}
}

// The arithmetic of docs/PROGRAMMED.md.
func TestListsOfLargeClusters(t *testing.T) {
	for nodes, want := range map[int]time.Duration{1: 5 * time.Second, 500: 5 * time.Second, 5000: 25 * time.Second, 65000: 325 * time.Second} {
		if got := refreshFor(nodes); got != want {
			t.Errorf("%d Nodes are listed every %v, want %v", nodes, got, want)
		}
	}
	node := usualNode(1)
	text, err := json.Marshal(&node)
	if err != nil {
		t.Fatal(err)
	}
	short, err := node.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("a Node has %d bytes as JSON, %d as protobuf", len(text), len(short))
	if len(short) >= len(text) {
		t.Errorf("a Node has %d bytes as JSON, %d as protobuf", len(text), len(short))
	}
}
