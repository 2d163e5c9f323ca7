package conntrack

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// cleaner deletes stale flows in one network namespace. Its methods may be called from several goroutines at once.
type cleaner struct {
	options Options
	ending  map[v1.IPFamily]*ender
	traffic *traffic
}

// New returns the functions of connection tracking in a network namespace. It opens no socket. Several goroutines
// may call them at once. Clean reads the conntrack table of the family once, and deletes the stale entries one by
// one. AddTraffic lists the open flows of the family.
func New(o Options) *proxier.Conntrack {
	c := newCleaner(o)
	return &proxier.Conntrack{
		Tracks: c.options.tracks, Clean: c.Clean, RunEnding: c.RunEnding, EndingStatus: c.EndingStatus, CleanupEnding: c.CleanupEnding,
		RunTraffic: c.RunTraffic, FollowTraffic: c.FollowTraffic, AddTraffic: c.AddTraffic,
	}
}

func newCleaner(o Options) *cleaner {
	c := &cleaner{options: o, ending: map[v1.IPFamily]*ender{}, traffic: newTraffic(o.NetNS)}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		c.ending[family] = newEnder(&endingTable{netNS: o.NetNS, name: o.Table, family: family})
	}
	return c
}

// Clean is for proxier.Conntrack.
func (c *cleaner) Clean(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (deleted int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s, err := netlinkx.Open(c.options.NetNS)
	if err != nil {
		return 0, classify(err)
	}
	defer s.Close()
	var addrs []netip.Addr
	if hasNodePort(check) {
		if addrs, err = s.Addresses(number(family)); err != nil {
			return 0, classify(err)
		}
	}
	judge, ending := flows.NewJudge(check, addrs), c.ending[family]
	ended, err := c.endedFlows(judge, check)
	if err != nil {
		return 0, classify(err)
	}
	defer ended.close()
	deleted, err = netlinkx.DeleteFlows(s, uint8(number(family)), which(&check, ended.asked), func(f *netlinkx.Flow) bool {
		flow := flows.Flow{Protocol: desired.Protocol(f.Protocol), Client: f.Source, Dialled: f.Destination, Server: f.Server, Answered: f.Answered}
		if judge.Ends(flow) {
			if f.TCPState == netlinkx.TCPSynSent { // its client tries again, and gets another endpoint
				return true
			}
			ending.found(f)
			return false
		}
		return (c.mayDelete(f, !flow.Translated()) || ended.has(ctx, f, flow)) && judge.Stale(flow)
	})
	ending.begin()
	return deleted, classify(cmp.Or(err, ended.err))
}

// which returns what all flows of a check have in common: to copy a flow out of the kernel takes ten times as long as
// to pass by.
func which(check *desired.FlowCheck, answered bool) (w netlinkx.Which) {
	if len(check.ServiceCIDRs) > 0 {
		return w
	}
	w.Unanswered = len(check.Frontends)+len(check.End) == 0 && !answered
	all := slices.Concat(check.Frontends, check.Untranslated, check.End)
	if len(all) == 0 {
		return w
	}
	first := all[0].Key
	same := func(f func(*desired.Key) bool) bool {
		return !slices.ContainsFunc(all, func(other desired.Flows) bool { return !f(&other.Key) })
	}
	var addr netip.Addr
	var port uint16
	if same(func(k *desired.Key) bool { return k.VIP == first.VIP }) {
		addr = first.VIP
	}
	if same(func(k *desired.Key) bool { return k.Protocol == first.Protocol }) {
		w.Protocol = uint8(first.Protocol)
		if same(func(k *desired.Key) bool { return k.Port == first.Port }) {
			port = first.Port
		}
	}
	w.To = netip.AddrPortFrom(addr, port)
	return w
}

// endedFlows are the connections of processes that have ended: see desired.Flows.Own. A process that lingers still has its
// sockets.
type endedFlows struct {
	judge   *flows.Judge
	asked   bool
	sockets *netlinkx.Conn // nil: the kernel has no sock_diag, and no socket is known
	err     error          // why a connection stays that may have ended
}

func (c *cleaner) endedFlows(judge *flows.Judge, check desired.FlowCheck) (e *endedFlows, err error) {
	e = &endedFlows{judge: judge, asked: slices.ContainsFunc(check.Untranslated, func(f desired.Flows) bool { return len(f.Own) > 0 })}
	if e.asked {
		if e.sockets, err = netlinkx.DialSockets(c.options.NetNS); errors.Is(err, unix.EPROTONOSUPPORT) {
			err = nil
		}
	}
	return e, err
}

func (e *endedFlows) has(ctx context.Context, f *netlinkx.Flow, flow flows.Flow) bool {
	if !e.asked || !e.judge.Ended(flow) {
		return false
	}
	if e.sockets == nil {
		return true
	}
	lingers, err := e.sockets.HasSocket(ctx, f.Server, f.Handle().ReplyTo)
	e.err = cmp.Or(e.err, err)
	return !lingers && err == nil
}

func (e *endedFlows) close() {
	if e.sockets != nil {
		_ = e.sockets.Close()
	}
}

// mayDelete reports whether the options allow deleting such a flow. One of TCP that was neither
// translated nor answered is not a connection yet, and never will be one.
func (c *cleaner) mayDelete(f *netlinkx.Flow, untranslated bool) bool {
	protocol := desired.Protocol(f.Protocol)
	if protocol == desired.TCP {
		return f.TCPState == netlinkx.TCPSynSent && (untranslated || c.options.UnansweredTCP)
	}
	return c.options.tracks(protocol)
}

func hasNodePort(check desired.FlowCheck) bool {
	isNodePort := func(f desired.Flows) bool { return !f.Key.VIP.IsValid() }
	return slices.ContainsFunc(check.Frontends, isNodePort) || slices.ContainsFunc(check.Untranslated, isNodePort) || slices.ContainsFunc(check.End, isNodePort)
}

func number(family v1.IPFamily) int {
	if family == v1.IPv6Protocol {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// classify adds what to do about an error of the kernel.
func classify(err error) error {
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return &proxier.UnsupportedError{
			Feature: "connection tracking over netlink", Err: err,
			Hint: "load module nf_conntrack_netlink, or enable CONFIG_NF_CT_NETLINK",
		}
	}
	return netlinkx.Denied(err)
}
