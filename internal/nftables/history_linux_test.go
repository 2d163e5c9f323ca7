package nftables

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// TestHistories runs random histories of the cluster, the process, the kernel and other
// programs: see package history.
func TestHistories(t *testing.T) { t.Parallel(); history.Test(t, 20, 2, historyPlanes) }

// TestEachCallOfAHistory lets each transaction and each dump of a history fail.
func TestEachCallOfAHistory(t *testing.T) { t.Parallel(); history.TestEachCall(t, historyPlanes) }

// TestHistoriesCatchPlantedBugs checks the histories themselves.
func TestHistoriesCatchPlantedBugs(t *testing.T) {
	t.Parallel()
	history.TestPlanted(t, 1, historyPlanes)
}

func historyPlanes(t *testing.T, seed uint64) (plane, fresh history.Plane) {
	t.Helper()
	p := historyPlane{ns: netnstest.New(t), loadWrites: []int{0, 20, loadWrites}[seed%3], askFrom: []int{0, askFrom}[seed/3%2]}
	if seed%2 == 0 {
		p.shared.Masquerade.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}
	}
	p.shared.Masquerade.All = seed%5 == 0
	p.shared.NodePorts.Primary = seed%7 == 0
	f := p
	f.ns = netnstest.New(t)
	return p, f
}

// historyPlane is a network namespace for histories.
type historyPlane struct {
	ns         *netns.NS
	shared     proxier.Config
	loadWrites int
	askFrom    int
}

// Config implements history.Plane.
func (p historyPlane) Config() proxier.Config {
	c := p.shared
	c.NetNS = p.ns.Path()
	return c
}

// Engines implements history.Plane.
func (p historyPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	engines, shared := map[v1.IPFamily]proxier.Engine{}, newListeners()
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := NewEngine(Config{Config: config}, family, proxier.Deps{})
		if err != nil {
			return nil, err
		}
		e.listeners, e.loadWrites, e.askFrom = shared, p.loadWrites, p.askFrom
		open := e.open
		e.open = func() (k kernel, err error) {
			err = calls.Do(func() error { k, err = open(); return err })
			return &calledKernel{k, calls}, err
		}
		engines[family] = e
	}
	return engines, nil
}

// calledKernel lets a history decide about each call.
type calledKernel struct {
	kernel

	calls *history.Calls
}

func (k *calledKernel) Commit(ctx context.Context, w *nft.Batch) error {
	return k.calls.Do(func() error { return k.kernel.Commit(ctx, w) })
}

func (k *calledKernel) Dump(ctx context.Context, w *nft.Batch, reset func(), each func([]byte)) error {
	return k.calls.Do(func() error { return k.kernel.Dump(ctx, w, reset, each) })
}

func (k *calledKernel) Query(ctx context.Context, w *nft.Batch, each func(int, []byte)) error {
	return k.calls.Do(func() error { return k.kernel.Query(ctx, w, each) })
}

// Damage implements history.Plane.
func (p historyPlane) Damage(number int, o *history.Objects) {
	all := damages()
	names := slices.Sorted(maps.Keys(all))
	family := []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}[number%2]
	used, free := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.77.77")
	if family == v1.IPv6Protocol {
		used, free = netip.MustParseAddr("fd00:96::1"), netip.MustParseAddr("fd00:96::7777")
	}
	for _, s := range o.Services {
		for _, ip := range s.Spec.ClusterIPs {
			if a, err := netip.ParseAddr(ip); err == nil && a.Is4() == used.Is4() {
				used = a
			}
		}
	}
	tryNFT(p.ns, damageTo(p.ns, all[names[number/2%len(names)]], family, used, free))
}

// Kernel implements history.Plane: it reads what the program nft lists.
func (p historyPlane) Kernel() (string, error) {
	return normalForm(parseListing(tryNFT(p.ns, "list", "ruleset"))), nil
}

// listing is what nft lists, by table.
type listing map[string]*listedTable

type listedTable struct {
	elements map[string]map[string]string // of each set, key to data
	chains   map[string]string
	heads    []string // all else
}

var elementsPattern = regexp.MustCompile(`(?s)elements = \{(.*?)\}`)

// parseListing reads the output of nft list ruleset.
func parseListing(text string) listing {
	all := listing{}
	for block := range strings.SplitSeq(text, "\n}\n") {
		head, body, ok := strings.Cut(strings.TrimSpace(block), "\n")
		if !ok {
			continue
		}
		t := &listedTable{elements: map[string]map[string]string{}, chains: map[string]string{}}
		all[strings.TrimSuffix(head, " {")] = t
		for object := range strings.SplitSeq("\n"+body+"\n", "\n\t}\n") {
			t.add(strings.TrimSpace(object))
		}
	}
	return all
}

