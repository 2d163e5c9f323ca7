package nodeproxy

import (
	"errors"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestACleanupSaysNothingAboutNodePorts: the engine that removes the objects of another mode accepts
// none, whatever those of this mode do.
func TestACleanupSaysNothingAboutNodePorts(t *testing.T) {
	for _, addresses := range []string{"localhost", "primary,localhost", "127.0.0.0/8,::1/128", "all"} {
		o := parse(t, "--nodeport-addresses="+addresses)
		config, err := o.config("node-1")
		if err != nil {
			t.Fatal(err)
		}
		config.NetNS = netnstest.New(t).Path()
		core, logs := observer.New(zap.InfoLevel)
		for _, m := range []mode{modeNFTables, modeIPTables, modeIPVS} {
			if err := o.cleanUpMode(t.Context(), m, config, zap.New(core)); err != nil && !errors.Is(err, proxier.ErrNotSupported) {
				t.Errorf("%s, node ports at %s: %v", m, addresses, err)
			}
		}
		for _, line := range logs.All() {
			if strings.Contains(line.Message, "node ports") {
				t.Errorf("node ports at %s: the log has %q", addresses, line.Message)
			}
		}
	}
}
