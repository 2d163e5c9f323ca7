package netlinkx

import (
	"context"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// All notifications of ended flows are read, or the kernel says that it had no room for some.
func TestNotificationsOfEndedFlows(t *testing.T) {
	ns := netnstest.New(t)
	const flows = 300
	client := netip.MustParseAddr("198.51.100.9")
	create := func() {
		netnstest.Check(t, ns.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
			if err != nil {
				return err
			}
			defer h.Close()
			for n := range flows {
				vip, server := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.244.0.1")
				flow := &netlink.ConntrackFlow{
					FamilyType: unix.AF_INET, TimeOut: 600,
					Forward: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: client.AsSlice(), SrcPort: uint16(1000 + n), DstIP: vip.AsSlice(), DstPort: 53},
					Reverse: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: server.AsSlice(), SrcPort: 53, DstIP: client.AsSlice(), DstPort: uint16(1000 + n)},
				}
				if err := h.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow); err != nil {
					return err
				}
			}
			return h.ConntrackTableFlush(netlink.ConntrackTable)
		}))
	}
	e, err := OpenEnded(ns.Path())
	netnstest.Check(t, err)
	read, lost := map[uint16]bool{}, uint64(0)
	readAll := func() error {
		l, err := e.Read(func(f *Flow) {
			if f.Server.String() != "10.244.0.1:53" || f.Source.Addr() != client {
				t.Errorf("flow %v to %v, want those that were created", f.Source, f.Server)
			}
			read[f.Source.Port()] = true
		})
		lost += l
		return err
	}
	create()
	poll.Nil(t, "notifications are read", func() error {
		err := readAll()
		if err == nil && len(read) != flows {
			return context.DeadlineExceeded
		}
		return err
	})
	if lost != 0 {
		t.Errorf("%d losses of notifications, want none", lost)
	}
	clear(read)
	_, err = e.conn.Enlarge(unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, 1) // the kernel's minimum
	netnstest.Check(t, err)
	create()
	netnstest.Check(t, readAll())
	if lost == 0 || len(read) == flows {
		t.Errorf("%d of %d notifications and %d losses, want some missing and told", len(read), flows, lost)
	}
	e.Close()
	if readAll() == nil {
		t.Error("a closed socket can be read")
	}
}
