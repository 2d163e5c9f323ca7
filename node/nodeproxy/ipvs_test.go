package nodeproxy

import (
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/proxier"
)

func TestSchedulerFlags(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][3]bool{ // port, fallback, one packet
		"":                    {},
		"--ipvs-scheduler=mh": {true, false, false}, // as in kube-proxy
		"--ipvs-scheduler=sh": {},
		"--ipvs-scheduler=sh --ipvs-scheduler-flags=port":         {true, false, false},
		"--ipvs-scheduler=mh --ipvs-scheduler-flags=fallback,ops": {true, true, true},
		"--ipvs-scheduler=sh --ipvs-scheduler-flags=ops":          {false, false, true},
	} {
		o := parse(t, strings.Fields(line)...)
		c := o.ipvs.config(proxier.Config{}, proxier.Deps{})
		if got := [3]bool{c.HashPort, c.HashFallback, c.OnePacket}; got != want {
			t.Errorf("%q: port, fallback and one packet are %v, want %v", line, got, want)
		}
	}
}
