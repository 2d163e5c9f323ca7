package history_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// scratch is an engine from scratch: it gives the whole table of its family to the program nft each time. It has
// no session affinity, and no rules for pods that reach themselves.
type scratch struct {
	family string // ip or ip6
	table  string
	pods   []netip.Prefix
	run    runner

	mu       sync.Mutex // guards all below
	services map[changetracker.ServicePortName]*desired.Service
	globals  desired.Globals
	text     string // of the table, as nft lists it; "" is no table
}

// runner runs nft in the network namespace of the node.
type runner func(ctx context.Context, input string, args ...string) (output string, err error)

func nftIn(netNS string) runner {
	return func(ctx context.Context, input string, args ...string) (output string, err error) {
		var failure bytes.Buffer
		cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + netNS, "nft"}, args...)...)
		cmd.Stdin, cmd.Stderr = strings.NewReader(input), &failure
		text, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("nft %s: %w: %s", strings.Join(args, " "), err, failure.String())
		}
		return string(text), err
	}
}

func newScratch(config proxier.Config, family v1.IPFamily, run runner) *scratch {
	s := &scratch{family: "ip", table: "scratch", run: run}
	if family == v1.IPv6Protocol {
		s.family = "ip6"
	}
	for _, p := range config.Masquerade.PodCIDRs {
		if p.Addr().Is4() == (s.family == "ip") {
			s.pods = append(s.pods, p)
		}
	}
	return s
}

// Apply implements proxier.Engine.
func (s *scratch) Apply(ctx context.Context, update desired.Update) (result proxier.Result, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	services := map[changetracker.ServicePortName]*desired.Service{}
	if !update.Full {
		maps.Copy(services, s.services)
	}
	for _, change := range update.Changes {
		if delete(services, change.Name); change.After != nil {
			services[change.Name] = change.After
		}
	}
	text := s.render(services, &update.Globals)
	if update.Full {
		if s.text, err = s.list(ctx); err != nil {
			return result, err
		}
	}
	if text != s.text {
		input := fmt.Sprintf("table %s %s\ndelete table %[1]s %[2]s\n%s", s.family, s.table, text)
		if _, err = s.run(ctx, input, "-f", "-"); err != nil {
			return result, err
		}
		result.Report = proxier.ApplyReport{Writes: strings.Count(text, "\n"), Transactions: 1}
	}
	s.services, s.globals, s.text = services, update.Globals, text
	return result, nil
}

// list returns the table as it is in the kernel.
func (s *scratch) list(ctx context.Context) (text string, err error) {
	tables, err := s.run(ctx, "", "list", "tables", s.family)
	if err != nil || !slices.Contains(strings.Split(tables, "\n"), "table "+s.family+" "+s.table) {
		return "", err
	}
	return s.run(ctx, "", "-s", "list", "table", s.family, s.table)
}

// render returns the table of service ports, as nft lists it.
func (s *scratch) render(services map[changetracker.ServicePortName]*desired.Service, globals *desired.Globals) string {
	var nat, filter, chains []string
	names := make([]changetracker.ServicePortName, 0, len(services))
	for name := range services {
		names = append(names, name)
	}
	slices.SortFunc(names, changetracker.ServicePortName.Compare)
	for _, name := range names {
		service := services[name]
		for i := range service.Frontends {
			f := &service.Frontends[i]
			n, l := s.frontend(service, f, globals)
			nat, filter = append(nat, n...), append(filter, l...)
		}
		for _, scope := range []desired.Scope{desired.ScopeCluster, desired.ScopeLocal} {
			if endpoints := service.Endpoints(scope); endpoints.Len() > 0 {
				chains = append(chains, chain(chainOf(name, scope), s.endpoints(service, endpoints)...))
			}
		}
	}
	all := []string{
		chain("services", nat...), chain("refused", filter...),
		chain("prerouting", "type nat hook prerouting priority dstnat; policy accept;", "jump services"),
		chain("output", "type nat hook output priority -100; policy accept;", "jump services"),
		chain("postrouting", "type nat hook postrouting priority srcnat; policy accept;", "meta mark & 0x00010000 == 0x00010000 masquerade"),
	}
	for _, hook := range []string{"input", "forward", "output"} {
		all = append(all, chain("filter-"+hook, "type filter hook "+hook+" priority filter; policy accept;", "jump refused"))
	}
	return fmt.Sprintf("table %s %s {\n%s}\n", s.family, s.table, strings.Join(append(chains, all...), "\n"))
}

func chain(name string, rules ...string) string {
	var text strings.Builder
	fmt.Fprintf(&text, "\tchain %s {\n", name)
	for _, rule := range rules {
		fmt.Fprintf(&text, "\t\t%s\n", rule)
	}
	text.WriteString("\t}\n")
	return text.String()
}

func chainOf(name changetracker.ServicePortName, scope desired.Scope) string {
	return strings.ToLower(fmt.Sprintf("%s/%s/%s/%s/%v", name.Namespace, cmp.Or(name.Name, "-"), cmp.Or(name.Port, "-"), name.Protocol, scope))
}

