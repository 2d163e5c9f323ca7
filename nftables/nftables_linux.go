package nftables

import (
	v1 "k8s.io/api/core/v1"

	engine "github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// NewEngine returns the engine of one family. It writes nothing before the first Apply, which programs all service ports or
// none; Watch reads the table before, if an earlier process has left one. Cleanup deletes the table. Close closes the netlink socket; the
// kernel objects stay.
//
// Watch pauses during our own large changes, which it would slow down
// tenfold; it then compares the numbers of transactions. The text of Plan is for people: rules are in nft's
// syntax, and each element has a line; nft cannot load it. Dump reads the elements and the names of the chains
// from the kernel, and prints the rules that the engine wants in them. Verify compares the table, its sets
// and chains, each element, and the expressions of each rule, but no records of session affinity.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
	e, err := engine.NewEngine(engine.Config(config), family, deps)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// New returns a Provider with an nftables engine for each family of the config. It also
// deletes stale UDP flows and serves health check node ports, unless deps replace that.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	return engine.New(engine.Config(config), deps)
}
