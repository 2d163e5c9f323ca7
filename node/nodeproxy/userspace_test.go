package nodeproxy

import (
	"testing"

	"github.com/serviceplane/serviceplane/userspace"
)

func TestPortRangesHaveKubeProxysSyntax(t *testing.T) {
	type ports = userspace.PortRange
	for text, want := range map[string]ports{
		"": {}, "0": {}, "0-0": {}, "20000-20010": {First: 20000, Last: 20010}, "20000+10": {First: 20000, Last: 20010},
		"30000": {First: 30000, Last: 30000}, " 1-65535 ": {First: 1, Last: 65535},
	} {
		if got, err := parsePorts(text); got != want || err != nil {
			t.Errorf("parsePorts(%q) = %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"x", "1-", "-1", "0-5", "2-1", "65536", "65535+1", "1-2-3", "1+2+3", "1+2-3", "1.5", "+5"} {
		if got, err := parsePorts(text); err == nil {
			t.Errorf("parsePorts(%q) = %v, want an error", text, got)
		}
	}
}
