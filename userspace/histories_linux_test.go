package userspace

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// TestHistories runs random histories of the cluster and the process, in which sockets cannot
// be opened at times: see package history.
func TestHistories(t *testing.T) { t.Parallel(); history.Test(t, 10, 2, historyPlanes) }

// TestEachCallOfAHistory lets each socket fail to open.
func TestEachCallOfAHistory(t *testing.T) { t.Parallel(); history.TestEachCall(t, historyPlanes) }

// TestHistoriesCatchPlantedBugs checks the histories themselves.
func TestHistoriesCatchPlantedBugs(t *testing.T) {
	t.Parallel()
	history.TestPlanted(t, 1, historyPlanes)
}

func historyPlanes(*testing.T, uint64) (plane, fresh history.Plane) {
	return &historyPlane{}, &historyPlane{}
}

// historyPlane has the engines of the last process.
type historyPlane struct {
	mu      sync.Mutex // guards engines
	engines []*Engine
}

// HasSockets says that a restart has to open sockets again.
func (p *historyPlane) HasSockets() {}

// Config implements history.Plane.
func (p *historyPlane) Config() proxier.Config { return proxier.Config{} }

// Damage implements history.Plane: nobody can change the sockets of a process.
func (p *historyPlane) Damage(int, *history.Objects) {}

// Engines implements history.Plane.
func (p *historyPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	var listen net.ListenConfig
	hooks := Hooks{
		Listen: func(ctx context.Context, at Site) (l net.Listener, err error) {
			err = calls.Do(func() error { l, err = listen.Listen(ctx, at.Network, at.Addr.String()); return err })
			return l, err
		},
		ListenPacket: func(ctx context.Context, at Site) (c net.PacketConn, err error) {
			err = calls.Do(func() error { c, err = listen.ListenPacket(ctx, at.Network, at.Addr.String()); return err })
			return c, err
		},
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = nil
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := NewEngine(Config{Config: config, Hooks: hooks}, family, proxier.Deps{})
		if err != nil {
			return nil, err
		}
		engines[family] = e
		p.engines = append(p.engines, e)
	}
	return engines, nil
}

// Kernel implements history.Plane: the sockets without their ports, which the system
// chooses, and the endpoints of each.
func (p *historyPlane) Kernel() (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lines []string
	for _, e := range p.engines {
		for _, at := range e.Sockets() {
			lines = append(lines, fmt.Sprintf("%s %v/%s %v at %v", e.family, at.Name, at.Name.Protocol, at.Role, at.Addr.Addr()))
		}
		lines = append(lines, e.endpointLines()...)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n"), nil
}

func (e *Engine) endpointLines() (lines []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for name, s := range e.services {
		for _, scope := range []desired.Scope{desired.ScopeCluster, desired.ScopeLocal} {
			endpoints, _ := s.balancer.list(scope)
			s.balancer.mu.Lock()
			affinity := s.balancer.affinities.timeout
			s.balancer.mu.Unlock()
			lines = append(lines, fmt.Sprintf("%s %v/%s %v -> %v, affinity %v", e.family, name, name.Protocol, scope, endpoints, affinity))
		}
	}
	return lines
}
