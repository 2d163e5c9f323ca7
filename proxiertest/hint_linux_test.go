package proxiertest

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
)

// A failure names the dependency that is nil, if the scenario needs it.
func TestAFailureNamesTheDependencyThatIsNil(t *testing.T) {
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	named := 0
	for deps, isNil := range map[*proxier.Deps]bool{{}: true, new(nodedeps.Complete(config, proxier.Deps{})): false} {
		p, err := proxier.New(config, *deps, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &RecordingEngine{}})
		if err != nil {
			t.Fatal(err)
		}
		for _, sc := range scenarios(Features{}) {
			hint, needs := sc.hint(p.Status()), map[string]string{"PKT-50/load_balancer": "Health", "PKT-50/service_of_one_family": "Health", "PKT-81": "Conntrack", "PKT-81/kept": "Conntrack", "PKT-85": "Conntrack", "PKT-98/end": "Conntrack"}[sc.name]
			want := isNil && needs != ""
			if (hint != "") != want || want && !strings.Contains(hint, "Deps."+needs+" of the Provider is nil") {
				t.Errorf("%s without Deps %v: hint %q, want one %v", sc.name, isNil, hint, want)
			}
			if want {
				named++
			}
		}
	}
	if named != 6 {
		t.Errorf("%d scenarios need some of the Deps, want 6", named)
	}
}