func (t *listedTable) add(object string) {
	if comment, rest, ok := strings.Cut(object, "\n"); ok && strings.HasPrefix(object, "comment ") {
		t.heads, object = append(t.heads, comment), strings.TrimSpace(rest)
	}
	head, body, ok := strings.Cut(object, " {\n")
	kind, name, isNamed := strings.Cut(head, " ")
	switch {
	case !ok || !isNamed:
		t.heads = append(t.heads, object)
	case kind == "chain":
		t.chains[name] = body
	default:
		t.heads = append(t.heads, head+" "+strings.Join(strings.Fields(elementsPattern.ReplaceAllString(body, "")), " "))
		t.elements[name] = map[string]string{}
		if found := elementsPattern.FindStringSubmatch(body); found != nil {
			for element := range strings.SplitSeq(found[1], ",") {
				key, data, _ := strings.Cut(strings.Join(strings.Fields(element), " "), " : ")
				t.elements[name][key] = data
			}
		}
	}
}

// normalForm is a listing without what depends on history: the numbers of affinity, the
// order of endpoints, and classes that are not in use any more.
func normalForm(all listing) string {
	var lines []string
	for name, t := range all {
		for _, head := range t.heads {
			lines = append(lines, name+" "+head)
		}
		for chain, body := range t.chains {
			if c, ok := parseClass(chain); !ok || t.uses(uint32(c)) {
				lines = append(lines, name+" chain "+chain+": "+strings.Join(strings.Fields(body), " "))
			}
		}
		for set, elements := range t.elements {
			for key, data := range elements {
				if line := t.normal(set, key, data); line != "" {
					lines = append(lines, name+" "+set+": "+line)
				}
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// uses reports whether an element leads to a class.
func (t *listedTable) uses(class uint32) bool {
	for _, set := range []setID{
		setServices, setNodePorts, setFirewalled, setLocals, setNodePortLocals, setShortCircuits, setNodePortShortCircuits, setAffinityCounts,
	} {
		for _, data := range t.elements[setName(set)] {
			if data == markText(class) {
				return true
			}
		}
	}
	for _, set := range []setID{setAffinityKeys, setNodePortAffinityKeys} {
		for _, data := range t.elements[setName(set)] {
			if numberOf(data)&affinitySlotMask == class {
				return true
			}
		}
	}
	return false
}

func markText(n uint32) string { return fmt.Sprintf("0x%08x", n) }

// numberOf parses a mark.
func numberOf(text string) uint32 {
	n, _ := strconv.ParseUint(text, 0, 32)
	return uint32(n)
}

// normal returns an element without history, or "".
func (t *listedTable) normal(set, key, data string) string {
	first, index := key, ""
	if i := strings.LastIndex(key, " . "); i >= 0 {
		first, index = key[:i], key[i+3:]
	}
	switch set {
	case setName(setEndpoints), setName(setNodePortEndpoints):
		return t.withIndex(set, first, numberOf(index), data)
	case setName(setAffinityPicks), setName(setNodePortAffinityPicks):
		return t.withIndex(set, first, numberOf(index), t.elements[setName(setAffinityEndpoints)][data])
	case setName(setAffinityKeys), setName(setNodePortAffinityKeys):
		return fmt.Sprintf("%s : %s timeout %d", key, t.serviceOf(numberOf(data)), numberOf(data)&affinitySlotMask)
	case setName(setAffinityEndpoints):
		return t.serviceOf(numberOf(key)) + " : " + data
	case setName(setAffinityCounts):
		return fmt.Sprintf("%s scope %#x : %s", t.serviceOf(numberOf(key)), numberOf(key)&^affinityIDMask, data)
	case setName(setClasses), setName(setFirewalledClasses), setName(setLocalClasses), setName(setShortCircuitClasses),
		setName(setAffinityDraws), setName(setAffinityTimeouts):
		_, chain, _ := strings.Cut(data, " ")
		if c, ok := parseClass(chain); ok && uint32(c) == numberOf(key) && !t.uses(uint32(c)) {
			return ""
		}
	}
	return key + " : " + data
}

// withIndex returns the endpoint without its index; the list must have no gap.
func (t *listedTable) withIndex(set, first string, index uint32, endpoint string) string {
	gap := ""
	if index&^(localOffset|ownBit) > 0 {
		if _, ok := t.elements[set][first+" . "+markText(index-1)]; !ok {
			gap = " after a gap"
		}
	}
	return fmt.Sprintf("%s scope %#x : %s%s", first, index&(localOffset|ownBit), endpoint, gap)
}

// serviceOf names the service port with an affinity number by its frontends.
func (t *listedTable) serviceOf(number uint32) string {
	var frontends []string
	for _, set := range []setID{setAffinityKeys, setNodePortAffinityKeys} {
		for key, data := range t.elements[setName(set)] {
			if numberOf(data)&affinityIDMask == number&affinityIDMask {
				frontends = append(frontends, key)
			}
		}
	}
	slices.SortFunc(frontends, cmp.Compare)
	return strings.Join(frontends, "+")
}
