package proxier_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// planning prints a table as nft does, and one as iptables does.
type planning struct{ *fakeEngine }

func (p planning) Abilities() proxier.Abilities { return proxier.Abilities{Plan: p.plan} }

func (planning) plan(u desired.Update) (string, error) {
	lines := []string{"# first", "table ip x {", "\tmap services {"}
	for s := range u.Services() {
		lines = append(lines, "\t\t"+s.Frontends[0].VIP.String())
	}
	lines = append(lines, "\t}", "\tchain fixed {", "\t\tdrop", "\t}", "}", "# second", "*nat", ":FIXED", "*filter", ":FIXED")
	for s := range u.Services() {
		lines = append(lines, "-A FIXED "+s.Name.String())
	}
	return strings.Join(append(lines, "COMMIT"), "\n") + "\n", nil
}

// Rules of one Service are the rules of its ports alone, with their headings, and without what is there for no
// Service.
func TestRulesOfOneService(t *testing.T) {
	deps := proxier.Deps{Wrap: func(family v1.IPFamily, e proxier.Engine) (proxier.Engine, error) {
		inner, _ := e.(*fakeEngine)
		if family == v1.IPv6Protocol {
			return inner, nil
		}
		return planning{inner}, nil
	}}
	runWith(t, proxier.Config{}, deps, func(t *testing.T, f *fixture) {
		web := types.NamespacedName{Namespace: "test", Name: "web"}
		if _, err := f.Rules(t.Context(), web); !errors.Is(err, proxier.ErrNotProgrammed) {
			t.Errorf("before the first sync: %v, want ErrNotProgrammed", err)
		}
		f.OnServiceAdd(service("web", "10.0.0.1", proxiertest.Port("dns", v1.ProtocolUDP, 53)))
		f.OnServiceAdd(service("other", "10.0.0.2"))
		f.OnServiceAdd(service("six", "fd00::6"))
		f.synced()
		pass(time.Second)
		got, err := f.Rules(t.Context(), web)
		want := "# first\ntable ip x {\n\tmap services {\n\t\t10.0.0.1\n\t\t10.0.0.1\n# second\n*filter\n-A FIXED test/web:dns\n-A FIXED test/web:web\n"
		if err != nil || len(got) != 1 || got[v1.IPv4Protocol] != want {
			t.Errorf("Rules = %v, %q, want %q", err, got, want)
		}
		applying, applied := make(chan struct{}), make(chan struct{})
		f.v4.apply = func(desired.Update) (proxier.Result, error) {
			applying <- struct{}{}
			<-applied
			return proxier.Result{}, nil
		}
		f.Trigger()
		<-applying
		if during, err := f.Rules(t.Context(), web); err != nil || during[v1.IPv4Protocol] != want {
			t.Errorf("Rules during a sync = %v, %q, want %q", err, during, want)
		}
		close(applied)
		f.v4.apply = nil
		web.Name = "nobody"
		if got, err := f.Rules(t.Context(), web); err != nil || len(got) > 0 {
			t.Errorf("Rules of an unknown Service = %v, %q, want none", err, got)
		}
		web.Name = "six"
		if _, err := f.Rules(t.Context(), web); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("Rules of an engine that cannot plan = %v, want ErrUnsupported", err)
		}
	})
}
