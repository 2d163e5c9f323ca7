package nodeproxy

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// TestTheSocketTracesPackets that it sends itself, and names the rule that drops one.
func TestTheSocketTracesPackets(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	state := filepath.Join(t.TempDir(), "state")
	socket := filepath.Join(state, "debug.sock")
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+state, "--metrics-bind-address=", "--debug-bind-address=127.0.0.1:10290")
	p.waitHealthy()
	poll.Until(t, "the socket", func() bool { return dialsSocket(socket) })
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", socket)
	}}}
	query := url.Values{"protocol": {"TCP"}, "source": {"192.0.2.1"}, "destination": {vip4}, "origin": {"outside"}, "send": {"true"}, "netns": {c.client.Path()}}
	trace := func() (answer struct {
		Verdict, By, Sent string
		Agrees            bool
		Steps             []struct{ Table string }
	},
	) {
		t.Helper()
		response, err := client.Post("http://localhost/trace?"+query.Encode(), "", nil)
		netnstest.Check(t, err)
		defer func() { _ = response.Body.Close() }()
		netnstest.Check(t, json.NewDecoder(response.Body).Decode(&answer))
		return answer
	}
	if got := trace(); got.Verdict != "translated" || !got.Agrees || len(got.Steps) == 0 {
		t.Errorf("%+v, want it translated", got)
	}
	c.nft("add table inet foreign; add chain inet foreign strict { type filter hook forward priority 0; }; add rule inet foreign strict tcp dport 8080 drop")
	if got := trace(); got.Verdict != "dropped" || got.Agrees || !strings.Contains(got.By, "'tcp dport 8080 drop'") || !strings.Contains(got.By, "table inet foreign: not a rule of this proxy") {
		t.Errorf("%+v, want it dropped by the rule", got)
	}
}
