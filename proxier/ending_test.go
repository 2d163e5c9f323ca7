package proxier_test

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// fakeEnder is a fakeConntrack that ends connections.
type fakeEnder struct {
	fakeConntrack

	runs, cleanups atomic.Int32
}

func (e *fakeEnder) conntrack() *proxier.Conntrack {
	return &proxier.Conntrack{Tracks: e.Tracks, Clean: e.Clean, RunEnding: e.RunEnding, EndingStatus: e.EndingStatus, CleanupEnding: e.CleanupEnding}
}

func (e *fakeEnder) RunEnding(ctx context.Context, _ *zap.Logger) error {
	e.runs.Add(1)
	<-ctx.Done()
	e.runs.Add(-1)
	return nil
}

func (e *fakeEnder) EndingStatus(v1.IPFamily) (open, ended int, cannot proxier.Condition) {
	return 1, 2, proxier.Condition{Type: proxier.ConditionConnections, Message: "no nf_tables"}
}

func (e *fakeEnder) CleanupEnding(context.Context, v1.IPFamily) error {
	e.cleanups.Add(1)
	return nil
}

// ends returns the searches for connections since the last call.
func (e *fakeEnder) ends() (all [][]desired.Flows) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.checks {
		if len(c.End) > 0 {
			all = append(all, c.End)
		}
	}
	e.checks = nil
	return all
}

// runEnding runs a proxy with Service a, which asks for ended connections, and Service b.
func runEnding(t *testing.T, test func(t *testing.T, f *fixture, e *fakeEnder)) {
	t.Helper()
	e := &fakeEnder{}
	config := proxier.Config{}
	config.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
		p.EndConnections = s.Name == "a" && s.Labels["keep"] == ""
	}
	runWith(t, config, proxier.Deps{Conntrack: e.conntrack()}, func(t *testing.T, f *fixture) {
		f.OnServiceAdd(service("a", "10.96.0.1"))
		f.OnServiceAdd(service("b", "10.96.0.2"))
		f.OnEndpointSliceAdd(slice("a", "10.0.0.1", "10.0.0.2"))
		f.OnEndpointSliceAdd(slice("b", "10.0.0.1", "10.0.0.2"))
		f.synced()
		time.Sleep(2 * proxier.EndGrace)
		if all := e.ends(); len(all) != 1 || len(all[0]) != 1 || all[0][0].Serving.Len() != 2 {
			t.Fatalf("searches after the start: %+v, want one for Service a with two endpoints (the proxy may have been down)", all)
		}
		test(t, f, e)
	})
}

