package programmed

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// NodeReport is what a node has programmed, and in JSON the answer of Handler.
type NodeReport struct {
	Node string `json:"node"`
	// Time is the node's clock when it answered.
	Time     time.Time              `json:"time"`
	Families map[v1.IPFamily]Family `json:"families"`
	// Asked are the endpoints that were asked for: each Family says all that sends to them. A port of 0
	// stands for all.
	Asked []netip.AddrPort `json:"asked,omitempty"`
}

// Proxy is a proxy that can be asked; a *proxier.Proxier is one.
type Proxy interface {
	Status() proxier.Status
	Sends(endpoints ...netip.AddrPort) []proxier.Sending
}

// Family is the part of one IP family.
type Family struct {
	// Services and EndpointSlices are resourceVersions: every change of these objects up to
	// them is programmed, but for the service ports in Failed. They are empty if Error is not.
	Services       string `json:"services,omitempty"`
	EndpointSlices string `json:"endpointSlices,omitempty"`
	// Error is why the node cannot say what is programmed.
	Error string `json:"error,omitempty"`
	// Failed are the service ports that are not as they should be.
	Failed []Failure `json:"failed,omitempty"`
	// Unlisted is how many failures are not in Failed.
	Unlisted int `json:"unlisted,omitempty"`
	// Sends says why the node may send new connections to endpoints: to those in Asked, and to all that
	// the EndpointSlices do not have as ready, because there is no better one. It is nil if the node
	// cannot say it.
	Sends []Send `json:"sends"`
	// UnlistedSends is how many are not in Sends.
	UnlistedSends int `json:"unlistedSends,omitempty"`
}

// Send is a proxier.Sending.
type Send struct {
	Endpoint  netip.AddrPort `json:"endpoint"`
	Namespace string         `json:"namespace,omitempty"`
	Service   string         `json:"service,omitempty"`
	Port      string         `json:"port,omitempty"`
	Protocol  v1.Protocol    `json:"protocol,omitempty"`
	// Frontends are those whose new connections may get it, such as "10.96.0.1:80/TCP".
	Frontends []string `json:"frontends,omitempty"`
	// Ready says that the node has the endpoint as a ready one. Without Frontends, it leaves it to other nodes.
	Ready bool `json:"ready,omitempty"`
	// FlowsOnly says that only existing flows of UDP may go on.
	FlowsOnly bool   `json:"flowsOnly,omitempty"`
	Reason    string `json:"reason,omitempty"`
}

// sends reports whether new connections or datagrams may go there.
func (s *Send) sends() bool { return !s.FlowsOnly && (len(s.Frontends) > 0 || s.Reason != "") }

// String says it in a sentence.
func (s *Send) String() string {
	var by []string
	if s.Service != "" {
		by = append(by, fmt.Sprintf("port %q (%s) of Service %s/%s", s.Port, s.Protocol, s.Namespace, s.Service))
	}
	if len(s.Frontends) > 0 {
		by = append(by, "at "+strings.Join(s.Frontends, ", "))
	}
	if s.Reason != "" {
		by = append(by, "("+s.Reason+")")
	}
	return fmt.Sprintf("it still sends to %v: %s", s.Endpoint, strings.Join(by, " "))
}

// Failure is a service port that is not programmed as it should be.
type Failure struct {
	Namespace string      `json:"namespace"`
	Service   string      `json:"service"`
	Port      string      `json:"port,omitempty"`
	Protocol  v1.Protocol `json:"protocol"`
	Since     time.Time   `json:"since"`
	Error     string      `json:"error"`
}

// NewReport returns the NodeReport of a node, with all that sends to some endpoints.
func NewReport(node string, from Proxy, now time.Time, asked ...netip.AddrPort) NodeReport {
	status := from.Status() // first: what it says is in what follows
	r := NodeReport{Node: node, Time: now, Families: make(map[v1.IPFamily]Family, len(status.Families)), Asked: asked}
	sends := map[v1.IPFamily][]Send{}
	for _, s := range from.Sends(asked...) {
		family := v1.IPv4Protocol
		if s.Endpoint.Addr().Is6() {
			family = v1.IPv6Protocol
		}
		sends[family] = append(sends[family], sendOf(&s))
	}
	for name, s := range status.Families {
		f := Family{Services: s.Versions.Services, EndpointSlices: s.Versions.EndpointSlices}
		if s.Versions == (changetracker.Versions{}) {
			f.Error = unknown(&s)
		} else if err := noOrder(s.Versions.Services, s.Versions.EndpointSlices); err != nil {
			f = Family{Error: err.Error()}
		}
		for _, e := range s.Failed {
			f.Failed = append(f.Failed, Failure{
				Namespace: e.Name.Namespace, Service: e.Name.Name, Port: e.Name.Port, Protocol: e.Name.Protocol,
				Since: e.Since, Error: e.Err.Error(),
			})
		}
		f.Sends = firstOfEach(sends[name], asked)
		r.Families[name] = f
	}
	return r
}

