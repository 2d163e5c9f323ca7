package netlinkx

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// A call without an answer ends, and the next call gets its own answers. Answers to earlier requests, which come
// first, do not count.
func TestACallWithoutAnAnswerEnds(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	s, err := Open(ns.Path())
	netnstest.Check(t, err)
	defer s.Close()
	s.netfilter.Patience = time.Millisecond
	nothing := Request(unix.NLMSG_NOOP, 0, unix.AF_INET) // the kernel does not answer it
	if err := s.netfilter.Ask(t.Context(), nothing, nil); !errors.Is(err, ErrNoAnswer) {
		t.Errorf("a call without an answer: %v, want %v", err, ErrNoAnswer)
	}
	s.netfilter.Patience = time.Hour

	flow := &netlink.ConntrackFlow{
		FamilyType: unix.AF_INET, TimeOut: 600,
		Forward: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: []byte{198, 51, 100, 9}, SrcPort: 1000, DstIP: []byte{10, 96, 0, 1}, DstPort: 53},
		Reverse: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: []byte{10, 244, 0, 1}, SrcPort: 53, DstIP: []byte{198, 51, 100, 9}, DstPort: 1000},
	}
	netnstest.Check(t, ns.Do(func() error { return netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow) }))
	// Nobody reads the answers to these: an error, and an empty list.
	const get = unix.NFNL_SUBSYS_CTNETLINK<<8 | nl.IPCTNL_MSG_CT_GET
	refused := Request(get, unix.NLM_F_ACK, unix.AF_INET) // of no flow
	netnstest.Check(t, s.netfilter.Send(refused))
	netnstest.Check(t, s.netfilter.Send(Request(get, unix.NLM_F_DUMP, unix.AF_INET6)))
	var handle *Handle
	netnstest.Check(t, ListFlows(t.Context(), s, unix.AF_INET, func(f *Flow) { h := f.Handle(); handle = &h }))
	if handle == nil {
		t.Fatal("the list lacks the flow")
	}
	netnstest.Check(t, s.netfilter.Send(refused))
	exists := false
	if err := s.find(unix.AF_INET, []byte(handle.original), func(*Flow) { exists = true }); err != nil || !exists {
		t.Errorf("the flow exists: %v, %v, want true", exists, err)
	}
	netnstest.Check(t, s.netfilter.Send(refused))
	if deleted, err := DeleteFlows(s, unix.AF_INET, Which{}, func(*Flow) bool { return true }); err != nil || deleted != 1 {
		t.Errorf("deleted %d flows, %v, want 1", deleted, err)
	}
}
