package canary

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Namespace is that of the canary's Services, "canary-ipv4" and "canary-ipv6". The dot makes
// it an invalid name of a Kubernetes namespace (RFC 1123 label), so no Service of a cluster is
// in it.
const Namespace = "serviceplane.internal"

const (
	// servicePort is the port of the VIPs: discard (RFC 863).
	servicePort = 9
	portName    = "canary"
)

func metaOf(vip netip.AddrPort) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: Namespace, Name: "canary-" + strings.ToLower(string(familyOf(vip.Addr())))}
}

func serviceOf(vip netip.AddrPort) *v1.Service {
	address := vip.Addr().String()
	return &v1.Service{
		ObjectMeta: metaOf(vip),
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: address, ClusterIPs: []string{address},
			IPFamilies: []v1.IPFamily{familyOf(vip.Addr())},
			Ports:      []v1.ServicePort{{Name: portName, Protocol: v1.ProtocolTCP, Port: int32(vip.Port())}},
		},
	}
}

func sliceOf(vip, endpoint netip.AddrPort) *discovery.EndpointSlice {
	meta := metaOf(vip)
	meta.Labels = map[string]string{discovery.LabelServiceName: meta.Name}
	return &discovery.EndpointSlice{
		ObjectMeta:  meta,
		AddressType: discovery.AddressType(familyOf(vip.Addr())),
		Ports:       []discovery.EndpointPort{{Name: new(portName), Protocol: new(v1.ProtocolTCP), Port: new(int32(endpoint.Port()))}},
		Endpoints: []discovery.Endpoint{{
			Addresses:  []string{endpoint.Addr().String()},
			Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		}},
	}
}

// WithoutCanary returns an Announcer that passes all announcements to next, except those of
// the canary's VIPs, which are for this node alone. Nil stays nil.
func WithoutCanary(next proxier.Announcer) proxier.Announcer {
	if next == nil {
		return nil
	}
	return quiet{next}
}

type quiet struct{ next proxier.Announcer }

func (q quiet) Announce(ctx context.Context, family v1.IPFamily, announcements []proxier.Announcement) error {
	if announcements = others(announcements); len(announcements) == 0 {
		return nil
	}
	return q.next.Announce(ctx, family, announcements)
}

func (q quiet) Withdraw(ctx context.Context, family v1.IPFamily, announcements []proxier.Announcement) error {
	if announcements = others(announcements); len(announcements) == 0 {
		return nil
	}
	return q.next.Withdraw(ctx, family, announcements)
}

func others(announcements []proxier.Announcement) []proxier.Announcement {
	return slices.DeleteFunc(slices.Clone(announcements), func(a proxier.Announcement) bool { return a.Name.Namespace == Namespace })
}
