package ebpf

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// errUnavailable means that the machine lacks something that sockets need, or that this process may not
// use it. The error says what.
var errUnavailable = errors.New("sockets cannot be translated")

// faults keeps what Conditions returns, for which nobody waits for a sync.
type faults struct {
	now atomic.Pointer[proxier.Condition]
}

// note replaces the fault; "" means none. Calls must not overlap.
func (f *faults) note(text string) {
	if text == "" {
		f.now.Store(nil)
		return
	}
	c := proxier.Condition{Type: proxier.ConditionSockets, Since: time.Now(), Message: text}
	if before := f.now.Load(); before != nil {
		c.Since = before.Since
	}
	f.now.Store(&c)
}

func (f *faults) conditions() []proxier.Condition {
	if c := f.now.Load(); c != nil {
		return []proxier.Condition{*c}
	}
	return nil
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
