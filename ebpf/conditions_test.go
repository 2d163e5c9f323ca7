package ebpf

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// TestConditions: a Condition begins with the first fault, keeps its time while there is any, and ends.
func TestConditions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f faults
		begun := time.Now()
		for _, step := range []struct {
			without error
			missing []string
			udp     string
			want    []string // in the message; nil for no Condition
			since   time.Time
		}{
			{nil, nil, "", nil, time.Time{}},
			{errUnavailable, nil, "", []string{"rules do everything", errUnavailable.Error()}, begun.Add(time.Minute)},
			{nil, []string{"/kubepods*"}, "3 sockets", []string{"no cgroup matches /kubepods*"}, begun.Add(time.Minute)},
			{nil, nil, "3 sockets", []string{"3 sockets"}, begun.Add(time.Minute)},
			{nil, nil, "", nil, time.Time{}},
			{errUnavailable, nil, "", []string{"rules do everything"}, begun.Add(5 * time.Minute)},
		} {
			f.note(faultOf(step.without, step.missing, step.udp))
			got := f.conditions()
			if (len(got) == 1) != (step.want != nil) {
				t.Fatalf("conditions %+v, want one: %v", got, step.want != nil)
			}
			for _, c := range got {
				for _, want := range step.want {
					if !strings.Contains(c.Message, want) {
						t.Errorf("message %q, want %q in it", c.Message, want)
					}
				}
				if c.Type != proxier.ConditionSockets || !c.Since.Equal(step.since) {
					t.Errorf("condition %+v, want one of sockets since %v", c, step.since)
				}
			}
			time.Sleep(time.Minute)
		}
	})
}
