package nftables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// serves are the Keys that clients can use: of a node port also at the node's address.
func (s *stepped) serves(node netip.Addr) map[desired.Key]string {
	all := map[desired.Key]string{}
	o := s.w.observed(s.t, s.reader, 1<<30)
	for _, ids := range [][2]setID{{setServices, setFrontends}, {setNodePorts, setNodePortFrontends}} {
		for text, class := range o.element[ids[0]] {
			key := parseFrontendKey([]byte(text))
			all[key] = fmt.Sprintf("%x", class)
			if _, ok := o.element[ids[1]][text]; !ok {
				s.t.Errorf("transaction %d: %v has a class and is not in %s", s.number, key, setSpecs[ids[1]].name)
			}
			if ids[0] == setNodePorts {
				key.VIP = node
				all[key] = fmt.Sprintf("%x", class)
			}
		}
	}
	s.wholeSlots(o)
	return all
}

// wholeSlots: what a class counts leads to an endpoint.
func (s *stepped) wholeSlots(o *observation) {
	for _, id := range []setID{setEndpoints, setNodePortEndpoints, setAffinityPicks, setNodePortAffinityPicks} {
		for key := range o.keysOf(id) {
			to, ok := o.element[id][keyString(key)]
			if ok && (id == setAffinityPicks || id == setNodePortAffinityPicks) {
				to, ok = o.element[setAffinityEndpoints][to]
			}
			if !ok || len(to) != 8 {
				s.t.Errorf("transaction %d: slot %x of %s leads to %x", s.number, key.bytes(), setSpecs[id].name, to)
			}
		}
	}
}

// TestRandomMovesOfFrontends: what clients can use before and after a change they can use after each transaction.
func TestRandomMovesOfFrontends(t *testing.T) {
	t.Parallel()
	draw := chance.New(t)
	for range chance.Few(2, 60) {
		seed := draw.Uint64()
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			randomMoves(t, rand.New(rand.NewPCG(seed, 0)))
		})
	}
}

// drawMoving draws a Service that shares addresses and node ports with others.
func drawMoving(r *rand.Rand, n int, created int64) *v1.Service {
	var opts []proxiertest.ServiceOption
	for i := range 6 {
		if r.IntN(3) == 0 {
			opts = append(opts, proxiertest.ExternalIPs(fmt.Sprintf("203.0.113.%d", i)))
		}
	}
	if r.IntN(3) == 0 {
		opts = append(opts, proxiertest.ExternalIPs(movingNode))
	}
	for i := range 2 {
		if r.IntN(3) == 0 {
			opts = append(opts, proxiertest.LoadBalancer(fmt.Sprintf("203.0.114.%d", i)))
		}
	}
	if r.IntN(4) == 0 {
		opts = append(opts, proxiertest.SourceRanges([]string{"198.51.100.0/24", "198.51.0.0/16", "198.51.100.7/32"}[r.IntN(3)]))
	}
	if r.IntN(4) == 0 {
		opts = append(opts, proxiertest.ClientAffinity(time.Hour))
	}
	if r.IntN(4) == 0 {
		opts = append(opts, proxiertest.ExternalPolicyLocal())
	}
	ports := r.IntN(3)
	for i, port := range []int32{80, 30080} {
		if ports == i {
			continue
		}
		name := []string{"http", "web"}[(r.IntN(2)+i)%2]
		if i == 1 {
			name += "2"
		}
		if r.IntN(2) == 0 {
			opts = append(opts, proxiertest.NodePort(name, v1.ProtocolTCP, port, int32(30080+r.IntN(3)*7+i)))
		} else {
			opts = append(opts, proxiertest.Port(name, v1.ProtocolTCP, port))
		}
	}
	opts = append(opts, proxiertest.ClusterIPs(fmt.Sprintf("10.96.0.%d", 1+r.IntN(12))), proxiertest.Created(time.Unix(created, 0)))
	x := proxiertest.Service("ns", fmt.Sprint("s", n), opts...)
	x.UID = types.UID(fmt.Sprint(x.Name, created))
	return x
}

const movingNode = "192.0.2.10"

func randomMoves(t *testing.T, r *rand.Rand) {
	t.Helper()
	node := netip.MustParseAddr(movingNode)
	s := newStepped(t, func(c *proxier.Config) {
		c.Node = changetracker.Node{Name: "n", Addresses: []netip.Addr{node}}
		c.CountConnections = r.IntN(2) == 0
	})
	s.engine.stepElements = 1
	const services = 10
	now := map[int]*v1.Service{}
	sliceFor := func(x *v1.Service) {
		slice := s.sliceOf(x)
		slice.Ports = nil
		for _, name := range []string{"http", "web", "http2", "web2"} {
			proxiertest.SlicePort(name, v1.ProtocolTCP, 8080)(slice)
		}
		for i := range r.IntN(3) {
			proxiertest.Endpoint(fmt.Sprintf("10.244.0.%d", 1+i+r.IntN(2)*2))(slice)
		}
		s.p.OnEndpointSliceUpdate(nil, slice)
	}
	s.begin()
	for round := range 25 {
		for range 1 + r.IntN(services) {
			n := r.IntN(services)
			was := now[n]
			switch {
			case was == nil:
				now[n] = drawMoving(r, n, int64(1000-r.IntN(500)))
				s.p.OnServiceAdd(now[n])
				sliceFor(now[n])
			case r.IntN(3) == 0:
				s.p.OnServiceDelete(was)
				s.p.OnEndpointSliceDelete(s.sliceOf(was))
				delete(now, n)
			default:
				now[n] = drawMoving(r, n, was.CreationTimestamp.Unix())
				now[n].UID = was.UID
				s.p.OnServiceUpdate(was, now[n])
				sliceFor(now[n])
			}
		}
		before := s.serves(node)
		var steps []map[desired.Key]string
		err := s.sync(func(int) { steps = append(steps, s.serves(node)) })
		if err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		after := s.serves(node)
		for key := range before {
			if _, ok := after[key]; !ok {
				continue
			}
			for i, step := range steps {
				if _, ok := step[key]; !ok {
					t.Errorf("round %d: nobody serves %v after transaction %d of %d", round, key, i+1, len(steps))
				}
			}
		}
		all, err := s.p.Verify(t.Context())
		netnstest.Check(t, err)
		for _, v := range all {
			if len(v.Differences) > 0 {
				t.Errorf("round %d: differs: %v", round, v.Differences)
			}
		}
		if t.Failed() {
			return
		}
	}
}
