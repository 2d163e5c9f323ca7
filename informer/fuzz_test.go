package informer

import (
	"encoding/json"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// FuzzNode: a tracker accepts every Node that has a name, but for addresses that no host has.
func FuzzNode(f *testing.F) {
	f.Add([]byte(`{"metadata":{"name":"a","labels":{"topology.kubernetes.io/zone":"z"}},"spec":{"podCIDRs":["10.0.0.0/24","fd00::/64","x"]},
		"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"},{"type":"ExternalIP","address":"::ffff:192.0.2.2"},{"type":"Hostname","address":"a"}]}}`))
	f.Add([]byte(`{"spec":{"podCIDR":"::ffff:10.0.0.0/104","taints":[{"key":"ToBeDeletedByClusterAutoscaler"}]},"status":{"addresses":[{"type":"InternalIP","address":"fe80::1%eth0"}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var node v1.Node
		if json.Unmarshal(data, &node) != nil {
			return
		}
		n := NodeOf(&node)
		for _, p := range n.PodCIDRs {
			if p != p.Masked() {
				t.Errorf("pod CIDR %v", p)
			}
		}
		n.Addresses = nil
		options := changetracker.Options{Node: n}
		if err := options.Validate(); err != nil {
			t.Errorf("%+v: %v", n, err)
		}
	})
}
