package coexistence

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// probe is a connection, and what must come of it.
type probe struct {
	name     string
	from, to place
	// server is who must answer; "" means that nobody may.
	server string
	source source
}

type place int

const (
	node place = iota
	client
	pod0
	pod1
	pod2
	vip      // plus the number of a Service
	nodePort = vip + 10
	hostPort = nodePort + 10 // that other programs forward to pod2
)

// source is the client's address as the endpoint has to see it.
type source int

const (
	anySource source = iota
	kept
	masqueraded
)

// The Services, by number: one with an endpoint on the node, one elsewhere, one with policy
// Local, and one whose endpoint is the last pod, which rule sets of others know.
const (
	local place = iota + 1
	remote
	strict
	foreignPod
)

// probes are what every rule set is tested with.
func probes() []probe {
	return []probe{
		{name: "host", from: node, to: vip + local, server: "pod-0"},
		{name: "pod", from: pod1, to: vip + local, server: "pod-0", source: kept},
		{name: "pod to other node", from: pod1, to: vip + remote, server: "remote-0", source: kept},
		{name: "hairpin", from: pod0, to: vip + local, server: "pod-0", source: masqueraded},
		{name: "node port", from: client, to: nodePort + local, server: "pod-0", source: masqueraded},
		{name: "node port to other node", from: client, to: nodePort + remote, server: "remote-0", source: masqueraded},
		{name: "node port with policy Local", from: client, to: nodePort + strict, server: "pod-0", source: kept},
	}
}

// ownHostPort and ownPolicy are what other programs do themselves.
func ownHostPort() probe {
	return probe{name: "its host port", from: client, to: hostPort, server: "pod-2"}
}

func ownPolicy() probe {
	return probe{name: "its network policy", from: client, to: nodePort + foreignPod}
}

// works is the outcome of a probe that fares as without rules of others.
const works = "works"

const (
	rejected    = "rejected"
	dropped     = "dropped"
	notEnforced = "not enforced"
)

// impatience is how long to wait for a packet that may or may not come, and is sent again.
const impatience = 2 * time.Second

func (w *world) host(at place) *proxiertest.Host {
	switch at {
	case node:
		return w.net.Node
	case client:
		return w.net.Client
	default:
		return w.net.LocalPods[at-pod0]
	}
}

func (w *world) target(to place, family v1.IPFamily) netip.AddrPort {
	switch {
	case to >= hostPort:
		return netip.AddrPortFrom(w.net.Node.Addr(family), 8081)
	case to >= nodePort:
		return netip.AddrPortFrom(w.net.Node.Addr(family), uint16(30000+to-nodePort))
	default:
		return netip.AddrPortFrom(clusterIP(to-vip, family), 80)
	}
}

func clusterIP(service place, family v1.IPFamily) netip.Addr {
	if family == v1.IPv4Protocol {
		return netip.AddrFrom4([4]byte{10, 96, 0, byte(service)})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:96::%x", int(service)))
}

// outcome sends the packets of a probe over one family.
func (w *world) outcome(ctx context.Context, p probe, family v1.IPFamily, opts proxiertest.AskOptions) string {
	host := w.host(p.from)
	opts.From = host.Addr(family)
	answer, err := host.Ask(ctx, "tcp", w.target(p.to, family), opts)
	switch {
	case errors.Is(err, proxiertest.ErrRefused), errors.Is(err, proxiertest.ErrUnreachable), errors.Is(err, unix.EACCES):
		return w.refusal(p, rejected)
	case errors.Is(err, proxiertest.ErrTimeout), errors.Is(err, proxiertest.ErrDroppedLocally):
		return w.refusal(p, dropped)
	case err != nil:
		return err.Error()
	case p.server == "":
		return notEnforced
	case answer.Server != p.server:
		return "answered by " + answer.Server
	}
	nodes := slices.Contains(w.net.Node.Addrs, answer.Source.Addr())
	switch {
	case p.source == kept && !w.engine.sourceLost && answer.Source.Addr() != host.Addr(family):
		return "source lost"
	case p.source == masqueraded && !nodes:
		return "source not masqueraded"
	}
	return works
}

// refusal is the outcome of a connection that does not come to be.
func (w *world) refusal(p probe, how string) string {
	if p.server == "" {
		return works
	}
	return how
}

// outcomes are those of probes that do not work, sorted by what happens instead.
type outcomes map[string][]string

// measure sends the packets of all probes at once. No answer is waited for that is not
// expected.
func (w *world) measure(ctx context.Context, expected outcomes) outcomes {
	if *update {
		return w.measureFor(ctx, impatience)
	}
	return w.measureAll(ctx, func(p probe) (o proxiertest.AskOptions) {
		if expected.names(p.name, dropped) || p.server == "" && !expected.names(p.name, notEnforced) {
			o.Flusher = w.net
		}
		return o
	})
}

// measureFor waits for each answer as long.
func (w *world) measureFor(ctx context.Context, timeout time.Duration) outcomes {
	return w.measureAll(ctx, func(probe) proxiertest.AskOptions { return proxiertest.AskOptions{Timeout: timeout} })
}

func (w *world) measureAll(ctx context.Context, options func(probe) proxiertest.AskOptions) outcomes {
	var (
		all sync.WaitGroup
		mu  sync.Mutex
	)
	type sent struct {
		probe  string
		family v1.IPFamily
	}
	results := map[sent]string{} // guarded by mu
	for _, p := range w.probes() {
		for _, family := range families() {
			all.Go(func() {
				got := w.outcome(ctx, p, family, options(p))
				mu.Lock()
				defer mu.Unlock()
				results[sent{p.name, family}] = got
			})
		}
	}
	all.Wait()
	found := outcomes{}
	for _, p := range w.probes() {
		v4, v6 := results[sent{p.name, v1.IPv4Protocol}], results[sent{p.name, v1.IPv6Protocol}]
		if v4 == v6 {
			found.add(v4, p.name)
			continue
		}
		found.add(v4, p.name+" (IPv4)")
		found.add(v6, p.name+" (IPv6)")
	}
	return found
}

func (o outcomes) add(what, probe string) {
	if what != works {
		o[what] = append(o[what], probe)
	}
}

// names returns whether a probe has an outcome in any family.
func (o outcomes) names(probe, what string) bool {
	return slices.ContainsFunc(o[what], func(name string) bool {
		return strings.HasPrefix(name, probe) || name == everything || name == butHost && probe != probes()[0].name
	})
}

// Names for many probes.
const everything, butHost = "all", "all but host"

func probeNames() string {
	var names []string
	for _, p := range probes() {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

// String is a cell of the table.
func (o outcomes) String() string {
	if len(o) == 0 {
		return works
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(o)) {
		names := strings.Join(o[what], ", ")
		switch names {
		case probeNames():
			names = everything
		case strings.TrimPrefix(probeNames(), probes()[0].name+", "):
			names = butHost
		}
		parts = append(parts, what+": "+names)
	}
	return strings.Join(parts, "; ")
}

func parseOutcomes(cell string) outcomes {
	o := outcomes{}
	if cell == works {
		return o
	}
	for part := range strings.SplitSeq(cell, "; ") {
		what, names, _ := strings.Cut(part, ": ")
		o[what] = strings.Split(names, ", ")
	}
	return o
}

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }
