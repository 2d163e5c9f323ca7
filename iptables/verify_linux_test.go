package iptables

import (
	"context"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// plant is a damage by commands of iptables, and the differences that Verify must find: problem,
// Service or "-", and the beginning of the object. Names in braces are chains.
type plant struct {
	commands []string
	want     []string
}

func plants() map[string]plant {
	by := func(command string, want ...string) plant { return plant{[]string{command}, want} }
	return map[string]plant{
		"rule inserted":          by("-t nat -I {SERVICES} -j RETURN", "unexpected - rule -A {SERVICES} -j RETURN in table nat of iptables"),
		"rule appended":          by("-t filter -A {FORWARD} -j ACCEPT", "unexpected - rule -A {FORWARD} -j ACCEPT in table filter of iptables"),
		"rule twice":             by("-t nat -A {MARK} -j MARK --set-xmark 0x4000/0x4000", "unexpected - rule -A {MARK} -j MARK --set-xmark 0x4000/0x4000"),
		"first rule deleted":     by("-t nat -D {POSTROUTING} 1", "missing - rule -A {POSTROUTING} -m conntrack --ctstate DNAT"),
		"last rule deleted":      by("-t nat -D {POSTROUTING} 4", "missing - rule -A {POSTROUTING} -m comment --comment \"kubernetes service traffic requiring SNAT\""),
		"rule replaced":          by("-t nat -R {MARK} 1 -j MARK --set-xmark 0x8000/0x8000", "missing - rule -A {MARK} -j MARK --set-xmark 0x4000/0x4000", "unexpected - rule -A {MARK} -j MARK --set-xmark 0x8000/0x8000"),
		"rules in another order": {[]string{"-t nat -D {POSTROUTING} 2", "-t nat -A {POSTROUTING} -m mark ! --mark 0x4000/0x4000 -j RETURN"}, []string{"different - order of the rules of chain {POSTROUTING} in table nat"}},
		"chain added":            by("-t nat -N {SVC}", "unexpected - chain {SVC} in table nat"),
		"chain with a rule":      {[]string{"-t filter -N {SVC}", "-t filter -A {SVC} -j DROP"}, []string{"unexpected - chain {SVC} in table filter"}},
		"chain in use":           {[]string{"-t filter -N {SVL}", "-t filter -N somebody", "-t filter -A somebody -j {SVL}"}, nil},
		"jump deleted":           by("-t nat -D PREROUTING 1", "missing - rule -A PREROUTING -m comment --comment \"kubernetes service portals\" -j {SERVICES} in table nat"),
		"jump with other words":  {[]string{"-t nat -D PREROUTING 1", "-t nat -I PREROUTING -m comment --comment \"other words\" -j {SERVICES}"}, nil},
		"jump elsewhere":         by("-t filter -A FORWARD -s 192.0.2.1/32 -j {SERVICES}", "unexpected - rule -A FORWARD -s 192.0.2.1/32 -j {SERVICES} in table filter"),
		"other jump":             by("-t nat -A POSTROUTING -j {MARK}", "unexpected - rule -A POSTROUTING -j {MARK} in table nat"),
		"built-in chain flushed": by("-t filter -F INPUT", "missing - rule -A INPUT -m comment --comment \"block incoming localnet connections\"", "missing - rule -A INPUT -m comment --comment \"kubernetes health check service ports\"", "missing - rule -A INPUT -m conntrack --ctstate NEW"),
		"loopback open":          by("-t filter -D {LOCALNET} 1", "missing - rule -A {LOCALNET} ! -s 127.0.0.0/8"),
		"endpoint deleted":       by("-t nat -D {WEB} 1", "missing web-0 rule -A {WEB} "),
		"endpoint added":         by("-t nat -I {WEB} -p tcp -j DNAT --to-destination 192.0.2.7:80", "unexpected web-0 rule -A {WEB} -p tcp -j DNAT --to-destination 192.0.2.7:80"),
		"frontend deleted":       by("-t nat -D {SERVICES} -d 10.96.0.0/32 -p tcp -m comment --comment \"test/web-0:http cluster IP\" -m tcp --dport 80 -j {WEB}", "missing web-0 rule -A {SERVICES} -d 10.96.0.0/32 -p tcp"),
		"frontend refused":       by("-t filter -I {SERVICES} -d 10.96.0.0/32 -p tcp -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable", "unexpected - rule -A {SERVICES} -d 10.96.0.0/32 -p tcp -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable in table filter"),
		"node ports unreachable": by("-t nat -F {NODEPORTS}", "missing web-0 rule -A {NODEPORTS} -d 127.0.0.0/8 -p tcp", "missing web-0 rule -A {NODEPORTS} -d 127.0.0.0/8 -p udp",
			"missing web-0 rule -A {NODEPORTS} -p tcp", "missing web-0 rule -A {NODEPORTS} -p udp"),
		"hairpin flushed": by("-t nat -F {HAIRPIN}", "missing - rule -A {HAIRPIN} -s 10.244.0.2/32 -d 10.244.0.2/32"),
		"foreign rule":    by("-t filter -A INPUT -s 192.0.2.9/32 -j DROP"),
		"foreign chain":   by("-t filter -N nobody"),
	}
}

// hiding keeps the last full Update, and hides that the engine can watch: nothing is repaired.
type hiding struct {
	proxier.Engine

	full desired.Update
}

func (h *hiding) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	if u.Full {
		h.full = u
	}
	return h.Engine.Apply(ctx, u)
}

