package nftables

import (
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestDamageBesideASyncIsRepaired damages the table before, during and after a sync of
// something else. The listener notices it, or, while it pauses, the number of transactions
// does.
func TestDamageBesideASyncIsRepaired(t *testing.T) {
	t.Parallel()
	moments := map[string]func(r *recorder, damage, sync func()){
		"before":           func(_ *recorder, damage, sync func()) { damage(); sync() },
		"after":            func(_ *recorder, damage, sync func()) { sync(); damage() },
		"before and after": func(_ *recorder, damage, sync func()) { damage(); sync(); damage() },
		"before the write": func(r *recorder, damage, sync func()) { r.before.Store(&damage); sync() },
		"after the write":  func(r *recorder, damage, sync func()) { r.after.Store(&damage); sync() },
		"within the repair": func(r *recorder, damage, sync func()) {
			sync()
			r.before.Store(&damage)
			r.after.Store(&damage)
			damage()
		},
		"beside it": func(_ *recorder, damage, change func()) { // what comes first is left to chance
			var done sync.WaitGroup
			done.Go(damage)
			change()
			done.Wait()
		},
	}
	for _, what := range []string{
		"ruleset flushed", "chain flushed", "base chain deleted", "element deleted", "endpoints all gone", "rule replaced", "element replaced",
	} {
		for moment, order := range moments {
			for listening, writes := range map[string]int{"listening": loadWrites, "not listening": 0} {
				t.Run(what+"/"+moment+"/"+listening, func(t *testing.T) {
					t.Parallel()
					repairsBesideASync(t, startWatchedAside(t, 20, writes), damages()[what], order)
				})
			}
		}
	}
}

// repairsBesideASync does a damage and a sync in some order.
func repairsBesideASync(t *testing.T, w *watched, script string, order func(r *recorder, damage, sync func())) {
	t.Helper()
	there, back := replaced(w.cluster.slices[7], 1), w.cluster.slices[7]
	w.OnEndpointSliceUpdate(nil, there)
	w.sync(t)
	want := canonical(mustList(t, w.ns))
	w.OnEndpointSliceUpdate(nil, back)
	w.sync(t)
	order(w.recorder, func() { tryNFT(w.ns, w.damage(script)) }, func() {
		w.OnEndpointSliceUpdate(nil, there)
		if err := proxiertest.Sync(t.Context(), w); err != nil {
			t.Logf("sync: %v", err) // it is tried again
		}
	})
	var got string
	if !poll.Soon(func() bool { got = canonical(tryNFT(w.ns, "list ruleset")); return got == want }) {
		t.Fatalf("not repaired within %v: %+v\nmore than before: %q\nless: %q", poll.Timeout, w.family(), without(got, want), without(want, got))
	}
}

// without returns the words of a canonical ruleset that another one does not have, or not as
// often.
func without(ruleset, other string) (words []string) {
	left := map[string]int{}
	for word := range strings.FieldsSeq(other) {
		left[word]++
	}
	for word := range strings.FieldsSeq(ruleset) {
		if left[word]--; left[word] < 0 {
			words = append(words, word)
		}
	}
	return words
}

// damages are changes by another program, for damageTo.
func damages() map[string]string {
	return map[string]string{
		"ruleset flushed":      "flush ruleset",
		"table deleted":        "delete table IP serviceplane",
		"table made dormant":   "add table IP serviceplane { flags dormant; }",
		"chain flushed":        "flush chain IP serviceplane services",
		"base chain deleted":   "delete chain IP serviceplane postrouting",
		"rule added":           "insert rule IP serviceplane services drop",
		"rule with set added":  "insert rule IP serviceplane pick tcp dport { 80, 443 } drop",
		"rule replaced":        "replace rule IP serviceplane services handle HANDLE drop",
		"chain added":          "add chain IP serviceplane foreign",
		"base chain added":     "add chain IP serviceplane prerouting2 { type nat hook prerouting priority -150; }",
		"set added":            "add set IP serviceplane foreign { type mark; }",
		"element added":        "add element IP serviceplane cluster-ips { FREE }",
		"element deleted":      "delete element IP serviceplane cluster-ips { USED }",
		"element replaced":     "delete element IP serviceplane cluster-ips { USED }; add element IP serviceplane cluster-ips { FREE }",
		"endpoints all gone":   "flush map IP serviceplane endpoints",
		"classes lead nowhere": "flush map IP serviceplane classes",
		"intervals flushed":    "flush set IP serviceplane nodeport-addresses",
	}
}

// damageTo fills a damage in for the table of a family, with a ClusterIP and an address
// that is not one.
func damageTo(ns *netns.NS, script string, family v1.IPFamily, used, free netip.Addr) string {
	ip := ipKeyword(family)
	text := tryNFT(ns, "-a", "list", "chain", ip, "serviceplane", "services")
	_, handle, _ := strings.Cut(text[max(0, strings.LastIndex(text, "# handle ")):], "# handle ")
	handle, _, _ = strings.Cut(handle, "\n")
	return strings.NewReplacer("IP", ip, "HANDLE", handle, "USED", used.String(), "FREE", free.String()).Replace(script)
}

func (w *watched) damage(script string) string {
	return damageTo(w.ns, script, v1.IPv4Protocol, netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.99.3"))
}

// tryNFT runs a script of nft, which may fail if the object is missing.
func tryNFT(ns *netns.NS, script ...string) (text string) {
	_ = ns.Do(func() error {
		out, err := exec.Command("nft", script...).CombinedOutput()
		text = string(out)
		return err
	})
	return text
}
