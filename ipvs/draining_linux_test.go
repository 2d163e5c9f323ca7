package ipvs

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// A VIP stays while its connections drain (PKT-80).
func TestAVIPStaysWhileItsConnectionsDrain(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.Drain = time.Hour })
	mustApply(t, e, full(service("web", webVIP, pod1)))
	n.kernel.connect(tcpKey("198.51.100.1:80"), netip.MustParseAddrPort(pod1))
	mustApply(t, e, removal("web"))
	deleteDrainedAfter(e, time.Minute)
	n.mustHold(t, "198.51.100.1:80/TCP="+pod1+"*0")
	n.mustBind(t, webVIP)
	deleteDrainedAfter(e, time.Hour)
	n.mustHold(t)
	n.mustBind(t)
}

// TestASuccessorFinishesDraining: it recognizes draining real servers by weight 0.
func TestASuccessorFinishesDraining(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1, pod2)))
	n.kernel.connect(tcpKey(webVIP+":80"), netip.MustParseAddrPort(pod2))
	mustApply(t, e, partial(service("web", webVIP, pod1)))
	e = n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1)))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1,"+pod2+"*0")
	n.kernel.hangUp(tcpKey(webVIP+":80"), netip.MustParseAddrPort(pod2))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1")
}

// Rules refuse new connections to draining servers until the servers are deleted, because of the VIP's other ports
// and of a successor. A service port can take such a virtual server back.
func TestRulesRefuseDrainingServers(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t, func(c *Config) { c.Drain = time.Hour })
	web := withFrontend(service("web", webVIP, pod1), desired.NodePort, "", 30080)
	mustApply(t, e, full(web))
	for key := range n.kernel.virtuals {
		n.kernel.connect(key, netip.MustParseAddrPort(pod1))
	}
	mustApply(t, e, removal("web"))
	if !n.rules.closes(webVIP) {
		t.Error("the rules do not refuse other ports of the VIP that drains")
	}
	e = n.engine(t, func(c *Config) { c.Drain = time.Hour })
	mustApply(t, e, full())
	e = n.engine(t, func(c *Config) { c.Drain = time.Hour })
	mustApply(t, e, full())
	if got := len(n.kernel.virtuals); got != 2 {
		t.Errorf("after two restarts %d virtual servers drain, want that of the VIP and that of the node port", got)
	}
	mustApply(t, e, partial(service("web", webVIP, pod1)))
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1", nodeAddr+":30080/TCP="+pod1+"*0")
	n.kernel.hangUp(tcpKey(nodeAddr+":30080"), netip.MustParseAddrPort(pod1))
	deleteDrainedAfter(e, 0)
	n.mustHold(t, webVIP+":80/TCP="+pod1+"*1")
	if keys, err := n.rules.Frontends(t.Context()); err != nil || len(keys) != 1 {
		t.Errorf("the rules know %v, %v, want web's VIP only", keys, err)
	}
}

// TestAFailedDeletionIsMadeUpFor: whichever call fails while drained real servers are deleted, and
// whether it had its effect or not, the next update must be full, and leaves nothing behind.
func TestAFailedDeletionIsMadeUpFor(t *testing.T) {
	t.Parallel()
	kinds := map[string]func(n *node, after int, late bool){
		"IPVS":   func(n *node, after int, late bool) { n.kernel.fault = fault{armed: true, after: after, late: late} },
		"device": func(n *node, after int, _ bool) { n.device.failAfter = after },
		"rules": func(n *node, after int, late bool) {
			if after == 0 {
				n.rules.err, n.rules.late = errFault, late
			}
		},
	}
	for kind, breaks := range kinds {
		for _, late := range []bool{false, true} {
			failures := 0
			for after := 0; ; after++ {
				n := newFakeNode()
				e := n.engine(t)
				dns := service("dns", dnsVIP, pod2)
				mustApply(t, e, full(service("web", webVIP, pod1), dns))
				mustApply(t, e, removal("web"))
				breaks(n, after, late)
				err := deleteDrainedAfter(e, 0)
				n.kernel.fault, n.device.failAfter, n.rules.err = fault{}, -1, nil
				if err == nil {
					break // all have had their turn
				}
				failures++
				if _, err := e.Apply(t.Context(), partial()); !errors.Is(err, proxier.ErrNotFull) {
					t.Errorf("%s, call %d, late %t: a partial Apply = %v, want that it is refused", kind, after, late, err)
				}
				mustApply(t, e, full(dns))
				if err := deleteDrainedAfter(e, 0); err != nil {
					t.Error(err)
				}
				n.mustHold(t, dnsVIP+":80/TCP="+pod2+"*1")
				n.mustBind(t, dnsVIP)
				if keys, err := n.rules.Frontends(t.Context()); err != nil || len(keys) != 1 {
					t.Errorf("%s, call %d, late %t: the rules know %v, %v; want the VIP of dns only", kind, after, late, keys, err)
				}
			}
			if failures == 0 {
				t.Errorf("%s, late %t: no call failed", kind, late)
			}
		}
	}
}
