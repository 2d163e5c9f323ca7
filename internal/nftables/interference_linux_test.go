package nftables

import (
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// TestDamageBesideASyncIsRepaired: whatever somebody destroys, before, while and after
// something else is synced, soon the table is what it must be. The listener hears of
// it; while the engine writes much and does not listen, the number of transactions
// tells.
func TestDamageBesideASyncIsRepaired(t *testing.T) {
	t.Parallel()
	damages := map[string]string{
		"ruleset flushed":    "flush ruleset",
		"chain flushed":      "flush chain ip serviceplane services",
		"base chain deleted": "delete chain ip serviceplane postrouting",
		"element deleted":    "delete element ip serviceplane cluster-ips { 10.0.0.3 }",
		"endpoints all gone": "flush map ip serviceplane endpoints",
		"rule replaced":      "replace rule ip serviceplane services handle HANDLE drop",
		"element replaced":   "delete element ip serviceplane cluster-ips { 10.0.0.3 }; add element ip serviceplane cluster-ips { 10.0.99.3 }",
	}
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
	for what, script := range damages {
		for moment, order := range moments {
			for listening, writes := range map[string]int{"listening": loadWrites, "not listening": 0} {
				t.Run(what+"/"+moment+"/"+listening, func(t *testing.T) {
					t.Parallel()
					repairsBesideASync(t, startWatchedAside(t, 20, writes), script, order)
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
	order(w.recorder, func() { tryNFT(w.ns, strings.Replace(script, "HANDLE", lastRule(w.ns), 1)) }, func() {
		w.OnEndpointSliceUpdate(nil, there)
		if err := w.Sync(t.Context()); err != nil {
			t.Logf("sync: %v", err) // it is tried again
		}
	})
	poll.Until(t, "repair", func() bool { return canonical(tryNFT(w.ns, "list ruleset")) == want })
}

// lastRule is the handle of the last rule of a chain.
func lastRule(ns *netns.NS) string {
	text := tryNFT(ns, "-a", "list", "chain", "ip", "serviceplane", "services")
	_, handle, _ := strings.Cut(text[max(0, strings.LastIndex(text, "# handle ")):], "# handle ")
	handle, _, _ = strings.Cut(handle, "\n")
	return handle
}

// tryNFT runs a script of nft, which fails if it finds nothing.
func tryNFT(ns *netns.NS, script ...string) (text string) {
	_ = ns.Do(func() error {
		out, err := exec.Command("nft", script...).CombinedOutput()
		text = string(out)
		return err
	})
	return text
}
