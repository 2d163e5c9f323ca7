package ebpf

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// faults keeps what Conditions returns. It has a lock of its own, so that nobody waits for a sync.
type faults struct {
	mu   sync.Mutex // guards all below
	text string     // "" if there is none
	// since is when there was none last.
	since time.Time
}

// note replaces the fault.
func (f *faults) note(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if text != "" && f.text == "" {
		f.since = time.Now()
	}
	f.text = text
}

func (f *faults) conditions() []proxier.Condition {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.text == "" {
		return nil
	}
	return []proxier.Condition{{Type: proxier.ConditionSockets, Since: f.since, Message: f.text}}
}

// declined is a service port that the rules alone have, and why.
type declined struct {
	wanted *carried
	err    error
}

// faultOf is the message of the Condition: why sockets are not translated, or not those to some
// service ports, of which it names the first, or those of cgroups that do not exist, or else the fault of UDP.
func faultOf(without error, refused map[changetracker.ServicePortName]declined, missing []string, udp string) string {
	switch {
	case without != nil:
		return fmt.Sprintf("sockets are not translated, rules do everything: %v", without)
	case len(refused) == 0 && len(missing) > 0:
		return fmt.Sprintf("no cgroup matches %s: until one does, rules do everything for processes there", strings.Join(missing, " or "))
	case len(refused) == 0:
		return udp
	}
	first := slices.MinFunc(slices.Collect(maps.Keys(refused)), func(a, b changetracker.ServicePortName) int {
		return cmp.Compare(a.String(), b.String())
	})
	return fmt.Sprintf("rules alone have %d service ports, because the maps of sockets could not be written, %v first: %v: trying again",
		len(refused), first, refused[first].err)
}