// frontend returns the rules of one frontend: some translate, and some refuse.
func (s *scratch) frontend(service *desired.Service, f *desired.Frontend, globals *desired.Globals) (nat, filter []string) {
	protocol := strings.ToLower(service.Protocol.String())
	at := []string{fmt.Sprintf("%s daddr %v %s dport %d ", s.family, f.VIP, protocol, f.Port)}
	if f.Kind == desired.NodePort {
		at = nil
		for _, p := range globals.NodePortAddresses {
			at = append(at, fmt.Sprintf("fib daddr type local %s%s dport %d ", s.in("daddr", p), protocol, f.Port))
		}
	}
	for _, match := range at {
		if f.Restricted {
			nat = append(nat, match+s.not("saddr", f.SourceRanges)+"drop")
		}
		switch {
		case f.Action == desired.Drop && !f.ShortCircuit:
			nat = append(nat, match+"drop")
		case f.Action == desired.Reject:
			filter = append(filter, match+"reject")
		case f.Masquerade == desired.MasqueradeAll:
			nat = append(nat, match+"meta mark set meta mark | 0x00010000")
		case f.Masquerade == desired.MasqueradeNonPod:
			nat = append(nat, match+s.not("saddr", s.pods)+"meta mark set meta mark | 0x00010000")
		}
		if f.Action == desired.Forward {
			nat = append(nat, match+"goto "+chainOf(service.Name, f.Scope))
		}
	}
	return nat, filter
}

// in matches a field by a prefix, and not by none of several.
func (s *scratch) in(field string, p netip.Prefix) string {
	if p.Bits() == 0 {
		return ""
	}
	return fmt.Sprintf("%s %s %v ", s.family, field, short(p))
}

func (s *scratch) not(field string, prefixes []netip.Prefix) (text string) {
	for _, p := range prefixes {
		text += fmt.Sprintf("%s %s != %v ", s.family, field, short(p))
	}
	return text
}

func short(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

// endpoints chooses one by chance.
func (s *scratch) endpoints(service *desired.Service, endpoints desired.Endpoints) (rules []string) {
	left := endpoints.Len()
	for addr := range endpoints.All() {
		rule := fmt.Sprintf("meta l4proto %s dnat to %v", strings.ToLower(service.Protocol.String()), addr)
		if left > 1 {
			rule = fmt.Sprintf("numgen random mod %d 0 ", left) + rule
		}
		rules = append(rules, rule)
		left--
	}
	return rules
}

// Cleanup implements proxier.Engine.
func (s *scratch) Cleanup(ctx context.Context) error {
	_, err := s.run(ctx, fmt.Sprintf("table %s %s\ndelete table %[1]s %[2]s\n", s.family, s.table), "-f", "-")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.services, s.text = nil, ""
	return err
}

// Close implements proxier.Engine: there is nothing to release.
func (s *scratch) Close() error { return nil }

// Traits implements proxier.Engine.
func (s *scratch) Traits(*desired.Service) desired.Traits { return desired.Traits{} }

// Abilities implements proxier.Engine.
func (s *scratch) Abilities() proxier.Abilities {
	return proxier.Abilities{OwnsNames: true, Verify: s.verify, Watch: s.watch}
}

// verify compares the lines of the table.
func (s *scratch) verify(ctx context.Context, update desired.Update) (v proxier.Verification, err error) {
	services := map[changetracker.ServicePortName]*desired.Service{}
	for service := range update.Services() {
		services[service.Name] = service
	}
	have, err := s.list(ctx)
	if err != nil {
		return v, err
	}
	wanted, there := lines(s.render(services, &update.Globals)), lines(have)
	v.Checked = len(wanted)
	for _, line := range wanted {
		if !slices.Contains(there, line) {
			v.Differences = append(v.Differences, proxier.Difference{Object: line, Problem: proxier.DifferenceMissing})
		}
	}
	for _, line := range there {
		if !slices.Contains(wanted, line) {
			v.Differences = append(v.Differences, proxier.Difference{Object: line, Problem: proxier.DifferenceUnexpected})
		}
	}
	return v, nil
}

// lines are those of a table, each with its chain.
func lines(table string) (all []string) {
	chain := ""
	for line := range strings.Lines(table) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "chain ") {
			chain = line
		}
		all = append(all, chain+line)
	}
	return all
}

// watch reads the table now and then.
func (s *scratch) watch(ctx context.Context, damaged func(proxier.Damage)) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		s.mu.Lock()
		have, err := s.list(ctx)
		differs := err == nil && s.services != nil && have != s.text
		s.mu.Unlock()
		if err != nil && !errors.Is(err, context.Canceled) && ctx.Err() == nil {
			damaged(proxier.Damage{}) // nobody knows
		}
		if differs {
			damaged(proxier.Damage{Object: "table " + s.family + " " + s.table})
		}
	}
}
