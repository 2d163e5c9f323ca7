package programmed

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Pod is a pod as endpoints name it.
type Pod struct {
	Namespace, Name string
	// IPs find it in EndpointSlices whose endpoints do not name their pods.
	IPs []string
}

// endpoint returns the pod's endpoint in a slice, or nil.
func (p *Pod) endpoint(s *discovery.EndpointSlice) *discovery.Endpoint {
	i := slices.IndexFunc(s.Endpoints, p.is)
	if i < 0 {
		return nil
	}
	return &s.Endpoints[i]
}

// is reports whether an endpoint is the pod.
func (p *Pod) is(e discovery.Endpoint) bool {
	if e.TargetRef != nil {
		return e.TargetRef.Kind == "Pod" && e.TargetRef.Name == p.Name
	}
	return slices.ContainsFunc(e.Addresses, func(a string) bool { return slices.Contains(p.IPs, a) })
}

// Departure follows the EndpointSlices of a pod that ends: it says when they do not give the pod
// any more connections, and which Changes the nodes must have then. Give it all EndpointSlices of
// the pod's namespace. It is for one goroutine.
type Departure struct {
	pod    Pod
	slices map[string]*discovery.EndpointSlice
	// had are the slices that have or had the pod, with their newest version.
	had    map[string]membership
	newest string
}

// membership is a slice that has or had the pod.
type membership struct{ service, version string }

// NewDeparture returns the Departure of a pod.
func NewDeparture(pod Pod) *Departure {
	return &Departure{pod: pod, slices: map[string]*discovery.EndpointSlice{}, had: map[string]membership{}}
}

// Set takes a slice that is new or has changed.
func (d *Departure) Set(s *discovery.EndpointSlice) {
	service := s.Labels[discovery.LabelServiceName]
	if _, headless := s.Labels[v1.IsHeadlessService]; service == "" || headless {
		return // no proxy sends by it
	}
	d.slices[s.Name] = s
	d.newest = newer(d.newest, s.ResourceVersion)
	if _, had := d.had[s.Name]; had || d.pod.endpoint(s) != nil {
		d.had[s.Name] = membership{service, s.ResourceVersion}
	}
}

// Delete takes the version at which a slice was deleted, or at which it is known to be gone.
func (d *Departure) Delete(slice, version string) {
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
func (d *Departure) Replace(list []*discovery.EndpointSlice, version string) {
	for name := range maps.Clone(d.slices) {
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

// Changes returns what the nodes must have, so that none sends to the pod any more: one Change for
// each of its Services. The error says why the pod still gets connections. If no slice has the
// pod, it may have left just before: then the Change is that of the newest slice.
func (d *Departure) Changes() ([]Change, error) {
	versions, stays := map[string]string{}, map[string]bool{}
	for name, m := range d.had {
		versions[m.service] = newer(versions[m.service], m.version)
		if s := d.slices[name]; s != nil {
			if why := d.sends(s); why != "" {
				stays[fmt.Sprintf("EndpointSlice %s of Service %s %s", name, m.service, why)] = true
			}
		}
	}
	if len(stays) > 0 {
		return nil, errors.New(strings.Join(slices.Sorted(maps.Keys(stays)), "; "))
	}
	if len(versions) == 0 && d.newest != "" {
		return []Change{{Versions: changetracker.Versions{EndpointSlices: d.newest}}}, nil
	}
	changes := make([]Change, 0, len(versions))
	for _, service := range slices.Sorted(maps.Keys(versions)) {
		changes = append(changes, Change{
			Service: types.NamespacedName{Namespace: d.pod.Namespace, Name: service}, Versions: changetracker.Versions{EndpointSlices: versions[service]},
		})
	}
	return changes, nil
}

// sends returns why a node that has a slice sends connections to the pod; it is empty if it does
// not. Without any ready endpoint, nodes send to endpoints that serve until they end.
func (d *Departure) sends(s *discovery.EndpointSlice) string {
	e := d.pod.endpoint(s)
	switch {
	case e == nil:
		return ""
	case !isFalse(e.Conditions.Ready) && isTrue(e.Conditions.Terminating):
		return "has the pod as ready although it ends: does the Service have publishNotReadyAddresses?"
	case !isFalse(e.Conditions.Ready):
		return "still has the pod as ready"
	case isTrue(e.Conditions.Terminating) && !isFalse(e.Conditions.Serving) && !d.othersReady(s):
		return "has no ready endpoint, so that nodes still send to those that end"
	}
	return ""
}

// othersReady reports whether a Service has a ready endpoint of the family of a slice.
func (d *Departure) othersReady(like *discovery.EndpointSlice) bool {
	for _, s := range d.slices {
		if s.AddressType == like.AddressType && s.Labels[discovery.LabelServiceName] == like.Labels[discovery.LabelServiceName] &&
			slices.ContainsFunc(s.Endpoints, func(e discovery.Endpoint) bool { return !isFalse(e.Conditions.Ready) }) {
			return true
		}
	}
	return false
}

// A condition that is not set means what each caller says.
func isTrue(condition *bool) bool  { return condition != nil && *condition }
func isFalse(condition *bool) bool { return condition != nil && !*condition }
