package enum_test

import (
	"encoding"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
	"github.com/serviceplane/serviceplane/userspace"
)

// TestEveryValueHasItsOwnName: docs/STABILITY.md announces new values, so String and
// MarshalText accept values that do not exist yet.
func TestEveryValueHasItsOwnName(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]func(uint8) fmt.Stringer{
		"changetracker.Balancing": func(v uint8) fmt.Stringer { return changetracker.Balancing(v) },
		"desired.Protocol":        func(v uint8) fmt.Stringer { return desired.Protocol(v) },
		"desired.Kind":            func(v uint8) fmt.Stringer { return desired.Kind(v) },
		"desired.Scope":           func(v uint8) fmt.Stringer { return desired.Scope(v) },
		"desired.Action":          func(v uint8) fmt.Stringer { return desired.Action(v) },
		"desired.Masquerading":    func(v uint8) fmt.Stringer { return desired.Masquerading(v) },
		"desired.Verdict":         func(v uint8) fmt.Stringer { return desired.Verdict(v) },
		"desired.Origin":          func(v uint8) fmt.Stringer { return desired.Origin(v) },
		"connection.Outcome":      func(v uint8) fmt.Stringer { return connection.Outcome(v) },
		"userspace.Role":          func(v uint8) fmt.Stringer { return userspace.Role(v) },
	} {
		seen := map[string]int{}
		for n := range 256 {
			v := value(uint8(n))
			text := v.String()
			if other, twice := seen[text]; twice || text == "" && n > 0 {
				t.Errorf("%s(%d) has the name %q, as has %d", name, n, text, other)
			}
			seen[text] = n
			if m, ok := v.(encoding.TextMarshaler); ok {
				if got, err := m.MarshalText(); err != nil || string(got) != text {
					t.Errorf("%s(%d).MarshalText() = %q, %v; want %q", name, n, got, err, text)
				}
			}
			if _, err := json.Marshal(v); err != nil {
				t.Errorf("%s(%d) as JSON: %v", name, n, err)
			}
		}
	}
}
