package iptables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// counted holds the rules of a table with their packet counters.
type counted map[string][]countedRule

type countedRule struct {
	rule    rule
	packets int
}

// counters reads the counters of a table of the legacy variant.
func counters(t *testing.T, ns *netns.NS, table string) counted {
	t.Helper()
	var out []byte
	netnstest.Check(t, ns.Do(func() (err error) {
		out, err = exec.CommandContext(t.Context(), "iptables-legacy-save", "-c", "-t", table).Output()
		return err
	}))
	all := counted{}
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, "[") {
			continue
		}
		packets, rest, _ := strings.Cut(line[1:], ":")
		_, rest, _ = strings.Cut(rest, "] -A ")
		chain, text, _ := strings.Cut(strings.TrimSuffix(rest, "\n"), " ")
		n, err := strconv.Atoi(packets)
		if err != nil {
			t.Fatalf("read counter: %v in %q", err, line)
		}
		all[chain] = append(all[chain], countedRule{rule(text), n})
	}
	return all
}

// walk follows one of several packets, by the counters before and after all of them. A rule
// matches the packet if it counted packets and has the packet's destination. All rules up to
// the one that ends the chain count, also those that do not match.
type walk struct {
	packet probe
	rules  int
	path   []string
}

func (w *walk) through(before, after counted, chain string) (end rule) {
	w.path = append(w.path, chain)
	for i, r := range after[chain] {
		w.rules++
		if r.packets == before[chain][i].packets || !w.meets(r.rule) {
			continue
		}
		switch to := r.rule.jumpsTo(); to {
		case "DNAT", "ACCEPT", "DROP", "REJECT", "MASQUERADE":
			w.path = append(w.path, to)
			return r.rule
		case "RETURN":
			return ""
		default:
			if after[to] == nil {
				continue
			}
			if end = w.through(before, after, to); end != "" {
				return end
			}
		}
	}
	return ""
}

// meets matches the destination; the counters show the rest.
func (w *walk) meets(r rule) bool {
	isLocal := w.packet.key.VIP == netip.MustParseAddr(walker)
	return w.packet.isDestined(r) && (isLocal || !strings.Contains(string(r), "--dst-type LOCAL"))
}

// walker is the only address of the node.
const walker = "192.0.2.1"

// A first packet among 10,000 Services passes at most 200 rules of OUTPUT and POSTROUTING in both tables.
func TestAFirstPacketPassesFewRules(t *testing.T) {
	const services, packets = 10000, 100 // of each kind
	ns, peer := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, ns, []string{walker + "/24"}, peer, []string{"192.0.2.2/24"})
	netnstest.Check(t, ns.AddRoute(netip.MustParsePrefix("10.0.0.0/7"), netip.MustParseAddr("192.0.2.2")))

	c := &bench{variant: VariantLegacy, names: proxier.DefaultNames(), services: newServices(services, 10), ns: ns}
	for i, s := range c.services {
		reach(s, i)
	}
	e := c.engine(t, ns)
	c.apply(t, e, c.fullUpdate())
	t.Logf("%d rules and chains", e.report.Writes)

	walks := &walks{t: t, ns: ns}
	dice := rand.New(rand.NewPCG(7, 8))
	var vips, nodePorts []desired.Key
	for _, i := range dice.Perm(services)[:packets] {
		s := c.services[i]
		vips = append(vips, s.Key(&s.Frontends[0]))
		nodePorts = append(nodePorts, desired.Key{VIP: netip.MustParseAddr(walker), Protocol: desired.TCP, Port: s.Frontends[1].Port})
	}
	walks.read()
	walks.check("cluster IPs", vips)
	walks.check("node ports", nodePorts)
	if err := e.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// walks sends packets and counts the rules that they pass.
type walks struct {
	t             *testing.T
	ns            *netns.NS
	before, after [2]counted
}

func (w *walks) read() {
	w.t.Helper()
	w.before = w.after
	for i, table := range []string{tableNAT, tableFilter} {
		w.after[i] = counters(w.t, w.ns, table)
	}
}

// follow walks all hooks, and returns what happens to the packet.
func (w *walks) follow(key desired.Key) (whole walk, end string) {
	w.t.Helper()
	whole.packet.key = key
	nat, filter := [2]counted{w.before[0], w.after[0]}, [2]counted{w.before[1], w.after[1]}
	if r := whole.through(nat[0], nat[1], "OUTPUT"); r != "" {
		end = r.jumpsTo()
		fields := strings.Fields(string(r))
		to, err := netip.ParseAddrPort(fields[len(fields)-1])
		if err != nil {
			w.t.Fatalf("translation %q: %v", r, err)
		}
		whole.packet.key.VIP, whole.packet.key.Port = to.Addr(), to.Port()
	}
	if r := whole.through(filter[0], filter[1], "OUTPUT"); r != "" {
		return whole, end + r.jumpsTo()
	}
	whole.through(nat[0], nat[1], "POSTROUTING")
	return whole, end
}

// check sends a packet to each destination. No two may be of the same Service, because their
// counters could not be distinguished.
func (w *walks) check(kind string, destinations []desired.Key) {
	w.t.Helper()
	const most = 200
	for _, key := range destinations {
		knock(w.t, w.ns, netip.AddrPortFrom(key.VIP, key.Port))
	}
	w.read()
	longest, total, ends := walk{}, 0, map[string]int{}
	for _, key := range destinations {
		whole, end := w.follow(key)
		ends[end]++
		total += whole.rules
		if whole.rules > longest.rules {
			longest = whole
		}
	}
	w.t.Logf("%s: %d rules at most, %d on average, ends %v; the longest way is %v",
		kind, longest.rules, total/len(destinations), ends, longest.path)
	if ends["DNAT"] == 0 || ends["REJECT"] == 0 || ends["DNAT"]+ends["REJECT"] != len(destinations) {
		w.t.Errorf("%s: %d packets end as %v, want all translated or refused", kind, len(destinations), ends)
	}
	if longest.rules > most {
		w.t.Errorf("%s: a packet passes %d rules, want at most %d", kind, longest.rules, most)
	}
}

// reach adds a node port to a Service; every tenth Service gets no endpoints.
func reach(s *desired.Service, i int) {
	s.Frontends = append(s.Frontends, desired.Frontend{
		Kind: desired.NodePort, Port: uint16(20000 + i), Scope: desired.ScopeCluster, Action: desired.Forward, Masquerade: desired.MasqueradeAll,
	})
	if i%10 != 0 {
		return
	}
	s.Cluster = desired.Endpoints{}
	for j := range s.Frontends {
		s.Frontends[j].Action = desired.Reject
	}
}

// knock sends the first packet of a connection. It does not wait for a response: the packet
// has passed the rules when connect returns.
func knock(t *testing.T, ns *netns.NS, to netip.AddrPort) {
	t.Helper()
	netnstest.Check(t, ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("knock at %v: %w", to, err)
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.ECONNREFUSED) {
			return errors.Join(fmt.Errorf("knock at %v: %w", to, err), unix.Close(fd))
		}
		return unix.Close(fd)
	}))
}