// firstOfEach puts one Send of each asked endpoint before all others, so that a limit leaves it.
func firstOfEach(all []Send, asked []netip.AddrPort) []Send {
	first, rest, has := []Send{}, []Send(nil), map[netip.AddrPort]bool{}
	for _, s := range all {
		i := slices.IndexFunc(asked, func(asked netip.AddrPort) bool { return s.sends() && !has[asked] && covers(asked, s.Endpoint) })
		if i < 0 {
			rest = append(rest, s)
			continue
		}
		has[asked[i]], first = true, append(first, s)
	}
	return append(first, rest...)
}

func sendOf(s *proxier.Sending) Send {
	is := Send{
		Endpoint: s.Endpoint, Namespace: s.Service.Namespace, Service: s.Service.Name, Port: s.Service.Port, Protocol: s.Service.Protocol,
		Ready: s.Ready, FlowsOnly: s.FlowsOnly, Reason: s.Reason,
	}
	for _, key := range s.Frontends {
		is.Frontends = append(is.Frontends, key.String())
	}
	return is
}

// unknown returns why a family has no Versions.
func unknown(s *proxier.FamilyStatus) string {
	switch {
	case s.Repairing && s.Damaged > 0:
		return "another program changed our kernel objects, they are not repaired yet: " + s.LastDamage.String()
	case s.Repairing:
		return "another program may have changed our kernel objects, the sync that repairs them has not ended"
	case s.LastError != nil:
		return "the last sync failed: " + s.LastError.Error()
	case !s.Synced:
		return "nothing is programmed yet"
	case !s.PendingSince.IsZero():
		return "changes are being programmed, since " + s.PendingSince.Format(time.RFC3339Nano)
	}
	return "no resourceVersion is known: the source of Services and EndpointSlices does not call OnVersion, as informer.Run does"
}

// Limit drops failures and Sends until each family has at most so many of both, and shortens their
// texts. A ServiceChange that a dropped one may be about is missing then.
func (r *NodeReport) Limit(most, length int) {
	for name, f := range r.Families {
		if n := len(f.Failed); n > most {
			f.Failed, f.Unlisted = slices.Clip(f.Failed[:most]), f.Unlisted+n-most
		}
		if n := len(f.Sends); n > most {
			f.Sends, f.UnlistedSends = slices.Clip(f.Sends[:most]), f.UnlistedSends+n-most
		}
		for i := range f.Sends {
			s := &f.Sends[i]
			s.Reason = shortened(s.Reason, length)
			s.Frontends = s.Frontends[:min(len(s.Frontends), mostFrontends)]
		}
		for i := range f.Failed {
			f.Failed[i].Error = shortened(f.Failed[i].Error, length)
		}
		f.Error = shortened(f.Error, length)
		r.Families[name] = f
	}
}

// mostFrontends bounds those of a Send in a NodeReport with limits.
const mostFrontends = 4

// shortened returns the first bytes of a text, without a part of a character.
func shortened(text string, length int) string {
	if len(text) <= length {
		return text
	}
	for length > 0 && !utf8.RuneStart(text[length]) {
		length--
	}
	return text[:length]
}

// ServiceChange is a change of a Service or of its EndpointSlices.
type ServiceChange struct {
	Service types.NamespacedName
	// Versions are the resourceVersions of the objects that changed; an empty one does not
	// matter. A deletion has one too: that of the object in the watch event.
	Versions changetracker.Versions
	// Left are endpoints that must not get new connections any more, whatever the EndpointSlices say;
	// a port of 0 stands for all. They may be all that is to be waited for.
	Left []netip.AddrPort
	// Listed is the version of a list of EndpointSlices that has none of Left. A node that was not asked about Left,
	// because it writes Leases, must have it: after its next event or bookmark. Empty means no such list.
	Listed string
	// Joined are endpoints of the Service that each node must have as ready ones. Leases do not say it: there,
	// the Versions count.
	Joined []netip.AddrPort
}

// Validate returns an error if there is nothing to wait for, or a version that cannot be compared.
func (c *ServiceChange) Validate() error {
	if c.Versions == (changetracker.Versions{}) && len(c.Left) == 0 {
		return errors.New("nothing to wait for: set Change.Versions or Change.Left")
	}
	if n := len(c.Left) + len(c.Joined); n > MaxAsked {
		return fmt.Errorf("ServiceChange.Left and Joined have %d endpoints, want at most %d: a port of 0 stands for all of an address", n, MaxAsked)
	}
	return noOrder(c.Versions.Services, c.Versions.EndpointSlices, c.Listed)
}

// noOrder returns an error if a version has no order.
func noOrder(versions ...string) error {
	for _, v := range versions {
		if _, err := resourceversion.CompareResourceVersion(cmp.Or(v, "1"), "1"); err != nil {
			return fmt.Errorf("this API server's versions cannot be compared, so nobody can tell which is newer: %w", err)
		}
	}
	return nil
}

// Missing returns nil if a node has programmed a ServiceChange in all of its IP families, and an error
// that says what is missing otherwise.
func (r *NodeReport) Missing(c ServiceChange) error {
	if len(r.Families) == 0 {
		return errors.New("it serves no IP family")
	}
	var missing []string
	for name, f := range r.Families {
		why := f.missing(&c)
		if why == "" {
			why = f.stillSends(name, &c, r.Asked)
		}
		if why == "" {
			why = f.lacks(name, &c, r.Asked)
		}
		if why != "" {
			missing = append(missing, string(name)+": "+why)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return errors.New(strings.Join(missing, "; "))
}

// behind returns why a node does not have a version of objects; an empty one is not wanted.
func behind(kind, has, want string) string {
	switch order, err := resourceversion.CompareResourceVersion(has, want); {
	case want == "":
		return ""
	case has == "":
		return fmt.Sprintf("no version of %s is known: their source does not call OnVersion", kind)
	case err != nil:
		return fmt.Sprintf("%s have version %q: %v", kind, has, err)
	case order < 0:
		return fmt.Sprintf("%s are those of version %s, want %s", kind, has, want)
	}
	return ""
}

func (f *Family) missing(c *ServiceChange) string {
	if f.Error != "" {
		return f.Error
	}
	if why := behind("Services", f.Services, c.Versions.Services); why != "" {
		return why
	}
	if why := behind("EndpointSlices", f.EndpointSlices, c.Versions.EndpointSlices); why != "" {
		return why
	}
	if len(c.Left) > 0 {
		return "" // Sends knows what those that fail have
	}
	for i := range f.Failed {
		if e := &f.Failed[i]; e.Namespace == c.Service.Namespace && e.Service == c.Service.Name {
			return fmt.Sprintf("port %q (%s) fails since %s: %s", e.Port, e.Protocol, e.Since.Format(time.RFC3339), e.Error)
		}
	}
	if f.Unlisted > 0 && c.Service.Name != "" {
		return fmt.Sprintf("%d service ports fail that the report does not list: this may be one of them", f.Unlisted)
	}
	return ""
}

// stillSends returns why new connections may go to an endpoint that has left.
func (f *Family) stillSends(family v1.IPFamily, c *ServiceChange, asked []netip.AddrPort) string {
	for _, left := range c.Left {
		left = unmapped(left)
		if (family == v1.IPv6Protocol) != left.Addr().Is6() {
			continue
		}
		if f.Sends == nil {
			return "it does not say to which endpoints it sends: its proxy is older, or another one"
		}
		for i := range f.Sends {
			if s := &f.Sends[i]; s.sends() && covers(left, s.Endpoint) {
				return s.String()
			}
		}
		if slices.Contains(asked, left) {
			continue
		}
		if why := behind("EndpointSlices", f.EndpointSlices, c.Listed); why != "" {
			return fmt.Sprintf("it may not know yet that %v is gone: %s", left, why)
		}
		if f.UnlistedSends > 0 {
			return fmt.Sprintf("it sends to %d endpoints that are not ready and not in the report: %v may be one of them", f.UnlistedSends, left)
		}
	}
	return ""
}

// lacks returns why an endpoint that has joined gets no connections from a node that was asked for it.
func (f *Family) lacks(family v1.IPFamily, c *ServiceChange, asked []netip.AddrPort) string {
	for _, joined := range c.Joined {
		joined = unmapped(joined)
		if (family == v1.IPv6Protocol) != joined.Addr().Is6() || !slices.Contains(asked, joined) {
			continue
		}
		if !slices.ContainsFunc(f.Sends, func(s Send) bool {
			return s.Ready && s.Namespace == c.Service.Namespace && s.Service == c.Service.Name && covers(joined, s.Endpoint)
		}) {
			return fmt.Sprintf("it does not have endpoint %v of Service %v as ready", joined, c.Service)
		}
	}
	return ""
}

// unmapped returns an endpoint as nodes have it: IPv4 in IPv6 as IPv4.
func unmapped(e netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(e.Addr().Unmap(), e.Port()) }

// covers reports whether an endpoint is one of those that left stands for.
func covers(left, endpoint netip.AddrPort) bool {
	return left.Addr() == endpoint.Addr() && (left.Port() == 0 || endpoint.Port() == 0 || left.Port() == endpoint.Port())
}