// TestVerifyNamesEachDamage changes the tables as another program: Verify names what was changed
// and nothing else, and writes nothing.
func TestVerifyNamesEachDamage(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		h := &hiding{}
		provider, stop := w.startDeps(proxier.Deps{Wrap: func(family v1.IPFamily, e proxier.Engine) (proxier.Engine, error) {
			if family == v1.IPv6Protocol {
				return e, nil
			}
			h.Engine = e
			return h, nil
		}})
		add(provider, 0, 1)
		provider.OnServiceSynced()
		provider.OnEndpointSlicesSynced()
		w.sync(provider)
		stop()
		for what, p := range plants() {
			t.Run(what, func(t *testing.T) { p.verify(t, w, h) })
		}
	})
}

func (p plant) verify(t *testing.T, w *world, h *hiding) {
	e, _ := h.Engine.(*engine)
	n := e.config.chains()
	web := changetracker.ServicePortName{Port: "http", Protocol: v1.ProtocolTCP}
	web.Namespace, web.Name = "test", "web-0"
	r := strings.NewReplacer("{SERVICES}", n.services(), "{FORWARD}", n.forward(), "{MARK}", n.mark(), "{POSTROUTING}", n.postrouting(), "{LOCALNET}", n.localnet(),
		"{NODEPORTS}", n.nodePorts(), "{HAIRPIN}", n.hairpin(), "{SVC}", n.cluster("nobody"), "{SVL}", n.local("nobody"), "{WEB}", n.cluster(identity(web)))
	for _, command := range p.commands {
		w.run("sh", "-c", "iptables-"+string(w.variant)+" -w "+r.Replace(command))
	}
	before := w.save()
	report, err := e.Verify(t.Context(), h.full)
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	var got []string
	for _, d := range report.Differences {
		service := d.Service.Name
		if service == "" {
			service = "-"
		}
		got = append(got, d.Problem+" "+service+" "+d.Object)
	}
	slices.Sort(got)
	if !slices.EqualFunc(got, p.want, func(got, want string) bool { return strings.HasPrefix(got, r.Replace(want)) }) {
		t.Errorf("%q\nfound %q\nwant  %q", p.commands, got, p.want)
	}
	if after := w.save(); after != before {
		t.Errorf("Verify has changed the tables:\n%s\nthey were\n%s", after, before)
	}
	if _, err := e.Apply(t.Context(), h.full); err != nil {
		t.Fatalf("repair: %v", err)
	}
	if report, err = e.Verify(t.Context(), h.full); err != nil || len(report.Differences) > 0 {
		t.Errorf("after the repair: %v, %v", report.Differences, err)
	}
}
