package userspace

import (
	"context"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify compares the sockets with the sockets of a new engine.
func TestVerifyComparesTheSockets(t *testing.T) {
	needsAliases(t)
	e := placed(t)
	first, second := portOn(t, "127.0.0.2"), portOn(t, "127.0.0.2")
	update := func(ports ...uint16) desired.Update {
		u := desired.Update{Family: v1.IPv4Protocol, Full: true}
		for i, port := range ports {
			s := servicePort([]string{"a", "b"}[i], v1.ProtocolTCP, []desired.Frontend{clusterIP("127.0.0.2", port)}, addrPortOf("127.0.0.1", 9))
			u.Changes = append(u.Changes, desired.ChangesTo(s)...)
		}
		return u
	}
	if result, err := e.Apply(t.Context(), update(first)); err != nil || len(result.Failed) > 0 {
		t.Fatalf("Apply = %v, %v", result, err)
	}
	for what, c := range map[string]struct {
		ports []uint16
		want  []string
	}{
		"as programmed":       {[]uint16{first}, nil},
		"another Service":     {[]uint16{first, second}, []string{"missing test/b"}},
		"another port":        {[]uint16{second}, []string{"missing test/a", "unexpected test/a"}},
		"no Service any more": {nil, []string{"unexpected test/a"}},
	} {
		before := len(e.Sockets())
		report, err := e.Verify(t.Context(), update(c.ports...))
		var got []string
		for _, d := range report.Differences {
			got = append(got, d.Problem+" "+d.Service.String())
		}
		slices.Sort(got)
		if err != nil || !slices.Equal(got, c.want) || report.Checked != len(c.ports) || len(e.Sockets()) != before {
			t.Errorf("%s: Verify = %q, %v, %d checked, %d sockets; want %q", what, got, err, report.Checked, len(e.Sockets()), c.want)
		}
	}
}

// verifyingPortals are portals that find what they are asked for.
type verifyingPortals struct{ proxier.Engine }

func (verifyingPortals) Apply(context.Context, desired.Update) (proxier.Result, error) {
	return proxier.Result{}, nil
}
func (verifyingPortals) Close() error                   { return nil }
func (p verifyingPortals) Abilities() proxier.Abilities { return proxier.Abilities{Verify: p.verify} }

func (verifyingPortals) verify(_ context.Context, u desired.Update) (r proxier.Verification, err error) {
	for s := range u.Services() {
		r.Checked += len(s.Frontends)
		r.Differences = append(r.Differences, proxier.Difference{Object: "portal", Problem: proxier.DifferenceMissing, Service: s.Name})
	}
	return r, nil
}

// Verify asks the portals about frontends, and about the proxy ports, which they refuse.
func TestVerifyAsksThePortals(t *testing.T) {
	e := engine(t)
	e.portals = verifyingPortals{}
	s := servicePort("a", v1.ProtocolTCP, []desired.Frontend{clusterIP("192.0.2.1", 80)}, addrPortOf("127.0.0.1", 9))
	u := desired.Update{Family: v1.IPv4Protocol, Full: true, Changes: desired.ChangesTo(s)}
	if result, err := e.Apply(t.Context(), u); err != nil || len(result.Failed) > 0 {
		t.Fatalf("Apply = %v, %v", result, err)
	}
	report, err := e.Verify(t.Context(), u)
	if err != nil || len(report.Differences) != 1 || report.Differences[0].Service != s.Name || report.Checked != 3 {
		t.Errorf("Verify = %+v, %v, want the difference of the portals, and 3 checked: a socket and two frontends", report, err)
	}
}
