package cluster

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/ptr"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// Pod is a pod as endpoints name it.
type Pod struct {
	Namespace, Name string
	// IPs find it in EndpointSlices whose endpoints do not name their pods.
	IPs []string
}

// endpoints yields the pod's endpoints in a slice.
func (p *Pod) endpoints(s *discovery.EndpointSlice) iter.Seq[*discovery.Endpoint] {
	return func(yield func(*discovery.Endpoint) bool) {
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; p.is(e) && !yield(e) {
				return
			}
		}
	}
}

// is reports whether an endpoint is the pod. Pods of the node's network share its address, so that the
// name of a pod says more.
func (p *Pod) is(e *discovery.Endpoint) bool {
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		return e.TargetRef.Name == p.Name
	}
	return slices.ContainsFunc(e.Addresses, func(a string) bool { return slices.Contains(p.IPs, a) })
}

// departure follows the EndpointSlices of a pod that ends: it says when they do not have the pod as
// ready any more, and which Changes the nodes must have then. Whether a node sends to a pod that is not
// ready, the node says. Give it all EndpointSlices of the pod's namespace. It is for one goroutine.
type departure struct {
	pod    Pod
	slices map[string]*discovery.EndpointSlice
	// had are the slices that have or had the pod, with their newest version.
	had map[string]membership
	// newest is the version of the newest slice, listed that of the last list.
	newest, listed string
}

// membership is a slice that has or had the pod, at these endpoints.
type membership struct {
	service, version string
	at               map[netip.AddrPort]bool
}

// newDeparture returns the departure of a pod.
func newDeparture(pod Pod) *departure {
	return &departure{pod: pod, slices: map[string]*discovery.EndpointSlice{}, had: map[string]membership{}}
}

// Set takes a slice that is new or has changed.
func (d *departure) Set(s *discovery.EndpointSlice) {
	service := s.Labels[discovery.LabelServiceName]
	if _, headless := s.Labels[v1.IsHeadlessService]; service == "" || headless {
		return // no proxy sends by it
	}
	d.slices[s.Name] = s
	d.newest = newer(d.newest, s.ResourceVersion)
	m, had := d.had[s.Name]
	if !had {
		m.at = map[netip.AddrPort]bool{}
	}
	m.service, m.version = service, s.ResourceVersion
	for e := range d.pod.endpoints(s) {
		had = true
		addAddrs(m.at, e, s.Ports)
	}
	if had {
		d.had[s.Name] = m
	}
}

// Delete takes the version at which a slice was deleted, or at which it is known to be gone.
func (d *departure) Delete(slice, version string) {
	if m, had := d.had[slice]; had {
		m.version = newer(m.version, version)
		d.had[slice] = m
	}
	if _, known := d.slices[slice]; known {
		d.newest = newer(d.newest, version)
	}
	delete(d.slices, slice)
}

// Replace takes a list of all slices, which has a version.
func (d *departure) Replace(list []*discovery.EndpointSlice, version string) {
	d.listed = version
	for name := range d.slices {
		if !slices.ContainsFunc(list, func(s *discovery.EndpointSlice) bool { return s.Name == name }) {
			d.Delete(name, version)
		}
	}
	for _, s := range list {
		d.Set(s)
	}
}

// newer returns the later one of two versions, one of which may be empty.
func newer(a, b string) string {
	if order, err := resourceversion.CompareResourceVersion(a, b); a == "" || err == nil && order < 0 {
		return b
	}
	return a
}

// addAddrs adds the addresses and ports of an endpoint.
func addAddrs(to map[netip.AddrPort]bool, e *discovery.Endpoint, ports []discovery.EndpointPort) {
	for _, text := range e.Addresses {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			continue // no proxy uses it
		}
		for _, p := range ports {
			to[netip.AddrPortFrom(addr.Unmap(), uint16(ptr.Deref(p.Port, 0)))] = true
		}
	}
}

// Changes returns what the nodes must have, so that none sends to the pod any more: one programmed.ServiceChange for
// each of its Services. The error says why the pod still gets connections. If no slice has the
// pod, it may have left just before: then the programmed.ServiceChange is that of the newest slice, and of the pod's addresses.
func (d *departure) Changes() ([]programmed.ServiceChange, error) {
	versions, left, stays := map[string]string{}, map[string]map[netip.AddrPort]bool{}, map[string]bool{}
	for name, m := range d.had {
		versions[m.service] = newer(versions[m.service], m.version)
		if left[m.service] == nil {
			left[m.service] = map[netip.AddrPort]bool{}
		}
		maps.Copy(left[m.service], m.at)
		if s := d.slices[name]; s != nil {
			if why := d.pod.stays(s); why != "" {
				stays[fmt.Sprintf("EndpointSlice %s of Service %s %s", name, m.service, why)] = true
			}
		}
	}
	if len(stays) > 0 {
		return nil, errors.New(strings.Join(slices.Sorted(maps.Keys(stays)), "; "))
	}
	if len(versions) == 0 {
		left := d.ownAddrs()
		if d.newest == "" && len(left) == 0 {
			return nil, nil
		}
		return []programmed.ServiceChange{{Versions: changetracker.Versions{EndpointSlices: d.newest}, Left: left, Listed: d.listed}}, nil
	}
	changes := make([]programmed.ServiceChange, 0, len(versions))
	for _, service := range slices.Sorted(maps.Keys(versions)) {
		changes = append(changes, programmed.ServiceChange{
			Service:  types.NamespacedName{Namespace: d.pod.Namespace, Name: service},
			Versions: changetracker.Versions{EndpointSlices: versions[service]}, Left: bounded(left[service]),
		})
	}
	return changes, nil
}

// bounded returns endpoints in order: if they are too many to ask for, without ports.
func bounded(endpoints map[netip.AddrPort]bool) []netip.AddrPort {
	all := slices.SortedFunc(maps.Keys(endpoints), netip.AddrPort.Compare)
	if len(all) <= programmed.MaxAsked {
		return all
	}
	for i := range all {
		all[i] = netip.AddrPortFrom(all[i].Addr(), 0)
	}
	return slices.Compact(all)
}

// ownAddrs are the addresses of the pod that no other endpoint has: pods of the node's network share them.
func (d *departure) ownAddrs() (all []netip.AddrPort) {
	others := map[string]bool{}
	for _, s := range d.slices {
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses {
				others[text] = true
			}
		}
	}
	for _, text := range d.pod.IPs {
		if addr, err := netip.ParseAddr(text); err == nil && !others[text] {
			all = append(all, netip.AddrPortFrom(addr.Unmap(), 0))
		}
	}
	return all
}

// stays returns why nodes that have a slice send to the pod as long as they follow it; empty if the pod is not ready
// there.
func (p *Pod) stays(s *discovery.EndpointSlice) string {
	for e := range p.endpoints(s) {
		switch {
		case !ptr.Deref(e.Conditions.Ready, true):
		case ptr.Deref(e.Conditions.Terminating, false):
			return "has the pod as ready although it ends: does the Service have publishNotReadyAddresses?"
		default:
			return "still has the pod as ready"
		}
	}
	return ""
}
