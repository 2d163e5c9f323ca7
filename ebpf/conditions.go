package ebpf

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// errUnavailable means that the machine lacks something that sockets need, or that this process may not
// use it. The error says what.
var errUnavailable = errors.New("sockets cannot be translated")

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

// faultOf is the message of the Condition: why sockets are not translated, or not those of cgroups that do
// not exist, or else the fault of UDP.
func faultOf(without error, missing []string, udp string) string {
	switch {
	case without != nil:
		return fmt.Sprintf("sockets are not translated, rules do everything: %v", without)
	case len(missing) > 0:
		return fmt.Sprintf("no cgroup matches %s: until one does, rules do everything for processes there", strings.Join(missing, " or "))
	default:
		return udp
	}
}
