package netnstest

import (
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// Offload makes the flowtable of another program in a network namespace: established connections
// between its present devices pass no rules. It needs a kernel with nf_flow_table.
func Offload(tb testing.TB, netNS string) {
	tb.Helper()
	Check(tb, namespace.Visit(netNS, func() error {
		devices, err := net.Interfaces()
		if err != nil {
			return err
		}
		var names []string
		for _, d := range devices {
			if d.Flags&net.FlagLoopback == 0 {
				names = append(names, d.Name)
			}
		}
		nft := exec.CommandContext(tb.Context(), "nft", fmt.Sprintf(`table inet foreign {
			flowtable f { hook ingress priority 0; devices = { %s }; counter; }
			chain forward {
				type filter hook forward priority -5;
				meta l4proto { tcp, udp } ct state established flow add @f;
			}
		}`, strings.Join(names, ", ")))
		if out, err := nft.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		return nil
	}))
}
