package iptables

import (
	"errors"
	"testing"

	"github.com/mdlayher/netlink"
)

// TestAnInterruptedDumpIsReadAgain: it may have a rule twice, whose connections would count twice.
func TestAnInterruptedDumpIsReadAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name        string
		interrupted int // dumps
		err         error
	}{
		{"never", 0, nil},
		{"some times", dumpAttempts - 1, nil},
		{"each time", dumpAttempts, errInterrupted},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dumps := 0
			rules, err := uninterrupted(func() ([]netlink.Message, error) {
				if dumps++; dumps > c.interrupted {
					return make([]netlink.Message, 2), nil
				}
				return []netlink.Message{{}, {Header: netlink.Header{Flags: netlink.Multi | netlink.DumpInterrupted}}, {}}, nil
			})
			if !errors.Is(err, c.err) || err == nil && len(rules) != 2 {
				t.Errorf("%d rules, %v, want two, %v", len(rules), err, c.err)
			}
		})
	}
}
