package changetracker

import (
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// An imported slice belongs to the right Service and names the nodes of the right cluster (KEP-1645).
func TestImportedSlices(t *testing.T) {
	imported := ImportedService(web)
	for name, c := range map[string]struct {
		own, from string // the node's cluster, and the Source
		labels    map[string]string
		imported  bool // or else of the Service of the same name
		node      string
	}{
		"a slice of the cluster": {labels: map[string]string{discovery.LabelServiceName: "web"}, node: "here"},
		"an imported slice, and our cluster has no name": {
			labels: map[string]string{LabelServiceImport: "web", LabelSourceCluster: "west"}, imported: true,
		},
		"imported from another cluster": {
			own: "east", labels: map[string]string{LabelServiceImport: "web", LabelSourceCluster: "west"}, imported: true, node: "west/here",
		},
		"imported from our own": {
			own: "east", labels: map[string]string{LabelServiceImport: "web", LabelSourceCluster: "east"}, imported: true, node: "here",
		},
		"imported without a source cluster": {own: "east", labels: map[string]string{LabelServiceImport: "web"}, imported: true},
		"the derived Service is a real one": {
			labels: map[string]string{LabelServiceImport: "any", LabelSourceCluster: "west", discovery.LabelServiceName: "web"}, node: "here",
		},
		"the derived Service is a real one, and the cluster is another": {
			own: "east", labels: map[string]string{LabelServiceImport: "any", LabelSourceCluster: "west", discovery.LabelServiceName: "web"}, node: "west/here",
		},
		"of a Source": {own: "east", from: "west", labels: map[string]string{LabelServiceImport: "web"}, imported: true, node: "west/here"},
		"of a Source that imports ours": {
			own: "east", from: "west", labels: map[string]string{LabelServiceImport: "web", LabelSourceCluster: "east"}, imported: true, node: "here",
		},
	} {
		tracker := mustTracker(t, func(o *Options) { o.Cluster = c.own })
		tracker.Services.Update(nil, webService())
		tracker.Services.Update(nil, webService(func(s *v1.Service) {
			s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = imported.Name, "10.96.0.11", []string{"10.96.0.11", "fd00::11"}
		}))
		hinted := func(e *discovery.Endpoint) {
			e.Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: "here"}}}
		}
		s := webSlice("s", at("10.0.0.1", onNode("here"), hinted))
		s.Labels = c.labels
		tracker.Source(c.from).Endpoints.EndpointSliceUpdate(s, false)
		state, _ := applyAll(t, tracker, v1.IPv4Protocol)
		of, other := ServicePortName{web, "http", v1.ProtocolTCP}, ServicePortName{imported, "http", v1.ProtocolTCP}
		if c.imported {
			of, other = other, of
		}
		want := []Endpoint{{Addr: netip.MustParseAddrPort("10.0.0.1:8080"), Ready: true, Serving: true, Node: c.node}}
		if c.node != "" {
			want[0].NodeHints = []string{c.node}
		}
		if got := state.Endpoints(of); !slices.EqualFunc(got, want, func(a, b Endpoint) bool { return a.Equal(&b) }) {
			t.Errorf("%s: %v has %+v, want %+v", name, of, got, want)
		}
		if got := state.Endpoints(other); len(got) != 0 {
			t.Errorf("%s: %v has %v too, want none", name, other, got)
		}
	}
}