// TestConnectionsEndAfterTheirEndpointIsGone: CT-10, CT-11.
func TestConnectionsEndAfterTheirEndpointIsGone(t *testing.T) {
	runEnding(t, func(t *testing.T, f *fixture, e *fakeEnder) {
		step := func(what string, change func(), want ...[]string) {
			t.Helper()
			began := time.Now()
			change()
			time.Sleep(proxier.EndGrace - time.Millisecond - time.Since(began))
			if early := e.ends(); len(early) > 0 {
				t.Errorf("%s: searched for %+v before the end of the grace", what, early)
			}
			time.Sleep(10 * proxier.EndGrace)
			all := e.ends()
			if len(all) != len(want) {
				t.Fatalf("%s: searches %+v, want %d", what, all, len(want))
			}
			for i, serving := range want {
				flows := all[i][0]
				if len(all[i]) != 1 || flows.Key.VIP.String() != "10.96.0.1" || flows.Serving.Len() != len(serving) {
					t.Fatalf("%s: searches %+v, want only %v to keep connections", what, all, serving)
				}
				for j, addr := range serving {
					if flows.Serving.Slice()[j] != netip.MustParseAddrPort(addr+":8080") {
						t.Errorf("%s: %v keep connections, want %v", what, flows.Serving, serving)
					}
				}
			}
		}
		notReady := func(s *discovery.EndpointSlice) *discovery.EndpointSlice {
			no := false
			s.Endpoints[0].Conditions.Ready, s.Endpoints[0].Conditions.Serving = &no, &no
			return s
		}
		step("not ready", func() { f.OnEndpointSliceUpdate(nil, notReady(slice("a", "10.0.0.1", "10.0.0.2"))) })
		step("gone from a Service that does not ask", func() { f.OnEndpointSliceUpdate(nil, slice("b", "10.0.0.2")) })
		step("gone", func() { f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2")) }, []string{"10.0.0.2"})
		step("gone for a moment", func() {
			f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.3"))
			time.Sleep(time.Second)
			f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2", "10.0.0.3"))
		}, []string{"10.0.0.2", "10.0.0.3"})
		step("asks no more", func() {
			f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2"))
			f.OnServiceUpdate(nil, service("a", "10.96.0.1", func(s *v1.Service) { s.Labels = map[string]string{"keep": "yes"} }))
		})
		step("asks again", func() { f.OnServiceUpdate(nil, service("a", "10.96.0.1")) }, []string{"10.0.0.2"})
		step("deleted", func() { f.OnServiceDelete(service("a", "10.96.0.1")) }, []string{})
		if s := f.Status(); s.Families[v1.IPv4Protocol].ConnectionsEnding != 1 || s.Families[v1.IPv4Protocol].ConnectionsEnded != 2 || len(s.Conditions) == 0 || s.Conditions[0].Type != proxier.ConditionConnections {
			t.Errorf("status %+v, want what the ender says", s)
		}
		if e.runs.Load() != 1 {
			t.Errorf("RunEnding runs %d times, want once", e.runs.Load())
		}
	})
}

// TestASearchThatFailsIsRepeated: CT-10. Nothing is lost.
func TestASearchThatFailsIsRepeated(t *testing.T) {
	runEnding(t, func(t *testing.T, f *fixture, e *fakeEnder) {
		e.fail(errors.New("busy"))
		f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2"))
		time.Sleep(time.Minute)
		if all := e.ends(); len(all) < 2 {
			t.Errorf("%d searches while they fail, want several", len(all))
		}
		e.fail(nil)
		f.Trigger()
		time.Sleep(time.Minute)
		if all := e.ends(); len(all) == 0 { // one that failed may have come at the same time
			t.Error("no search afterwards, want one")
		}
		time.Sleep(time.Hour)
		if all := e.ends(); len(all) != 0 {
			t.Errorf("%d searches without a cause", len(all))
		}
	})
}

// Connections that end at an engine's own sockets are not searched for.
func TestAnEngineEndsItsOwnConnections(t *testing.T) {
	runEnding(t, func(t *testing.T, f *fixture, e *fakeEnder) {
		f.v4.mu.Lock()
		f.v4.apply = func(u desired.Update) (proxier.Result, error) {
			result := proxier.Result{FlowEnds: map[changetracker.ServicePortName][]netip.AddrPort{}}
			for s := range u.Services() {
				result.FlowEnds[s.Name] = nil
			}
			return result, nil
		}
		f.v4.mu.Unlock()
		f.OnEndpointSliceUpdate(nil, slice("a", "10.0.0.2"))
		time.Sleep(10 * proxier.EndGrace)
		if all := e.ends(); len(all) > 0 {
			t.Errorf("searches %+v, want none", all)
		}
	})
}

// A cleanup removes what ends connections, in both families.
func TestCleanupRemovesWhatEndsConnections(t *testing.T) {
	e := &fakeEnder{}
	p, err := proxier.New(proxier.Config{}, proxier.Deps{Conntrack: e.conntrack()}, map[v1.IPFamily]proxier.Engine{
		v1.IPv4Protocol: &proxiertest.RecordingEngine{}, v1.IPv6Protocol: &proxiertest.RecordingEngine{},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Cleanup(t.Context()); err != nil || e.cleanups.Load() != 2 {
		t.Errorf("Cleanup = %v with %d calls, want one for each family", err, e.cleanups.Load())
	}
}
