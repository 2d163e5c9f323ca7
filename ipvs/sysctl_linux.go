package ipvs

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// sysctl is a kernel setting of a network namespace.
type sysctl struct {
	name, want string
	// needed means that the engine does not work without it.
	needed bool
	why    string
}

// The settings that are checked, see Documentation/networking/ipvs-sysctl.rst; arpSysctls
// with Config.StrictARP.
var (
	sysctls = []sysctl{ // read-only
		{"net/ipv4/vs/conntrack", "1", true, "nothing is masqueraded"},
		{"net/ipv4/vs/expire_nodest_conn", "1", false, "connections to a deleted real server hang"},
		{"net/ipv4/vs/expire_quiescent_template", "1", false, "clients with session affinity stay with a draining real server"},
		{"net/ipv4/ip_forward", "1", false, "packets do not reach endpoints on other nodes"},
	}
	arpSysctls = []sysctl{ // read-only
		{"net/ipv4/conf/all/arp_ignore", "1", false, "the node answers ARP requests for VIPs"},
		{"net/ipv4/conf/all/arp_announce", "2", false, "the node announces VIPs by ARP"},
	}
)

// checkSysctls checks the settings, and sets wrong ones if Config.SetSysctls is set. It
// passes those that remain wrong and are not needed to advise.
func (e *Engine) checkSysctls(advise func(text string)) error {
	return namespace.Visit(e.config.NetNS, func() error {
		var errs []error
		settings := sysctls
		if e.config.StrictARP {
			settings = slices.Concat(sysctls, arpSysctls)
		}
		for _, s := range settings {
			err := s.check()
			if err != nil && e.config.SetSysctls {
				err = s.set()
			}
			if err != nil && s.needed {
				errs = append(errs, err)
			} else if err != nil {
				advise(err.Error())
			}
		}
		return errors.Join(errs...)
	})
}

func (s *sysctl) path() string { return "/proc/sys/" + s.name }

func (s *sysctl) check() error {
	have, err := os.ReadFile(s.path())
	if err != nil {
		return fmt.Errorf("read kernel setting %s: %w", s.name, denied(err))
	}
	if got := strings.TrimSpace(string(have)); got != s.want {
		return fmt.Errorf("kernel setting %s is %s, want %s: otherwise %s: set it, or use Config.SetSysctls", s.name, got, s.want, s.why)
	}
	return nil
}

func (s *sysctl) set() error {
	if err := os.WriteFile(s.path(), []byte(s.want), 0); err != nil {
		return fmt.Errorf("set kernel setting %s to %s: %w", s.name, s.want, denied(err))
	}
	return nil
}
